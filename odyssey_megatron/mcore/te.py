"""Transformer Engine's layers: their gradients add up, whichever microbatch comes first.

Written against the sources of Transformer Engine 2.3 to 2.18; no GPU has run it.

Megatron's wrappers hand TE ``is_first_microbatch``: True for the first forward of a module (core_v0.16.1
core/extensions/transformer_engine.py, lines 515 and 671; the same in core_v0.19.0). Where gradient accumulation is
fused, TE takes it for "overwrite ``main_grad``" in the backward of that very microbatch (v2.9
pytorch/module/linear.py, line 824; the same in v2.2 and v2.18). That its weight gradient is also the first to come
is true of Megatron's schedule, not of Odyssey's: here weight gradients wait, and a layer that is built in a recovery
takes over the sums of an interrupted step. False would mean that weights cast to fp8 for an earlier microbatch are
still good. With None TE always adds, and keeps nothing.
"""

from __future__ import annotations

from typing import Any

from odyssey_megatron.errors import ConfigError

_QUANTIZED = "fp8", "fp4", "use_kitchen", "quant_recipe"


def prepare(config: Any) -> None:
    """Of Megatron's transformer ``config``, before a model is built of it. Raises ConfigError."""
    if given := [name for name in _QUANTIZED if getattr(config, name, None)]:
        raise ConfigError(
            f"{', '.join(given)} of the transformer config: quantized training does not work with Odyssey yet. The "
            "scales of its tensors do not move with a layer, and each rank would keep its own. Use bf16."
        )
    # The wrappers then pass is_first_microbatch=None. All four tags read it for nothing else.
    config.disable_parameter_transpose_cache = True
