"""What a forward or backward that a failure cuts off leaves behind in Megatron's objects, which are called again.

Some note that they are at work, and assert when they are called next that they were through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP


@contextlib.contextmanager
def tidied(config: Any, layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """The body computes with ``layers``: if it is cut off, they and the timers of ``config`` are as before."""
    timers = config.timers._timers.values() if config.timers else ()
    running = {one for one in timers if one._started}
    try:
        yield
    except BaseException:
        for timer in timers:
            timer._started = timer in running
        for layer in layers:
            for module in layer.modules():
                if isinstance(module, SharedExpertMLP):
                    _forget(module)
        raise


def _forget(experts: SharedExpertMLP) -> None:
    """With --moe-shared-expert-overlap they compute by steps, beside the messages of the others' tokens."""
    for name in vars(experts):
        if name.startswith("cached_"):
            setattr(experts, name, None)
    if hasattr(experts, "_overlap_state"):  # from core_v0.18.0 on
        experts._overlap_state = type(experts._overlap_state).IDLE
