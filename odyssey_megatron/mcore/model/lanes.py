"""Computes several lanes of a gang on one rank, where the gang has lost ranks.

The rank computes the lanes' microbatches one after the other, each as a rank of a whole gang would: routers, their
losses and random numbers depend on the same things.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from odyssey_megatron.cluster.cell import Cell

Forward = Callable[[int, torch.Tensor | None], torch.Tensor]
"""Called with the number of a microbatch in the step, and its activation from the layers before."""


def in_turn(
    cell: Cell, activation: torch.Tensor | None, go: Callable[[int], int], forward: Forward
) -> torch.Tensor:
    """Run ``forward`` for each lane that this rank of ``cell`` has, and return the results together.

    The lanes' rows lie one after the other along the first dimension of ``activation``, and of the result; losses are
    summed instead. ``go`` switches to a lane's microbatch, and returns its number.

    The backward also takes the lanes in turn, the last one first, since autograd starts with what was computed last.
    Each lane begins with ``go``, since recomputation draws random numbers.
    """
    if cell.lane_each == 1:
        return forward(go(cell.held_lanes[0]), activation)
    rows = [None] * cell.lane_each if activation is None else activation.chunk(cell.lane_each)
    outputs = []
    for lane, row in zip(cell.held_lanes, rows, strict=True):
        outputs.append(forward(go(lane), row))
        if outputs[-1].requires_grad:
            outputs[-1].register_hook(_before(go, lane))  # type: ignore[no-untyped-call]
    return torch.cat(outputs) if outputs[0].dim() else torch.stack(outputs).sum()


def _before(go: Callable[[int], int], lane: int) -> Callable[[torch.Tensor], None]:
    def begins(grad: torch.Tensor) -> None:
        go(lane)

    return begins
