"""Optimizer state that lies in host memory between steps.

It is for copies that are kept only in case of a failure (``Layout.spare_states``): nobody waits for their step, so they
can take the way over the host's link. On a GPU the copy to the host runs on a stream of its own, beside the next step's
forward; the copy back waits for it, and is part of the step's end.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch


class Parking:
    """Tensors whose contents lie on the host while nobody uses them; their memory on the device is given back.

    The update itself is made on the device, by the same kernels as elsewhere, so that all copies of a state stay equal
    to the last bit.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        """``tensors``: each must be the only user of its storage."""
        self._tensors = tuple(tensors)
        self._on_host: list[torch.Tensor] = []
        self._out: torch.cuda.Event | None = None
        self.parked = False

    def park(self) -> None:
        """Move the contents to the host."""
        if self.parked:
            return
        if not self._on_host:  # kept for good: page-locked memory is expensive to get
            self._on_host = [
                torch.empty_like(one, device="cpu", pin_memory=one.is_cuda) for one in self._tensors
            ]
        if self._tensors and self._tensors[0].is_cuda:
            beside = _beside(self._tensors[0].device)
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                self._move_out()
                self._out = beside.record_event()
            for tensor in self._tensors:  # freed memory must not be reused before it has been read
                tensor.record_stream(beside)
        else:
            self._move_out()
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self.parked = True

    def _move_out(self) -> None:
        for tensor, copy in zip(self._tensors, self._on_host, strict=True):
            copy.copy_(tensor, non_blocking=True)

    def fetch(self) -> None:
        """Move the contents back to the device."""
        if not self.parked:
            return
        if self._out is not None:
            torch.cuda.current_stream().wait_event(self._out)
        for tensor, copy in zip(self._tensors, self._on_host, strict=True):
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.copy_(copy, non_blocking=True)
        self.parked = False

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[None]:
        """In the body the contents are on the device; afterwards they lie where they lay before."""
        parked = self.parked
        self.fetch()
        yield
        if parked:
            self.park()

    @property
    def host_bytes(self) -> int:
        """Bytes that lie on the host now."""
        return sum(one.nbytes for one in self._on_host) if self.parked else 0


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """The stream for all copies from ``device`` to the host: they share one link anyway."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
