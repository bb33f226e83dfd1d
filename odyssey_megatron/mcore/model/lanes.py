"""Several lanes of a gang on one rank, as in a gang that has lost ranks: it computes their microbatches one after the
other, each as the rank of a whole gang does, with what the router, its losses and random numbers go by.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from odyssey_megatron.cluster.cell import Cell

Forward = Callable[[int, torch.Tensor | None], torch.Tensor]
"""Of a microbatch of the step, and what layers before have made of it."""


def in_turn(
    cell: Cell, activation: torch.Tensor | None, go: Callable[[int], int], forward: Forward
) -> torch.Tensor:
    """What ``forward`` makes of ``activation`` for the lanes that this rank of ``cell`` has, which lie there, and in
    what it gives, one behind the other; of losses the sum. ``go`` goes to a lane's microbatch, and gives its number.

    The backward of it is theirs in turn, the last one first, as autograd takes first what was computed last. Each
    begins with ``go``: what is recomputed draws numbers.
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
