"""Moving layers: the state that new holders lack, from those who have it. Old holders keep theirs until a step is
committed in the new generation, so an interrupted transfer loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.state import Cell
from odyssey_megatron.plan.plan import Transfer

TensorsOf = Callable[[int], list[torch.Tensor]]
"""Layer -> all its tensors, in an order that is the same on every rank."""


class Moving:
    """Transfers under way: what this worker sends and receives of them; every layer travels as one message.

    What is sent must not change before :meth:`finish` returns, and what is received is not there before. Methods raise
    what the group raises when the generation ends.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        *,
        cell: Cell,
        group: dist.ProcessGroup,
        tensors_to_send: TensorsOf,
        tensors_to_fill: TensorsOf,
        checkpoint: Callable[[], None],
    ):
        """``checkpoint`` is called between layers."""
        self._checkpoint = checkpoint
        self._sends: list[tuple[Any, torch.Tensor]] = []
        self._receives: list[tuple[Any, torch.Tensor, list[torch.Tensor]]] = []
        self.arriving: set[int] = set()
        """Layers."""
        for tag, transfer in enumerate(transfers):
            if transfer.source == cell.worker:
                checkpoint()
                flat = _packed(tensors_to_send(transfer.layer))
                work = dist.isend(flat, cell.peer(transfer.target), group=group, tag=tag)
                self._sends.append((work, flat))
            elif transfer.target == cell.worker:
                checkpoint()
                tensors = tensors_to_fill(transfer.layer)
                flat = torch.empty_like(_packed(tensors))
                work = dist.irecv(flat, cell.peer(transfer.source), group=group, tag=tag)
                self._receives.append((work, flat, tensors))
                self.arriving.add(transfer.layer)

    def finish(self) -> None:
        """Returns when all has been sent and received."""
        for work, flat, tensors in self._receives:
            work.wait()
            _unpack(flat, tensors)
            self._checkpoint()
        for work, _ in self._sends:
            work.wait()
        self.arriving, self._sends, self._receives = set(), [], []


def spread(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, *, source: int) -> None:
    """Broadcasts ``tensors`` from rank ``source`` of ``group``, in place, as one message."""
    flat = _packed(list(tensors))
    dist.broadcast(flat, group=group, group_src=source)
    if group.rank() != source:
        _unpack(flat, list(tensors))


def _packed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All bytes of ``tensors`` in one 1-D uint8 tensor."""
    return torch.cat([one.detach().contiguous().reshape(-1).view(torch.uint8) for one in tensors])


def _unpack(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copies ``flat`` back into ``tensors``; they may start at any byte, hence the clone (alignment)."""
    at = 0
    with torch.no_grad():
        for one in tensors:
            piece = flat[at : at + one.nbytes].clone()
            one.copy_(piece.view(one.dtype).reshape(one.shape))
            at += one.nbytes
