"""What the coordinator publishes: a generation, with its members and plan, or the end of the job."""

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
    """Tokens that are expected to be trained until the horizon."""
    chosen: bool
    reason: str
    """Why the candidate was chosen or rejected, with the numbers."""
    next_loss: float = 0.0
    """Tokens taken off ``score`` because some layers have a single holder, so that the next loss may end the job."""


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
    """The layout whose holders are complete and current: that of the last live generation. None: there was none. On a
    rank it only has the layers of its own worker."""
    plan: Plan
    """The plan; on a rank only what concerns its worker (``plan/sending/wire.py``)."""
    plan_hash: str
    """Hash of the whole plan."""
    decide_s: float = 0.0
    """Time that deciding took."""
    planned: bool = False
    """Whether it was offered: it begins between two steps, when all members have prepared it, without a failure."""
    incarnations: tuple[tuple[int, int], ...] = ()
    """(rank, incarnation) of the ranks whose process is not their first one."""
    fresh: tuple[int, ...] = ()
    """Ranks that hold nothing yet. Those that are members begin with this generation; the others wait for the next
    offer, or for the rest of their cell."""
    timed: tuple[tuple[int, int], ...] = ()
    """Pairs of workers that time the link between them before the first step; none once a generation was live."""
    shapes: tuple[tuple[int, int], ...] = ()
    """(worker, number of ranks) of the living smaller cells (``cluster.cell.Cell``), ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Published in the place of generation ``number``: the job cannot go on (I9)."""

    number: int
    why: str
    code: int
    """The exit code of the members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Published in the place of generation ``number``: every member has finished, and the job ends."""

    number: int


Message = Generation | Stop | Finished
