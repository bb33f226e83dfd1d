"""What rides on the agreement of a step besides the model's totals: sums over all ranks, and so the same on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Votes(NamedTuple):
    """Of one step, behind the model's totals of it."""

    end: float
    """How many want the job to end."""
    writing: float
    """How many write a checkpoint, beside training."""
    ballots: float
    """See ``prepare.elected``."""
    squares: float
    missing: float
    """Instructions that have counted for nothing."""

    @classmethod
    def of(cls, totals: torch.Tensor) -> Votes:
        return cls(*totals[-len(cls._fields) :].tolist())


NUM_VOTES = len(Votes._fields)


class Ballot:
    """What this rank votes for; who has an opinion says so here.

    Args:
        wants_end: whether this rank wants the job to end behind the step.
        prepared: which offered generation it has prepared, see ``prepare.Offers.ballot``.
    """

    def __init__(self, *, wants_end: Callable[[], bool], prepared: Callable[[], tuple[int, int]]):
        self.wants_end = wants_end
        self.writes: Callable[[], bool] = lambda: False
        """Whether it writes a checkpoint, beside training."""
        self._prepared = prepared

    def cast(self, own: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sums, on the host, which waits here for its device.

        Args:
            own: its part of the model's totals, 1-D.
            missing: how many of its instructions have counted for nothing; a number on the device.
        """
        votes = torch.tensor([self.wants_end(), self.writes(), *self._prepared()], dtype=own.dtype)
        own = torch.cat([own, missing.reshape(1)]).cpu()
        return torch.cat([own[:-1], votes, own[-1:]])
