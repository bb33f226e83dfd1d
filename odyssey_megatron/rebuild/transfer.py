"""Moving layers: the state that new holders lack, from those who have it. Old holders keep theirs until a step is
committed in the new generation, so an interrupted transfer loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.state import Cell
from odyssey_megatron.plan.plan import Transfer

TensorsOf = Callable[[int], list[torch.Tensor]]
"""Layer -> all its tensors, in an order that is the same on every rank."""


def carry_out(
    transfers: Sequence[Transfer],
    *,
    cell: Cell,
    group: dist.ProcessGroup,
    tensors_to_send: TensorsOf,
    tensors_to_fill: TensorsOf,
    checkpoint: Callable[[], None],
) -> None:
    """Sends and receives this worker's part of ``transfers``; every layer travels as one message.

    ``checkpoint`` is called between layers. Raises what the group raises when the generation ends.
    """
    sends, receives = [], []
    for tag, transfer in enumerate(transfers):
        if transfer.source == cell.worker:
            checkpoint()
            flat = _packed(tensors_to_send(transfer.layer))
            sends.append((dist.isend(flat, cell.peer(transfer.target), group=group, tag=tag), flat))
        elif transfer.target == cell.worker:
            checkpoint()
            tensors = tensors_to_fill(transfer.layer)
            flat = torch.empty_like(_packed(tensors))
            receives.append(
                (dist.irecv(flat, cell.peer(transfer.source), group=group, tag=tag), flat, tensors)
            )
    for work, flat, tensors in receives:
        work.wait()
        _unpack(flat, tensors)
        checkpoint()
    for work, _ in sends:
        work.wait()


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
