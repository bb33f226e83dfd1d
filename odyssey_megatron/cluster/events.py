"""What can happen to a job, as data. The coordinator is the only one to act on these."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from odyssey_megatron.codec import from_jsonable, to_jsonable


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDied:
    """Seen by the agent of the rank's node. ``cause`` is ``killed``, ``exit``, ``hang``, ``node``, or ``corrupt``: its
    numbers were wrong, so that it has left.
    """

    rank: int
    code: int
    """Exit code; ``-9`` is SIGKILL."""
    cause: str
    incarnation: int = 0
    """How many processes were this rank before the one that died. An agent that was frozen may tell of one that has
    been replaced since.
    """
    t_s: float = 0.0
    """When the coordinator heard of it, on its own clock: that of another node says nothing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """The agent of ``node`` has been silent for longer than its lease."""

    node: int
    t_s: float = 0.0
    """As above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLive:
    """``rank`` holds all its state of ``generation`` and is about to run a step in it."""

    rank: int
    generation: int
    done: int = 0
    """Pieces of common work that the job has done by then: steps, and what else all do together."""
    agreed_ago_s: float | None = None
    """So long ago its members had agreed on how far they are; None: they have not, in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A message failed on ``rank`` although nobody is known to have died: it asks for fresh groups."""

    rank: int
    generation: int
    reason: str
    patience_s: float = 0.0
    """For so long another rank may rightly be at something else, as a checkpoint, before it is taken for stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinished:
    """``rank`` has committed all steps, in ``generation``."""

    rank: int
    generation: int
    early: int = -1
    """After so many steps, as the job was asked to end; -1: after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoined:
    """A process has taken the place of the dead ``rank``: its model is built, and it holds nothing yet."""

    rank: int
    node: int
    incarnation: int
    """How many processes were this rank before it."""
    each: int = 1
    """Places of a whole cell that it fills: more than one as a rank of a smaller one (``cluster.cell.Cell``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReturned:
    """A process has taken the place of ``rank``, which its worker, a smaller cell, does without."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferFailed:
    """``rank`` could not prepare the offered ``generation``, so nobody has entered it."""

    rank: int
    generation: int
    reason: str


class Ask(enum.IntEnum):
    """What an agent that was sent a signal wants of its ranks."""

    NOTHING = 0
    END = 1
    """All ranks of the job leave behind the same step, in the way that training ends."""
    LEAVE = 2
    """The ranks of this node leave behind their step; the others go on."""


Event = RankDied | NodeLost | GenerationLive | Retry | RankFinished | RankJoined | RankReturned | OfferFailed
_KINDS = {
    kind.__name__: kind
    for kind in (
        RankDied,
        NodeLost,
        GenerationLive,
        Retry,
        RankFinished,
        RankJoined,
        RankReturned,
        OfferFailed,
    )
}


def event_to_jsonable(event: Event) -> dict[str, Any]:
    """The event with its kind."""
    return {"kind": type(event).__name__, **to_jsonable(event)}


def event_from_jsonable(value: dict[str, Any]) -> Event:
    """Inverse of :func:`event_to_jsonable`. Raises ValueError for anything that is not an event."""
    if not isinstance(value, dict) or value.get("kind") not in _KINDS:
        raise ValueError(f"not an event: {str(value)[:80]!r}")
    fields = {key: item for key, item in value.items() if key != "kind"}
    return from_jsonable(_KINDS[value["kind"]], fields)
