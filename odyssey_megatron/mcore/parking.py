"""Optimizer state that lies in host memory between steps.

For copies that are kept for a failure only (``Layout.spare_states``): nobody waits for their step, so it may take the
way over the host's link. All goes through the current stream, in order, so nothing has to wait for a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Parking:
    """Tensors whose contents lie on the host while nobody uses them; their memory on the device is given back.

    The update itself is made on the device, by the same kernels as elsewhere: so all copies of a state stay equal to
    the last bit.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        """``tensors``: each the only user of its storage."""
        self._tensors = tuple(tensors)
        self._on_host: list[torch.Tensor] = []
        self.parked = False

    def park(self) -> None:
        """Moves the contents to the host."""
        if self.parked:
            return
        if not self._on_host:  # for good: page-locked memory is expensive to get
            pinned = torch.cuda.is_available()
            self._on_host = [
                torch.empty(one.shape, dtype=one.dtype, device="cpu", pin_memory=pinned)
                for one in self._tensors
            ]
        for tensor, copy in zip(self._tensors, self._on_host, strict=True):
            copy.copy_(tensor, non_blocking=True)
            tensor.untyped_storage().resize_(0)
        self.parked = True

    def fetch(self) -> None:
        """Moves the contents back to the device."""
        if not self.parked:
            return
        for tensor, copy in zip(self._tensors, self._on_host, strict=True):
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.copy_(copy, non_blocking=True)
        self.parked = False

    @property
    def host_bytes(self) -> int:
        """What lies on the host now."""
        return sum(one.nbytes for one in self._on_host) if self.parked else 0
