"""The numbers that are summed over all ranks, and so known to all, with a step's agreement."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Votes(NamedTuple):
    """The votes of one step. They come last in its totals."""

    end: float
    """The number of ranks that want the job to end."""
    writing: float
    """The number of ranks that write a checkpoint, beside training."""
    ballots: float
    """See ``prepare.elected``; so for ``squares``."""
    squares: float
    missing: float
    """The number of instructions that have counted for nothing."""

    @classmethod
    def of(cls, totals: torch.Tensor) -> Votes:
        """Return the votes, which end the ``totals`` of a step, 1-D."""
        return cls(*totals[-len(cls._fields) :].tolist())


NUM_VOTES = len(Votes._fields)


class Ballot:
    """What this rank votes for. Other parts of it set these attributes to have a say.

    Args:
        wants_end: Whether this rank wants the job to end after the step.
        prepared: The offered generation that this rank has prepared; see ``prepare.Offers.ballot``.
    """

    def __init__(self, *, wants_end: Callable[[], bool], prepared: Callable[[], tuple[int, int]]):
        self.wants_end = wants_end
        self.writes: Callable[[], bool] = lambda: False
        """Whether this rank writes a checkpoint, beside training."""
        self._prepared = prepared

    def cast(self, own: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sums, on the host, which waits here for its device.

        Args:
            own: Its part of the model's totals, 1-D.
            missing: The number of its instructions that have counted for nothing, as a number on the device.
        """
        votes = torch.tensor([self.wants_end(), self.writes(), *self._prepared()], dtype=own.dtype)
        own = torch.cat([own, missing.reshape(1)]).cpu()
        return torch.cat([own[:-1], votes, own[-1:]])
