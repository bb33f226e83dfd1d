"""Cleans up what an interrupted forward or backward leaves behind in Megatron's objects, which will be called again.

Some of these objects note that they are at work, and assert at the next call that they had finished.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP


@contextlib.contextmanager
def tidied(config: Any, layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """While the body computes with ``layers``: if it is interrupted, they and the timers of ``config`` are put back in
    order.
    """
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
    """Reset ``experts``, which with --moe-shared-expert-overlap compute in steps, between the messages of the routed
    experts.
    """
    for name in vars(experts):
        if name.startswith("cached_"):
            setattr(experts, name, None)
    state: Any = getattr(experts, "_overlap_state", None)  # from core_v0.18.0 on
    if state is not None:
        experts._overlap_state = type(state).IDLE
