"""``ClusterState`` and ``apply(state, event)``: membership as a pure function of what happened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from odyssey_megatron.cluster.events import (
    Event,
    GenerationLive,
    NodeLost,
    OfferFailed,
    RankDied,
    RankFinished,
    RankJoined,
    Retry,
)


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
    """Of a whole cell's ranks, those that this one has. Each of them has 1/share times the bytes of a whole cell's."""

    @property
    def pace(self) -> float:
        """Relative to a healthy worker that is a whole cell; a smaller one is expected to be slower by its share."""
        return self.speed * self.share


class ParallelSizes(Protocol):
    """Of a worker, in Megatron's words."""

    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def context_parallel_size(self) -> int: ...
    @property
    def expert_model_parallel_size(self) -> int: ...
    @property
    def expert_tensor_parallel_size(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Which worker a rank belongs to, and its place there: consecutive ranks in Megatron's order, tensor parallelism
    first, context parallelism second, and third the replicas over which experts are spread (lanes).
    """

    rank: int
    size: int = 1
    """``JobSpec.cell_size``."""
    context: int = 1
    """``context_parallel_size``: ranks of a lane that have the same shards, and each a part of the sequence."""
    lanes: int = 1
    """Each computes a microbatch of its own, in step with the others."""
    expert: int = 1
    """``expert_model_parallel_size``: ranks that have each some of a layer's experts."""
    expert_tensor: int = 0
    """``expert_tensor_parallel_size``: ranks that have each a part of the same experts; 0: as ``tensor``."""

    @classmethod
    def of(
        cls, rank: int, *, tensor: int, context: int = 1, expert: int = 1, expert_tensor: int | None = None
    ) -> Cell:
        """By Megatron's sizes. A worker is as many ranks as have the whole sequence, and all experts."""
        sequence, experts = tensor * context, expert * (expert_tensor or tensor)
        # With one expert-parallel rank Megatron cuts experts like other weights.
        size = math.lcm(sequence, experts) if expert > 1 else sequence
        return cls(
            rank=rank,
            size=size,
            context=context,
            lanes=size // max(sequence, 1),
            expert=expert,
            expert_tensor=expert_tensor or 0,
        )

    @classmethod
    def in_job(cls, rank: int, sizes: ParallelSizes) -> Cell:
        """As :meth:`of`, by what calls them as Megatron does: its arguments or its config, or a ``JobSpec``."""
        return cls.of(
            rank,
            tensor=sizes.tensor_model_parallel_size,
            context=sizes.context_parallel_size,
            expert=sizes.expert_model_parallel_size,
            expert_tensor=sizes.expert_tensor_parallel_size,
        )

    @property
    def worker(self) -> int:
        return self.rank // self.size

    @property
    def index(self) -> int:
        """This rank's place in its cell."""
        return self.rank % self.size

    @property
    def tensor(self) -> int:
        """``tensor_model_parallel_size``: ranks of a lane that have the same part of the sequence."""
        return self.size // (self.context * self.lanes)

    @property
    def tensor_rank(self) -> int:
        """Which shard of its layers this rank has."""
        return self.index % self.tensor

    @property
    def context_rank(self) -> int:
        """Which part of the sequence this rank has."""
        return self.index // self.tensor % self.context

    @property
    def lane(self) -> int:
        """Which of the cell's microbatches this rank computes."""
        return self.index // (self.tensor * self.context)

    @property
    def expert_parts(self) -> int:
        """Parts in which the experts of a layer are: on ranks in a row."""
        return self.expert * (self.expert_tensor or self.tensor)

    @property
    def parts(self) -> int:
        """Different parts of a layer that its ranks have, experts included."""
        return math.lcm(self.tensor, self.expert_parts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the cell."""
        return self.alike(self.worker, 1)

    def alike(self, worker: int, parts: int) -> tuple[int, ...]:
        """The ranks of ``worker`` that have the same part as this one of what is in so many ``parts``."""
        return tuple(range(worker * self.size + self.index % parts, (worker + 1) * self.size, parts))

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """This rank's tensor-parallel group."""
        return self._around(self.tensor)

    @property
    def context_ranks(self) -> tuple[int, ...]:
        """Its context-parallel group."""
        return self._around(self.context, self.tensor)

    @property
    def lane_ranks(self) -> tuple[int, ...]:
        """All that compute its microbatch."""
        return self._around(self.tensor * self.context)

    @property
    def expert_ranks(self) -> tuple[int, ...]:
        """Its expert-parallel group."""
        return self._around(self.expert, self.expert_tensor or self.tensor)

    @property
    def expert_tensor_ranks(self) -> tuple[int, ...]:
        """Its tensor-parallel group for experts."""
        return self._around(self.expert_tensor or self.tensor)

    @property
    def expert_part_ranks(self) -> tuple[int, ...]:
        """Both together: those that have all experts once."""
        return self._around(self.expert_parts)

    def _around(self, count: int, step: int = 1) -> tuple[int, ...]:
        first = self.rank - self.index // step % count * step
        return tuple(range(first, first + count * step, step))

    def peer(self, worker: int) -> int:
        """The rank of ``worker`` in the same place: the one to exchange with."""
        return worker * self.size + self.index

    def named(self, name: str) -> str:
        """``name`` of a group between workers, of which there is one for each place in a cell."""
        return name if self.size == 1 else f"{name}.{self.index}"


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
    fresh: frozenset[int] = frozenset()
    """Workers that live again, but hold nothing yet: they have not been in a generation that was live."""
    incarnations: tuple[tuple[int, int], ...] = ()
    """(rank, incarnation) of those that are not their rank's first process, ascending."""

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
            if rank in worker.ranks:
                return worker
        raise KeyError(rank)


def initial_state(*, nodes: tuple[int, ...], started_s: float = 0.0, cell_size: int = 1) -> ClusterState:
    """All ranks alive; ``nodes[r]`` is the node of rank r, and a cell is where its first rank is."""
    size = cell_size
    workers = tuple(
        WorkerState(
            worker=first // size,
            node=nodes[first],
            ranks=tuple(range(first, first + size)),
            other_nodes=tuple(sorted({*nodes[first : first + size]} - {nodes[first]})),
        )
        for first in range(0, len(nodes), size)
    )
    return ClusterState(workers=workers, started_s=started_s)


def apply(state: ClusterState, event: Event) -> ClusterState:
    """The state after ``event``. Events that say nothing new return ``state`` itself."""
    match event:
        case RankDied(rank=rank, t_s=t_s):
            return _kill(state, {rank}, t_s)
        case NodeLost(node=node, t_s=t_s):
            hit = (w for w in state.workers if node in (w.node, *w.other_nodes))
            return _kill(state, {rank for w in hit for rank in w.ranks}, t_s)
        case GenerationLive(rank=rank, generation=generation):
            return _report_live(state, rank, generation)
        case RankFinished(rank=rank, generation=generation):
            if generation not in (state.generation, state.offered):
                return state  # said in an earlier generation, before it had to help with the next one
            return replace(state, finished=state.finished | {rank})
        case RankJoined():
            return _join(state, event)
        case Retry() | OfferFailed():
            return state


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
    )


def with_speeds(state: ClusterState, speeds: Mapping[int, float]) -> ClusterState:
    """``state`` with these speeds (``WorkerState.speed``), as they have been measured."""
    return replace(
        state, workers=tuple(replace(w, speed=speeds.get(w.worker, w.speed)) for w in state.workers)
    )


def without_fresh(state: ClusterState) -> ClusterState:
    """``state`` as if fresh workers were still dead: what a recovery can count on."""
    workers = tuple(replace(w, alive=w.alive and w.worker not in state.fresh) for w in state.workers)
    return replace(state, workers=workers, fresh=frozenset())


def offer_generation(state: ClusterState) -> ClusterState:
    """A new generation is offered to the living, in place of any other offer."""
    return replace(
        state,
        offered=state.newest + 1,
        newest=state.newest + 1,
        offered_members=frozenset(state.ranks),
        offered_live=frozenset(),
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
    return replace(
        state,
        generation=generation,
        members=state.offered_members,
        live=live,
        offered=0,
        fresh=state.fresh - settled,
    )


def _join(state: ClusterState, event: RankJoined) -> ClusterState:
    worker = state.worker_of(event.rank)
    if worker.alive:
        return state
    known = {**dict(state.incarnations), event.rank: event.incarnation}
    joining = state.joining | {event.rank}
    workers, fresh = state.workers, state.fresh
    if set(worker.ranks) <= joining:
        joining -= set(worker.ranks)
        fresh |= {worker.worker}
        node = worker.node if worker.other_nodes else event.node
        back = replace(worker, alive=True, node=node, speed=1.0, share=1.0)
        workers = tuple(back if w is worker else w for w in workers)
    return replace(
        state, workers=workers, joining=joining, fresh=fresh, incarnations=tuple(sorted(known.items()))
    )


def _kill(state: ClusterState, ranks: set[int], t_s: float) -> ClusterState:
    hit = {w.worker for w in state.workers if w.alive and ranks & set(w.ranks)}
    hit -= {w.worker for w in state.workers if set(w.ranks) <= state.finished}
    # Of a cell that holds nothing yet, the rest waits on.
    rest = {rank for w in state.workers if w.worker in hit & state.fresh for rank in w.ranks}
    joining = (state.joining | rest) - ranks
    if joining != state.joining:
        state = replace(state, joining=joining)
    if not hit:
        return state
    workers = tuple(replace(w, alive=False) if w.worker in hit else w for w in state.workers)
    times_s = state.failure_times_s + (t_s,) * len(hit)
    return replace(state, workers=workers, fresh=state.fresh - hit, failure_times_s=times_s)
