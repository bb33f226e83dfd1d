"""What the coordinator publishes: who is in, why, and the plan to carry out; or that the job ends."""

from __future__ import annotations

from dataclasses import dataclass

from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRow:
    """One line of the decision table."""

    name: str
    step_s: float | None
    transition_s: float | None
    score: float | None
    """Expected tokens to the horizon."""
    chosen: bool
    reason: str
    """Why it was chosen or rejected, with the numbers."""
    next_loss: float = 0.0
    """Tokens that ``score`` lacks because the next loss may end the job: some layers have a single holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One membership of the job. Anything that carries a smaller number is refused (I7)."""

    number: int
    members: tuple[int, ...]
    """Ranks, ascending."""
    dead: tuple[int, ...]
    """Ranks lost since the previous generation."""
    why: str
    previous: Layout | None
    """The one whose holders are complete and current, i.e. of the last live generation; on a rank its own layers."""
    plan: Plan
    """On a rank what concerns its worker (``plan/wire.py``)."""
    plan_hash: str
    """Of the whole plan."""
    decide_s: float = 0.0
    """How long deciding took."""
    planned: bool = False
    """Offered: nobody has died, and it begins between two steps, when all members have prepared it."""
    incarnations: tuple[tuple[int, int], ...] = ()
    """(rank, incarnation) of the ranks that are not their rank's first process."""
    fresh: tuple[int, ...] = ()
    """Ranks that hold nothing yet. Members begin with this generation; others are to wait for the next offer, or
    for the rest of their cell."""
    shapes: tuple[tuple[int, int], ...] = ()
    """(worker, places of a whole cell that each of its ranks fills) of the living ones that are not whole, ascending:
    cells that have lost ranks, and go on with the first so many (``cluster.cell.Cell``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The job cannot go on, instead of generation ``number`` (I9)."""

    number: int
    why: str
    code: int
    """What members leave with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Every member has finished, and there is nothing to recover, instead of generation ``number``."""

    number: int


Message = Generation | Stop | Finished
