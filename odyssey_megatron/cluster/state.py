"""``ClusterState`` and ``apply(state, event)``: membership as a pure function of what happened."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from odyssey_megatron.cluster.events import (
    Event,
    GenerationLive,
    NodeLost,
    OfferFailed,
    RankDied,
    RankFinished,
    RankJoined,
    RankReturned,
    Retry,
)
from odyssey_megatron.errors import EXIT_FENCED


class SlowSums(NamedTuple):
    """Sums over holders that take longer than others."""

    workers: tuple[int, ...]
    crosses: bool
    """These are over some of ``workers`` and others, as what lies between is slow; else over all of ``workers``."""
    factor: float
    """They take so many times as long."""

    def slows(self, holders: Collection[int]) -> bool:
        """Whether the sum over ``holders`` is one of them."""
        there = sum(worker in holders for worker in self.workers)
        return 0 < there < len(holders) if self.crosses else there == len(self.workers)


class Share(NamedTuple):
    """Beside a whole cell's: what a worker's ranks can do and keep. All plans count as if workers were whole cells."""

    ranks: float = 1.0
    """How many there are. Each has 1/this times the work, and times the bytes of activations."""
    state: float = 1.0
    """And times this the bytes of weights and optimizer state: context-parallel ranks have all the same."""


WHOLE_CELL = Share()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One worker: the cell of ranks that hosts a pipeline stage. Its ranks live and die together."""

    worker: int
    node: int
    """Of its first rank."""
    ranks: tuple[int, ...]
    alive: bool = True
    other_nodes: tuple[int, ...] = ()
    """Of its other ranks, where a cell is larger than a node."""
    speed: float = 1.0
    """Relative to a healthy worker of as many ranks; 0.5 needs twice the time."""
    share: float = 1.0
    """Of a whole cell's ranks, those that this one has."""
    context: int = 1
    """Of a whole cell: ranks that have each a part of the sequence, and the same of all layers."""
    missing: tuple[int, ...] = ()
    """The ranks that a smaller cell does without: the last ones of its worker."""

    @property
    def pace(self) -> float:
        """Relative to a healthy worker that is a whole cell; a smaller one is expected to be slower by its share."""
        return self.speed * self.share

    @property
    def each(self) -> int:
        """Places of a whole cell that each of its ranks fills (:class:`Cell`)."""
        return (len(self.ranks) + len(self.missing)) // len(self.ranks)

    @property
    def beside_whole(self) -> Share:
        """Itself beside a whole cell: context-parallel ranks are put together first (:meth:`Cell.divisions`)."""
        return Share(self.share, 1 / min(self.each, self.context))

    @property
    def whole(self) -> WorkerState:
        """Itself with all its ranks."""
        return replace(self, ranks=self.ranks + self.missing, missing=(), share=1.0)

    def smaller(self, each: int) -> WorkerState:
        """Itself, which is whole, with one rank where there were ``each``."""
        size = len(self.ranks) // each
        return replace(self, ranks=self.ranks[:size], missing=self.ranks[size:], share=1 / each)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """Everything about the cluster that a decision may depend on. Worker ids are never renumbered."""

    workers: tuple[WorkerState, ...]
    started_s: float = 0.0
    failure_times_s: tuple[float, ...] = ()
    members: frozenset[int] = frozenset()
    """Ranks that the current generation was published with; those that died since are still listed."""
    live: frozenset[int] = frozenset()
    """Ranks that reported the current generation live."""
    finished: frozenset[int] = frozenset()
    generation: int = 0
    newest: int = 0
    """The largest number that a generation has had; none is used twice, be it of an offer that came to nothing."""
    offered: int = 0
    """A generation that its members enter between two steps, once all are prepared; 0: none. Until all of them have
    reported it live, ``generation`` counts."""
    offered_members: frozenset[int] = frozenset()
    offered_live: frozenset[int] = frozenset()
    joining: frozenset[int] = frozenset()
    """New ranks of dead workers, which live again when all their ranks are here."""
    joining_smaller: tuple[tuple[int, int], ...] = ()
    """(rank, ``RankJoined.each``) of those of them that wait for a smaller cell, ascending."""
    returned: frozenset[int] = frozenset()
    """Ranks whose worker does without them, and that are here again."""
    leaving: frozenset[int] = frozenset()
    """Workers that are not in what is offered, for they can be whole again."""
    fresh: frozenset[int] = frozenset()
    """Workers that live again, but hold nothing yet: they have not been in a generation that was live."""
    incarnations: tuple[tuple[int, int], ...] = ()
    """(rank, incarnation) of those that are not their rank's first process, ascending."""
    slow_links: tuple[tuple[int, int, float], ...] = ()
    """(sender, receiver, seconds): a message between these workers takes so much longer than others."""
    slow_sums: tuple[SlowSums, ...] = ()
    """Of gradients."""

    @property
    def alive(self) -> tuple[int, ...]:
        """Ids of the living workers, ascending."""
        return tuple(w.worker for w in self.workers if w.alive)

    @property
    def nodes(self) -> dict[int, int]:
        """Worker -> its node, dead ones too."""
        return {w.worker: w.node for w in self.workers}

    @property
    def dead(self) -> tuple[int, ...]:
        """Ids of the dead workers, ascending."""
        return tuple(w.worker for w in self.workers if not w.alive)

    @property
    def cell_size(self) -> int:
        """Ranks of a whole cell."""
        return len(self.workers[0].ranks) + len(self.workers[0].missing)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(worker, ``WorkerState.each``) of the living that are smaller cells, ascending."""
        return tuple((w.worker, w.each) for w in self.workers if w.alive and w.missing)

    @property
    def can_be_whole(self) -> frozenset[int]:
        """Smaller cells that hold something, and whose other ranks are all here again."""
        smaller = (w for w in self.workers if w.alive and w.missing and w.worker not in self.fresh)
        return frozenset(w.worker for w in smaller if set(w.missing) <= self.returned)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the living workers, ascending."""
        return tuple(sorted(rank for w in self.workers if w.alive for rank in w.ranks))

    @property
    def fresh_ranks(self) -> tuple[int, ...]:
        """Ranks of fresh workers, ascending."""
        return tuple(sorted(rank for w in self.workers if w.worker in self.fresh for rank in w.ranks))

    @property
    def waiting_ranks(self) -> tuple[int, ...]:
        """New ranks that hold nothing yet, be their worker complete or not; ascending."""
        return tuple(sorted({*self.fresh_ranks, *self.joining}))

    def incarnation_of(self, rank: int) -> int:
        """Of its newest process that has joined."""
        at = bisect_left(self.incarnations, (rank,))
        found = self.incarnations[at : at + 1]
        return found[0][1] if found and found[0][0] == rank else 0

    @property
    def is_live(self) -> bool:
        """True once every member, those that died since included, reported the current generation live.

        Only then can a step have been committed in it: a rank reports before it enters the step's
        agreement, and the agreement needs all of them. Until then the previous layout's holders
        are still complete and current, and recovery starts from those.
        """
        return self.members <= self.live

    def worker_of(self, rank: int) -> WorkerState:
        """The worker that ``rank`` belongs to. Raises KeyError."""
        for worker in self.workers:
            if rank in worker.ranks or rank in worker.missing:
                return worker
        raise KeyError(rank)


def initial_state(
    *, nodes: tuple[int, ...], started_s: float = 0.0, cell_size: int = 1, context: int = 1
) -> ClusterState:
    """All ranks alive; ``nodes[r]`` is the node of rank r, and a cell is where its first rank is. ``context``: see
    :class:`WorkerState`.
    """
    size = cell_size
    workers = tuple(
        WorkerState(
            worker=first // size,
            node=nodes[first],
            ranks=tuple(range(first, first + size)),
            context=context,
            other_nodes=tuple(sorted({*nodes[first : first + size]} - {nodes[first]})),
        )
        for first in range(0, len(nodes), size)
    )
    return ClusterState(workers=workers, started_s=started_s)


def apply(state: ClusterState, event: Event) -> ClusterState:
    """The state after ``event``. Events that say nothing new return ``state`` itself."""
    match event:
        case RankDied():
            return state if is_old(state, event) else _die(state, event)
        case NodeLost(node=node, t_s=t_s):
            hit = (w for w in state.workers if node in (w.node, *w.other_nodes))
            return _kill(state, {rank for w in hit for rank in w.ranks + w.missing}, t_s)
        case GenerationLive(rank=rank, generation=generation):
            return _report_live(state, rank, generation)
        case RankFinished(rank=rank, generation=generation):
            if generation not in (state.generation, state.offered):
                return state  # said in an earlier generation, before it had to help with the next one
            return replace(state, finished=state.finished | {rank})
        case RankJoined():
            return _join(state, event)
        case RankReturned(rank=rank):
            return replace(state, returned=state.returned | {rank})
        case Retry() | OfferFailed():
            return state


def is_old(state: ClusterState, death: RankDied) -> bool:
    """Whether another process has been this rank since, and has joined."""
    return death.incarnation < state.incarnation_of(death.rank)


def lost_between(before: ClusterState, after: ClusterState) -> set[int]:
    """Ranks of workers that lived ``before``, and that are not among the living ``after``."""
    if before.workers is after.workers:  # most events say nothing of that, and there is one of each rank's
        return set()
    changed = [(a, b) for a, b in zip(before.workers, after.workers, strict=True) if a is not b]
    live = {rank for _, now in changed if now.alive for rank in now.ranks}
    return {rank for was, _ in changed if was.alive for rank in was.ranks} - live


def next_generation(state: ClusterState) -> ClusterState:
    """The living in a new generation that nobody has reported live yet. An offer that is open is void.

    Fresh workers are not in it: they would have to be filled while all others stand still.
    """
    return replace(
        state,
        generation=state.newest + 1,
        newest=state.newest + 1,
        members=frozenset(state.ranks) - set(state.fresh_ranks),
        live=frozenset(),
        finished=frozenset(),
        offered=0,
        leaving=frozenset(),
    )


def with_speeds(state: ClusterState, speeds: Mapping[int, float]) -> ClusterState:
    """``state`` with these speeds (``WorkerState.speed``), as they have been measured."""
    return replace(
        state, workers=tuple(replace(w, speed=speeds.get(w.worker, w.speed)) for w in state.workers)
    )


def with_slow_links(state: ClusterState, longer_s: Mapping[tuple[int, int], float]) -> ClusterState:
    """``state`` with these links slow, and no others. ``longer_s``: (sender, receiver) -> see ``slow_links``."""
    return replace(state, slow_links=tuple((*link, seconds) for link, seconds in sorted(longer_s.items())))


def with_slow_sums(state: ClusterState, slow: Collection[SlowSums]) -> ClusterState:
    """``state`` with these sums slow, and no others."""
    return replace(state, slow_sums=tuple(sorted(slow)))


def without_fresh(state: ClusterState) -> ClusterState:
    """``state`` as if fresh workers were still dead: what a recovery can count on."""
    return without(state, state.fresh)


def without(state: ClusterState, workers: Collection[int]) -> ClusterState:
    """``state`` as if these ``workers`` were dead."""
    left = tuple(replace(w, alive=False) if w.worker in workers else w for w in state.workers)
    return replace(state, workers=left, fresh=state.fresh - set(workers))


def offer_generation(state: ClusterState, leaving: frozenset[int] = frozenset()) -> ClusterState:
    """A new generation is offered to the living, but for workers that are ``leaving``, in place of any other offer."""
    return replace(
        state,
        offered=state.newest + 1,
        newest=state.newest + 1,
        offered_members=frozenset(without(state, leaving).ranks),
        offered_live=frozenset(),
        leaving=leaving,
    )


def _report_live(state: ClusterState, rank: int, generation: int) -> ClusterState:
    if generation == state.generation and rank not in state.live:
        return replace(state, live=state.live | {rank})
    if generation != state.offered or not state.offered:
        return state
    live = state.offered_live | {rank}
    if not state.offered_members <= live:
        return replace(state, offered_live=live)
    settled = {w.worker for w in state.workers if set(w.ranks) <= state.offered_members}
    begun = replace(
        state,
        generation=generation,
        members=state.offered_members,
        live=live,
        offered=0,
        fresh=state.fresh - settled,
    )
    return _leave(begun, state.leaving)


def _leave(state: ClusterState, leaving: Collection[int]) -> ClusterState:
    """``leaving`` workers are not in the job any more, though nothing was lost: they join again."""
    workers = tuple(replace(w.whole, alive=False) if w.worker in leaving else w for w in state.workers)
    return replace(state, workers=workers, leaving=state.leaving - set(leaving))


def _join(state: ClusterState, event: RankJoined) -> ClusterState:
    worker = state.worker_of(event.rank)
    if worker.alive or event.rank in state.finished:  # nobody waits for one that had finished before it died
        return state
    known = {**dict(state.incarnations), event.rank: event.incarnation}
    joining = state.joining | {event.rank}
    smaller = {**dict(state.joining_smaller), event.rank: event.each}
    workers, fresh = state.workers, state.fresh
    cell = worker.smaller(event.each)
    if all(rank in joining and smaller.get(rank, 1) == event.each for rank in cell.ranks):
        joining -= set(cell.ranks)
        fresh |= {worker.worker}
        node = worker.node if worker.other_nodes else event.node
        back = replace(cell, alive=True, node=node, speed=1.0)
        workers = tuple(back if w is worker else w for w in workers)
    return replace(
        state,
        workers=workers,
        joining=joining,
        joining_smaller=_of_smaller(smaller, joining),
        fresh=fresh,
        returned=state.returned - {event.rank},
        incarnations=tuple(sorted(known.items())),
    )


def _of_smaller(each: Mapping[int, int], joining: Collection[int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((rank, one) for rank, one in each.items() if one > 1 and rank in joining))


def _die(state: ClusterState, event: RankDied) -> ClusterState:
    worker = state.worker_of(event.rank).worker
    if event.code == EXIT_FENCED and worker in state.leaving:
        return _leave(state, {worker})  # all have agreed on it by now
    return _kill(state, {event.rank}, event.t_s)


def _kill(state: ClusterState, ranks: set[int], t_s: float) -> ClusterState:
    hit = {w.worker for w in state.workers if w.alive and ranks & set(w.ranks)}
    # Of a cell that holds nothing yet, the rest waits on.
    rest = {rank: w.each for w in state.workers if w.worker in hit & state.fresh for rank in w.ranks}
    joining = (state.joining | rest.keys()) - ranks
    if joining != state.joining:
        smaller = dict(state.joining_smaller) | rest
        state = replace(state, joining=joining, joining_smaller=_of_smaller(smaller, joining))
    if ranks & state.returned:
        state = replace(state, returned=state.returned - ranks)
    if not hit:
        return state
    workers = tuple(replace(w.whole, alive=False) if w.worker in hit else w for w in state.workers)
    times_s = state.failure_times_s + (t_s,) * len(hit)
    return replace(state, workers=workers, fresh=state.fresh - hit, failure_times_s=times_s)
