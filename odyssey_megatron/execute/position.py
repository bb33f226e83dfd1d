"""How far a rank is with the job."""

from __future__ import annotations

import enum
from typing import Any

import torch

from odyssey_megatron.execute.votes import Votes
from odyssey_megatron.rebuild.agree import Standing


class CommonWork(enum.Enum):
    """A piece of common work: something that all ranks do together."""

    STEP = "step"
    OTHER = "other"
    """An evaluation, a checkpoint or a barrier."""


class Position:
    """What one rank has done of the job's common work, and what it knows of the last step.

    Args:
        num_totals: The number of values that all ranks sum at the end of a step.
    """

    def __init__(self, first_step: int, num_totals: int):
        self.committed = first_step
        """Number of steps committed so far, which is the number of the next step."""
        self.done = 0
        """Number of pieces of common work that the job has done."""
        self.own = 0
        """Number of those that this rank had a part in."""
        self.joins = False
        """This rank has just come, and learns from the others how far the job is."""
        self.complete: CommonWork | None = None
        """The piece at hand, once this rank's part of it is complete; for a step: once all its gradients are
        reduced. From then on others may have finished it, and this rank can finish it by itself.
        """
        self.applies = False
        """The optimizer is stepping: after an error now its state is neither the one before nor the one after
        the step.
        """
        self.totals = torch.zeros(num_totals, dtype=torch.float64)
        """The totals of the last step that was agreed on; on the host, as the agreement is."""
        self.outcome: Any = None
        """The outcome of the last committed step, as ``StepEnd.apply`` of the model returned it."""

    @property
    def votes(self) -> Votes:
        """The votes of the last step that was agreed on."""
        return Votes.of(self.totals)

    def standing(self) -> Standing:
        """Return what the other survivors must know of it."""
        return Standing(
            done=self.done, ready=self.complete is not None, committed=self.committed, joins=self.joins
        )

    def begin(self) -> None:
        """Begin the next piece of common work, or the one at hand once more: no part of it is complete."""
        self.complete = None

    def take_over(self, ahead: Standing, totals: torch.Tensor) -> None:
        """Join at the position of the rank that is ahead, with the ``totals`` of the last step, 1-D."""
        self.joins, self.done, self.committed = False, ahead.done, ahead.committed
        self.totals = totals.clone()

    def commit(self, totals: torch.Tensor) -> None:
        """Commit the step at hand, with its ``totals``, 1-D."""
        self.totals, self.committed = totals.clone(), self.committed + 1
        self.finish()

    def finish(self) -> None:
        """Count the piece at hand as done."""
        self.done, self.own = self.done + 1, self.own + 1
        self.complete = None
