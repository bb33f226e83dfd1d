"""From the host's memory to the device, without a wait: a device reads by itself what is pinned, and only that."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory


def pinned(tensors: Any) -> Any:
    """A tensor, or a tree of some, where a device reads it by itself; as it is where there is no GPU."""
    return pin_memory(tensors) if torch.cuda.is_available() else tensors  # type: ignore[no-untyped-call]


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the host's ``tensor``."""
    copy: torch.Tensor = pinned(tensor).to(torch.cuda.current_device(), non_blocking=True)
    return copy
