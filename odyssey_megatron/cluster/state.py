"""``ClusterState`` and ``apply(state, event)``: membership as a pure function of the events."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

from odyssey_megatron.cluster.events import (
    Event,
    GenerationLive,
    NodeLeaves,
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
    """Gradient sums over holders that take longer than others."""

    workers: tuple[int, ...]
    crosses: bool
    """If true, the slow sums are those over some of ``workers`` together with other workers, as the way between them is
    slow; else those over all of ``workers``."""
    factor: float
    """Time that these sums take, relative to the usual."""

    def slows(self, holders: Collection[int]) -> bool:
        """Whether the sum over ``holders`` is one of the slow ones."""
        there = sum(worker in holders for worker in self.workers)
        return 0 < there < len(holders) if self.crosses else there == len(self.workers)


class Share(NamedTuple):
    """A worker's capacity relative to a whole cell's, for plans, which count as if all workers were whole cells."""

    ranks: float = 1.0
    """Number of ranks, relative to a whole cell's. Each rank has 1/``ranks`` times the work, and the bytes of
    activations."""
    state: float = 1.0
    """Bytes of weights and optimizer state on all ranks together, relative to a whole cell's: less than 1 where ranks
    that have the same of all layers are put together. Each rank has ``state``/``ranks`` times the bytes."""
    shares_out: bool = False
    """Whether ranks that have the same of all layers share out its optimizer state. Then however many ranks there are,
    they have as much of it together as a whole cell's."""

    def scaled(self, kept: Any, optimizer: Any) -> Any:
        """Return :attr:`state` times ``kept`` bytes, of which ``optimizer`` bytes are optimizer state.

        They are numbers, or NumPy's arrays of the same shape.
        """
        return kept * self.state + (optimizer * (1.0 - self.state) if self.shares_out else 0.0)


WHOLE_CELL = Share()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """One worker: the cell of ranks that hosts a pipeline stage. Its ranks live and die together."""

    worker: int
    node: int
    """The node of its first rank."""
    ranks: tuple[int, ...]
    alive: bool = True
    other_nodes: tuple[int, ...] = ()
    """The other nodes that it has ranks on, where a cell is larger than a node."""
    speed: float = 1.0
    """Speed relative to a healthy worker with as many ranks; at 0.5 work takes twice the time."""
    share: float = 1.0
    """Number of its ranks relative to a whole cell's."""
    experts: int = 0
    """``JobSpec.experts_of_one``."""
    experts_work: float = 0.0
    """``JobSpec.experts_work``."""
    context: int = 1
    """``JobSpec.alike_ranks``: number of ranks of a whole cell that have the same of all layers."""
    shares_out: bool = False
    """Whether these ranks share out optimizer state (``JobSpec.stretches``)."""
    missing: tuple[int, ...] = ()
    """The ranks that a smaller cell does without: the last ones of its worker."""
    expert_loads: tuple[tuple[int, float], ...] = ()
    """(number of ranks, tokens of the busiest one) as measured (``cluster/expert_loads.py``); empty: not yet."""

    @property
    def pace(self) -> float:
        """Speed relative to a healthy whole cell."""
        return self.speed * self.usual_pace

    @property
    def usual_pace(self) -> float:
        """The :attr:`pace` that it has if it is healthy: a smaller cell computes what a whole one does in turns.

        But for experts: in the last turn of an uneven gang few tokens are spread over all of its ranks, and in any
        gang the rank whose experts are the busiest ones holds up the others.
        """
        return 1 / (self.turns - self.experts_work * (self.turns - self._times_tokens))

    @property
    def size(self) -> int:
        """Number of ranks if it is a smaller cell; 0: it is whole."""
        return len(self.ranks) if self.missing else 0

    @property
    def turns(self) -> int:
        """The largest number of places of a whole cell that any of its ranks fills (:class:`Cell`)."""
        return ceil(round(1 / self.share, 6))

    @property
    def _times_experts(self) -> float:
        """The largest number of experts that any of its ranks has, relative to those of a whole one."""
        return ceil(round(self.experts / self.share, 6)) / self.experts if self.experts else self.turns

    @property
    def _times_tokens(self) -> float:
        """The tokens of its busiest rank relative to those of a whole one's; as many as experts if not measured.

        It is not taken to be faster than a whole one, though fewer ranks may have the experts dealt out more evenly.
        """
        loads, own = dict(self.expert_loads), len(self.ranks)
        whole = own + len(self.missing)
        known = loads.keys() >= {own, whole}
        return max(1.0, loads[own] / loads[whole]) if known else self._times_experts

    @property
    def beside_whole(self) -> Share:
        """Its capacity relative to a whole cell's; ranks that are alike are put together first (``Cell.divisions``).

        A rank of an uneven gang has the activations of as many lanes as there are turns, but not as many experts.
        """
        if round(self.share * self.turns, 6) == 1.0:
            return Share(self.share, 1 / min(self.turns, self.context), self.shares_out)
        return Share(1 / self.turns, self._times_experts / self.turns)

    @property
    def whole(self) -> WorkerState:
        """This worker with all its ranks."""
        return replace(self, ranks=self.ranks + self.missing, missing=(), share=1.0)

    def smaller(self, size: int) -> WorkerState:
        """Return this whole worker with ``size`` ranks; 0: with all."""
        size = size or len(self.ranks)
        share = size / len(self.ranks)
        return replace(self, ranks=self.ranks[:size], missing=self.ranks[size:], share=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """Everything about the cluster that a decision may depend on. Worker ids are never renumbered."""

    workers: tuple[WorkerState, ...]
    started_s: float = 0.0
    failure_times_s: tuple[float, ...] = ()
    members: frozenset[int] = frozenset()
    """Ranks of the current generation as it was published; those that have died since are still listed."""
    live: frozenset[int] = frozenset()
    """Ranks that have reported the current generation live."""
    finished: frozenset[int] = frozenset()
    generation: int = 0
    newest: int = 0
    """The largest number that a generation has had. No number is used twice, not even that of a failed offer."""
    offered: int = 0
    """The number of the generation that is offered, which its members enter between two steps once all are prepared; 0:
    none. ``generation`` remains the current one until all members have reported the offered one live."""
    offered_members: frozenset[int] = frozenset()
    offered_live: frozenset[int] = frozenset()
    joining: frozenset[int] = frozenset()
    """Ranks of dead workers that have new processes. A worker lives again when all its ranks are here."""
    joining_smaller: tuple[tuple[int, int], ...] = ()
    """(rank, ``RankJoined.size``) of those in ``joining`` that wait for a smaller cell to be complete, ascending."""
    returned: frozenset[int] = frozenset()
    """Ranks that are here again, but whose worker is a smaller cell that trains without them."""
    leaving: frozenset[int] = frozenset()
    """Workers that live, and are left out of the offered generation: they leave when it begins, to join again."""
    fresh: frozenset[int] = frozenset()
    """Workers that live again, but hold nothing yet: they have not been in a generation that was live."""
    incarnations: tuple[tuple[int, int], ...] = ()
    """(rank, incarnation) of the ranks whose process is not their first one, ascending."""
    slow_links: tuple[tuple[int, int, float], ...] = ()
    """(sender, receiver, seconds): how much longer a message between these workers takes than others."""
    slow_sums: tuple[SlowSums, ...] = ()
    """Gradient sums that take longer than others."""

    @property
    def alive(self) -> tuple[int, ...]:
        """Ids of the living workers, ascending."""
        return tuple(w.worker for w in self.workers if w.alive)

    @property
    def nodes(self) -> dict[int, int]:
        """Worker -> its node, also for dead workers."""
        return {w.worker: w.node for w in self.workers}

    @property
    def dead(self) -> tuple[int, ...]:
        """Ids of the dead workers, ascending."""
        return tuple(w.worker for w in self.workers if not w.alive)

    @property
    def cell_size(self) -> int:
        """Number of ranks of a whole cell."""
        return len(self.workers[0].ranks) + len(self.workers[0].missing)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(worker, number of ranks) of the living workers that are smaller cells, ascending."""
        return tuple((w.worker, w.size) for w in self.workers if w.alive and w.missing)

    @property
    def can_be_whole(self) -> frozenset[int]:
        """Smaller cells that are not fresh, and whose missing ranks are all here again."""
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
        """Ranks with new processes that hold nothing yet, whether their worker is complete or not; ascending."""
        return tuple(sorted({*self.fresh_ranks, *self.joining}))

    def incarnation_of(self, rank: int) -> int:
        """Return the incarnation of the newest process of ``rank`` that has joined."""
        at = bisect_left(self.incarnations, (rank,))
        found = self.incarnations[at : at + 1]
        return found[0][1] if found and found[0][0] == rank else 0

    @property
    def is_live(self) -> bool:
        """Whether every member, including those that have died since, has reported the current generation live.

        Only then can a step have been committed in it: a rank reports before it enters the step's
        agreement, and the agreement needs all of them. Until then the previous layout's holders
        are still complete and current, and recovery starts from those.
        """
        # Their numbers first: a large job asks for each rank that reports.
        return len(self.members) <= len(self.live) and self.members <= self.live

    def worker_of(self, rank: int) -> WorkerState:
        """Return the worker that ``rank`` belongs to. Raises KeyError."""
        for worker in self.workers:
            if rank in worker.ranks or rank in worker.missing:
                return worker
        raise KeyError(rank)


def initial_state(
    *,
    nodes: tuple[int, ...],
    started_s: float = 0.0,
    cell_size: int = 1,
    context: int = 1,
    shares_out: bool = False,
    experts: int = 0,
    experts_work: float = 0.0,
) -> ClusterState:
    """Return the state at the start of a job, with all ranks alive.

    Args:
        nodes: ``nodes[r]`` is the node of rank r; a worker's node is that of its first rank.
        cell_size: number of ranks of a whole cell.
        context, shares_out, experts, experts_work: those of each worker: see :class:`WorkerState`.
    """
    size = cell_size
    workers = tuple(
        WorkerState(
            worker=first // size,
            node=nodes[first],
            ranks=tuple(range(first, first + size)),
            context=context,
            shares_out=shares_out,
            experts=experts,
            experts_work=experts_work,
            other_nodes=tuple(sorted({*nodes[first : first + size]} - {nodes[first]})),
        )
        for first in range(0, len(nodes), size)
    )
    return ClusterState(workers=workers, started_s=started_s)


def apply(state: ClusterState, event: Event) -> ClusterState:
    """Return the state after ``event``, which is ``state`` itself if the event changes nothing."""
    match event:
        case RankDied():
            return state if is_old(state, event) else _die(state, event)
        case NodeLost(node=node, t_s=t_s):
            hit = (w for w in state.workers if node in (w.node, *w.other_nodes))
            return _kill(state, {rank for w in hit for rank in w.ranks + w.missing}, t_s)
        case GenerationLive(ranks=ranks, generation=generation):
            return _report_live(state, ranks, generation)
        case RankFinished(rank=rank, generation=generation):
            if generation not in (state.generation, state.offered):
                return state  # the rank had finished in an earlier generation, before it had to help with this one
            return replace(state, finished=state.finished | {rank})
        case RankJoined():
            return _join(state, event)
        case RankReturned(rank=rank):
            return replace(state, returned=state.returned | {rank})
        case Retry() | OfferFailed() | NodeLeaves():
            return state


def is_old(state: ClusterState, death: RankDied) -> bool:
    """Whether a newer process than the one that died has joined as this rank."""
    return death.incarnation < state.incarnation_of(death.rank)


def lost_between(before: ClusterState, after: ClusterState) -> set[int]:
    """Return the ranks of living workers in ``before`` that are not ranks of living workers in ``after``."""
    if before.workers is after.workers:  # true for most events, of which each rank has some
        return set()
    changed = [(a, b) for a, b in zip(before.workers, after.workers, strict=True) if a is not b]
    live = {rank for _, now in changed if now.alive for rank in now.ranks}
    return {rank for was, _ in changed if was.alive for rank in was.ranks} - live


def next_generation(state: ClusterState) -> ClusterState:
    """Return ``state`` in a new generation of the living, which nobody has reported live yet. It voids an open offer.

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
    """Return ``state`` with the measured speeds (``WorkerState.speed``) of some workers."""
    return replace(
        state, workers=tuple(replace(w, speed=speeds.get(w.worker, w.speed)) for w in state.workers)
    )


def with_expert_loads(state: ClusterState, loads: Mapping[int, float]) -> ClusterState:
    """Return ``state`` with the measured loads of gangs of each number of ranks (``WorkerState.expert_loads``)."""
    found = tuple(sorted(loads.items()))
    return replace(state, workers=tuple(replace(one, expert_loads=found) for one in state.workers))


def with_slow_links(state: ClusterState, longer_s: Mapping[tuple[int, int], float]) -> ClusterState:
    """Return ``state`` with these slow links and no others.

    ``longer_s`` maps (sender, receiver) to the seconds in ``ClusterState.slow_links``.
    """
    return replace(state, slow_links=tuple((*link, seconds) for link, seconds in sorted(longer_s.items())))


def with_slow_sums(state: ClusterState, slow: Collection[SlowSums]) -> ClusterState:
    """Return ``state`` with these slow sums and no others."""
    return replace(state, slow_sums=tuple(sorted(slow)))


def without_fresh(state: ClusterState) -> ClusterState:
    """Return ``state`` as if fresh workers were still dead: what a recovery can count on."""
    return without(state, state.fresh)


def without(state: ClusterState, workers: Collection[int]) -> ClusterState:
    """Return ``state`` as if these ``workers`` were dead."""
    left = tuple(replace(w, alive=False) if w.worker in workers else w for w in state.workers)
    return replace(state, workers=left, fresh=state.fresh - set(workers))


def offer_generation(state: ClusterState, leaving: frozenset[int] = frozenset()) -> ClusterState:
    """Return ``state`` with a new generation offered to all living workers that are not ``leaving``.

    It replaces any other offer.
    """
    return replace(
        state,
        offered=state.newest + 1,
        newest=state.newest + 1,
        offered_members=frozenset(without(state, leaving).ranks),
        offered_live=frozenset(),
        leaving=leaving,
    )


def _report_live(state: ClusterState, ranks: Collection[int], generation: int) -> ClusterState:
    if generation == state.generation:
        live = state.live.union(ranks)
        return state if len(live) == len(state.live) else replace(state, live=live)
    if generation != state.offered or not state.offered:
        return state
    live = state.offered_live.union(ranks)
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
    """Return ``state`` without the ``leaving`` workers; this is no failure, and they may join again."""
    workers = tuple(replace(w.whole, alive=False) if w.worker in leaving else w for w in state.workers)
    return replace(state, workers=workers, leaving=state.leaving - set(leaving))


def _join(state: ClusterState, event: RankJoined) -> ClusterState:
    worker = state.worker_of(event.rank)
    if worker.alive or event.rank in state.finished:  # nobody waits for one that had finished before it died
        return state
    known = {**dict(state.incarnations), event.rank: event.incarnation}
    joining = state.joining | {event.rank}
    smaller = {**dict(state.joining_smaller), event.rank: event.size}
    workers, fresh = state.workers, state.fresh
    cell = worker.smaller(event.size)
    if all(rank in joining and smaller.get(rank, 0) == event.size for rank in cell.ranks):
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


def _of_smaller(sizes: Mapping[int, int], joining: Collection[int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((rank, size) for rank, size in sizes.items() if size and rank in joining))


def _die(state: ClusterState, event: RankDied) -> ClusterState:
    worker = state.worker_of(event.rank).worker
    if event.code == EXIT_FENCED and worker in state.leaving:
        return _leave(state, {worker})  # the others have agreed on its leaving by now
    return _kill(state, {event.rank}, event.t_s)


def _kill(state: ClusterState, ranks: set[int], t_s: float) -> ClusterState:
    hit = {w.worker for w in state.workers if w.alive and ranks & set(w.ranks)}
    # The other ranks of a fresh cell that is hit have lost nothing: they wait again until it is complete.
    rest = {rank: w.size for w in state.workers if w.worker in hit & state.fresh for rank in w.ranks}
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
