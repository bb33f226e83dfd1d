"""Computes several lanes of a gang on one rank, where the gang has lost ranks.

The rank computes the lanes' microbatches one after the other, each as a rank of a whole gang would: routers, their
losses and random numbers depend on the same things.

In the last turn of an uneven gang some ranks have no lane left. They compute their first lane's microbatch once more,
since their experts are needed, and since all ranks take part in each message. It counts for nothing: their routers
choose no experts (``experts.Routing``), and its results are left out, so that gradients are zeros. So are those of
losses that its forward adds in passing (``LossScale.beside``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from odyssey_megatron.cluster.cell import Cell

IDLE = -1
"""In the place of a lane's number: the rank has none in this turn."""

Forward = Callable[[int, torch.Tensor | None], torch.Tensor]
"""Called with the number of a microbatch in the step, and its activation from the layers before."""


def in_turn(
    cell: Cell,
    activation: torch.Tensor | None,
    go: Callable[[int], int],
    forward: Forward,
    *,
    back: Callable[[int], object],
) -> torch.Tensor:
    """Run ``forward`` for each lane that this rank of ``cell`` has, and return the results together.

    The lanes' rows lie one after the other along the first dimension of ``activation``, and of the result; losses are
    summed instead. ``go`` switches to a lane's microbatch, and returns its number.

    The backward also takes the lanes in turn, the last one first, since autograd starts with what was computed last.
    Each lane begins with ``back``, since recomputation draws random numbers.
    """
    if cell.lane_each == 1:
        return forward(go(cell.held_lanes[0]), activation)
    own = len(cell.held_lanes)
    rows: list[torch.Tensor | None] = [None] * own if activation is None else [*activation.chunk(own)]
    turns, idle = [*cell.held_lanes], cell.lane_each - own
    turns += [IDLE] * idle
    rows += [_apart(rows[0]) for _ in range(idle)]
    outputs = []
    for lane, row in zip(turns, rows, strict=True):
        outputs.append(forward(go(lane), row))
        if outputs[-1].requires_grad:
            outputs[-1].register_hook(_before(back, lane))  # type: ignore[no-untyped-call]
    # The backward goes through all of them, with zeros for those that do not count.
    if outputs[0].dim():
        return torch.cat([*outputs[:own], *(one[:0] for one in outputs[own:])])
    return torch.stack([*outputs[:own], *(one * 0.0 for one in outputs[own:])]).sum()


def expert_part(cell: Cell, lane: int) -> int:
    """Which part of the experts a whole gang's rank has that computes in ``lane`` what the rank of ``cell`` does, whose
    lanes are not cut over context-parallel ranks.
    """
    return (lane * cell.tensor + cell.tensor_rank) % (cell.full_expert * cell.tensor)


def _apart(row: torch.Tensor | None) -> torch.Tensor | None:
    return None if row is None else row.detach().requires_grad_(row.requires_grad)


def _before(back: Callable[[int], object], lane: int) -> Callable[[torch.Tensor], None]:
    def begins(grad: torch.Tensor) -> None:
        back(lane)

    return begins
