"""Transformer Engine's layers: gradients that always accumulate, weight gradients apart from input gradients, and fp8.

Written against the sources of Transformer Engine 2.3 to 2.18. Its Python modules of 2.11 run it in ``tests/te``, on a
CPU; no GPU has.

**Accumulating.** Megatron's wrappers pass ``is_first_microbatch`` to TE: True for the first forward of a module
(core_v0.16.1 core/extensions/transformer_engine.py, lines 515 and 671; the same in core_v0.19.0). Where gradient
accumulation is fused, TE takes it to mean "overwrite ``main_grad``" in the backward of that microbatch (v2.9
pytorch/module/linear.py, line 824; the same in v2.2 and v2.18). In Megatron's schedule the first microbatch's weight
gradient is also the first to be computed. In Odyssey's it need not be: weight gradients wait, and a layer that is built
in a recovery takes over the sums of an interrupted step. False would mean that weights cast to fp8 for an earlier
microbatch are still valid. With None TE always accumulates, and keeps nothing.

**Apart.** A linear layer of TE's has a ``wgrad_store``. If the weight gradient is to wait, its backward puts the inputs
and the function that computes it there (pytorch/module/_common.py, ``WeightGradStore``, since 2.3). TE's own store is a
queue for each module, which Megatron's ``delay_wgrad_compute`` empties in the order of the backwards. :class:`Later`
replaces it: here what waits belongs to its microbatch, as with Megatron's own layers. So the table of an interrupted
step (``plan/scheduling/resume.py``) is right about it, activations live as long as the plan assumes, and what an
abandoned step leaves goes with that step. Recomputation needs nothing special: its first forward records no backward.
Megatron's flag stays off, since it would also take parameters out of the DDP hooks that Odyssey's blocks have
(core_v0.16.1 distributed_data_parallel.py, line 328).

**fp8.** Three recipes keep nothing from one microbatch to the next: the scales of a tensor are computed from its
contents alone (v2.18 quantization.py, ``is_stateless_recipe``). With these TE does not touch what it keeps for delayed
scaling (v2.3 pytorch/fp8.py, line 251; v2.9 quantization.py, line 371; v2.18, line 512), and the amaxes that current
scaling reduces are those of one sequence, over the ranks of the cell (v2.9 pytorch/module/linear.py, line 1653).
Weights are bf16 and cast in each forward: whether TE reuses its copies of them depends on ``is_first_microbatch`` (v2.9
linear.py, line 257), which is None here. So what a layer computes is a function of its weights and its input, as in
bf16, and a layer moves as in bf16. The backward is not split.

Where splitting is not certain to be right (:func:`why_whole`), the whole backward runs at the input gradient, which is
always right. TE's debug mode (nvdlfw_inspect) ends with TE's own message: it does not support delayed weight gradients
(v2.18 pytorch/module/base.py, line 1948).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.model import wgrad
from odyssey_megatron.mcore.model.flat import mark_duplicated
from odyssey_megatron.upstream import compat
from odyssey_megatron.upstream.refused import STATELESS

_QUANTIZED = "fp8_param", "fp4", "use_kitchen", "quant_recipe"
_ELSEWHERE = "tp_comm_overlap", "cpu_offloading", "fine_grained_activation_offloading"
READS_LATE = "2.6.0"
"""From this version on TE looks up ``main_grad`` in the backward (v2.6 pytorch/module/linear.py, lines 429 and 485),
before it in the forward (v2.5, line 400).
"""


def prepare(config: Any) -> None:
    """Check and adjust Megatron's transformer ``config`` before a model is built from it. Raises ConfigError."""
    if given := [name for name in _QUANTIZED if getattr(config, name, None)]:
        raise ConfigError(
            f"{', '.join(given)} of the transformer config: quantized training does not work with Odyssey yet, but for "
            "fp8 with bf16 weights. The scales of its tensors do not move with a layer, and each rank would keep its "
            "own. Use bf16."
        )
    if getattr(config, "fp8", None):
        _check_fp8(config)
    # The wrappers then pass is_first_microbatch=None. All four tags use this setting for nothing else.
    config.disable_parameter_transpose_cache = True


def _check_fp8(config: Any) -> None:
    """Raise ConfigError if fp8 cannot work. Without Transformer Engine Megatron would silently train in bf16."""
    if config.fp8_recipe not in STATELESS:
        raise ConfigError(
            f"fp8_recipe {config.fp8_recipe} of the transformer config goes by what each rank has seen before, which "
            f"does not move with a layer. Use {', '.join(STATELESS[:-1])} or {STATELESS[-1]}."
        )
    if not compat.transformer_engine_is("2.3.0"):
        raise ConfigError(
            "fp8 needs Transformer Engine 2.3 or newer, and a GPU. Install it, or leave out --fp8-format."
        )


class Later:
    """A module's ``wgrad_store`` that keeps weight gradients with their microbatch; outside of one they run at once."""

    def __init__(self, weight: torch.nn.Parameter, *, fused: bool):
        """``fused``: TE itself adds to ``main_grad`` (--gradient-accumulation-fusion)."""
        self._weight, self._fused = weight, fused

    def delay_wgrad_compute(self) -> bool:
        """Whether to delay; TE asks in the backward, and since 2.16 in the forward, too."""
        return True

    def put(self, tensor_list: Sequence[Any], func: Callable[..., Any]) -> None:
        """As TE's own: the first result of ``func(*tensor_list)`` is the weight gradient."""

        def add() -> None:
            gradient = func(*tensor_list)[0]
            if not self._fused:
                self._weight.main_grad.add_(gradient)  # type: ignore[attr-defined]

        wgrad.later(self._weight, add)


def split(module: torch.nn.Module, config: Any) -> None:
    """Make TE's linear layers in ``module`` leave their weight gradients for later, where :func:`why_whole` is None.

    Raises:
        ConfigError: this version of TE would lose gradients in a recovery; or it cannot compute in the weights' type.
    """
    try:
        from transformer_engine.pytorch import LayerNormLinear, Linear
        from transformer_engine.pytorch.constants import TE_DType
    except ImportError:
        return
    for linear in module.modules():
        if not isinstance(linear, (Linear, LayerNormLinear)):
            continue
        # The down-projections of latent attention; TE marks the weights of all its linear layers as cut.
        if linear.parallel_mode is None and not getattr(linear, "explicit_expert_comm", False):
            mark_duplicated(linear)
        if linear.weight.dtype not in TE_DType:
            raise ConfigError(
                f"transformer-engine has no kernels for {linear.weight.dtype}, in which --odyssey-float64 on trains. "
                "Add --transformer-impl local, or leave it out."
            )
        fused = bool(linear.fuse_wgrad_accumulation)
        if fused and not compat.transformer_engine_is(READS_LATE):
            raise ConfigError(
                f"transformer-engine is older than {READS_LATE}: with gradient accumulation fusion it would add to "
                "gradient buffers that a recovery has replaced. Use a newer one, or add "
                "--no-gradient-accumulation-fusion."
            )
        store = getattr(linear, "wgrad_store", None)
        reason = why_whole(
            config,
            has_bias=linear.apply_bias,
            weights=linear.weight_names,
            put=tuple(inspect.signature(store.put).parameters) if store is not None else (),
        )
        if reason is None:
            linear.wgrad_store = Later(linear.weight, fused=fused)


def why_whole(config: Any, *, has_bias: bool, weights: Sequence[str], put: Sequence[str]) -> str | None:
    """Why the backward of a linear layer is not split; None: it is.

    Args:
        has_bias: TE adds the bias, whose gradient is a by-product of the weight's (v2.9 linear.py, line 853).
        weights: the names of its weights.
        put: the parameters of its ``wgrad_store.put``; empty before 2.3.
    """
    if tuple(put) != ("tensor_list", "func"):
        return "this version of Transformer Engine does not delay weight gradients as those read do"
    if getattr(config, "fp8", None):
        return "fp8: nobody has tried what its inputs become until later"
    if given := [name for name in _ELSEWHERE if getattr(config, name, False)]:
        return f"{', '.join(given)}: buffers of the backward are used again after it"
    if has_bias:
        return "its bias would wait too"
    return None if list(weights) == ["weight"] else "it has several weights"
