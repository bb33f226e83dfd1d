"""Events: what can happen to a job, as data. Only the coordinator acts on them."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from odyssey_megatron.codec import from_jsonable, to_jsonable

STARTS_OF_AN_AGENT = 10_000
"""More than the number of times that one agent starts a rank. The incarnations of each agent of a node begin with the
next multiple of it, so that no two processes of a rank have the same one.
"""


def agents_before(incarnation: int) -> int:
    """Return the number of agents that its node had before the one that started the process ``incarnation``."""
    return incarnation // STARTS_OF_AN_AGENT


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDied:
    """A rank's process has ended, as the agent of its node has seen.

    ``cause`` is ``killed``, ``exit``, ``hang``, ``node``, ``corrupt`` (the rank has left since its numbers were wrong),
    ``memory`` (it has run out of it, and the others go on without it), or ``moved`` (its agent has ended it, to start
    another rank on its GPU).
    """

    rank: int
    code: int
    """Exit code; ``-9`` is SIGKILL."""
    cause: str
    incarnation: int = 0
    """The number of processes that were this rank before the one that died. An agent that was frozen may report a
    process that has been replaced since.
    """
    t_s: float = 0.0
    """When the coordinator heard of it, by its own clock, as clocks of different nodes cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """The agent of ``node`` has been silent for longer than its lease."""

    node: int
    t_s: float = 0.0
    """As in :class:`RankDied`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeaves:
    """The agent of ``node`` was asked to have its ranks leave. It asks whether the others can go on without them."""

    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLive:
    """``ranks`` hold all their state of ``generation`` and are about to run a step in it."""

    ranks: tuple[int, ...]
    """The one that says so; or several, which the coordinator has heard of together (:func:`together`)."""
    generation: int
    done: int = 0
    """Number of pieces of common work that the job has done by then: steps, and what else all do together."""
    agreed_ago_s: float | None = None
    """Time since the members had agreed on how far they are; None: this process has seen no such agreement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A message failed on ``rank`` although nobody is known to have died: it asks for fresh groups."""

    rank: int
    generation: int
    reason: str
    patience_s: float = 0.0
    """How long another rank may rightly be busy with something else, such as a checkpoint, before it counts as
    stuck."""
    out_of_memory: bool = False
    """Whether ``rank`` has run out of its device's memory, so that a plan is needed that takes less of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinished:
    """``rank`` has committed all steps, in ``generation``."""

    rank: int
    generation: int
    early: int = -1
    """The number of steps done, if the job was asked to end before all were; else -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoined:
    """A new process has taken the place of the dead ``rank``: its model is built, and it holds nothing yet."""

    rank: int
    node: int
    incarnation: int
    """The number of processes that were this rank before it, by :data:`STARTS_OF_AN_AGENT`."""
    size: int = 0
    """Number of ranks of the smaller cell that it joins; 0: a whole one (``cluster.cell.Cell``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReturned:
    """A process is there again for ``rank``, without which its worker, a smaller cell, trains."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferFailed:
    """``rank`` could not prepare the offered ``generation``, so nobody has entered it."""

    rank: int
    generation: int
    reason: str


class Ask(enum.IntEnum):
    """What an agent that was sent a signal asks of its ranks."""

    NOTHING = 0
    END = 1
    """All ranks of the job end after the same step, in the way that training ends."""
    LEAVE = 2
    """The ranks of this node leave after their step; the others go on."""
    STAY = 3
    """Go on until the agent knows whether the ranks of this node may leave."""


Event = (
    RankDied
    | NodeLost
    | NodeLeaves
    | GenerationLive
    | Retry
    | RankFinished
    | RankJoined
    | RankReturned
    | OfferFailed
)
_KINDS = {
    kind.__name__: kind
    for kind in (
        RankDied,
        NodeLost,
        NodeLeaves,
        GenerationLive,
        Retry,
        RankFinished,
        RankJoined,
        RankReturned,
        OfferFailed,
    )
}


def together(events: Iterable[Event]) -> Iterator[Event]:
    """Return ``events`` with what ranks say one after another of one :class:`GenerationLive` as one event.

    What follows from all of them is as much work as what follows from one, and a large job has many.
    """

    def live_in(event: Event) -> int | None:
        return event.generation if isinstance(event, GenerationLive) else None

    for number, several in itertools.groupby(events, live_in):
        if number is None:
            yield from several
        else:
            yield _as_one([one for one in several if isinstance(one, GenerationLive)])


def _as_one(several: Sequence[GenerationLive]) -> GenerationLive:
    ranks = itertools.chain.from_iterable(one.ranks for one in several)
    return replace(several[0], ranks=tuple(ranks), done=max(one.done for one in several))


def event_to_jsonable(event: Event) -> dict[str, Any]:
    """Return the event's fields and its kind as plain dicts, lists and scalars."""
    return {"kind": type(event).__name__, **to_jsonable(event)}


def event_from_jsonable(value: dict[str, Any]) -> Event:
    """Return the event of which ``value`` is the :func:`event_to_jsonable`. Raises ValueError if it is none."""
    if not isinstance(value, dict) or value.get("kind") not in _KINDS:
        raise ValueError(f"not an event: {str(value)[:80]!r}")
    fields = {key: item for key, item in value.items() if key != "kind"}
    event: Event = from_jsonable(_KINDS[value["kind"]], fields)
    return event
