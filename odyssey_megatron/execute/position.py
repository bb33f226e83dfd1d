"""How far a rank is with the job."""

from __future__ import annotations

import enum
from typing import Any

import torch

from odyssey_megatron.rebuild.agree import Standing


class Piece(enum.Enum):
    """A piece of common work: what all ranks do together."""

    STEP = "step"
    OTHER = "other"
    """An evaluation, a checkpoint, a barrier."""


class Position:
    """What one rank has done of the job's common work, and what it knows of the last step.

    Args:
        num_totals: how many numbers all ranks sum at the end of a step.
    """

    def __init__(self, first_step: int, num_totals: int):
        self.committed = first_step
        """Steps committed so far; the next step's number."""
        self.done = 0
        """Pieces of common work that the job has done."""
        self.own = 0
        """Of those, how many this rank has had a part in."""
        self.joins = False
        """This rank has just come: how far the job is it learns from the others."""
        self.complete: Piece | None = None
        """The piece at hand, once this rank's part of it is complete: from there on others may be through with it, and
        this rank can finish it by itself. Of a step: all its gradients are reduced.
        """
        self.applies = False
        """The optimizer steps: after an error now its state is neither the one before nor the one behind the step."""
        self.totals = torch.zeros(num_totals, dtype=torch.float64)
        """Of the last step that was agreed on; on the host, as the agreement is."""
        self.outcome: Any = None
        """Of the last committed step."""

    def standing(self) -> Standing:
        """What the other survivors must know of it."""
        return Standing(
            done=self.done, ready=self.complete is not None, committed=self.committed, joins=self.joins
        )

    def begin(self) -> None:
        """The next piece of common work, or the one at hand once more: no part of it is complete."""
        self.complete = None

    def take_over(self, ahead: Standing, totals: torch.Tensor) -> None:
        """This rank joins where the others are."""
        self.joins, self.done, self.committed = False, ahead.done, ahead.committed
        self.totals = totals.clone()

    def commit(self, totals: torch.Tensor) -> None:
        """The step at hand is committed."""
        self.totals, self.committed = totals.clone(), self.committed + 1
        self.finish()

    def finish(self) -> None:
        """The piece at hand is done."""
        self.done, self.own = self.done + 1, self.own + 1
        self.complete = None
