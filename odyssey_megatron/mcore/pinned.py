"""Copies from host memory to the device without waiting, which works only from pinned memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory


def pinned(tensors: Any) -> Any:
    """A tensor, or a tree of tensors, in pinned memory; unchanged where there is no GPU."""
    return pin_memory(tensors) if torch.cuda.is_available() else tensors  # type: ignore[no-untyped-call]


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the host's ``tensor``, of any shape, on the device, made without waiting."""
    copy: torch.Tensor = pinned(tensor).to(torch.cuda.current_device(), non_blocking=True)
    return copy
