"""Cells: which ranks a worker has, and which parts of a layer, a sequence and a batch each of them has.

A whole cell has one *place* for each of its ranks. A smaller cell, which has lost ranks for good, has as many places,
and its ranks fill them between them. Where its number of ranks divides the whole one's, each fills equally many, side
by side. An *uneven* gang has any other number: its lanes are dealt out in turn, and its experts are spread evenly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from odyssey_megatron.cluster.parts import Parts, PartsByRun
from odyssey_megatron.cluster.shapes import ParallelSizes
from odyssey_megatron.cluster.slots import Slots

Shapes = Mapping[int, int]
"""Worker -> its number of ranks (``Cell.size``), for smaller cells only."""
NO_SHAPES: Shapes = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The cell that a rank belongs to, and the rank's position in it.

    A cell's ranks are consecutive, in Megatron's order: tensor parallelism varies fastest, then context parallelism,
    then the replicas over which experts are spread (lanes).
    """

    rank: int
    size: int = 1
    """Number of ranks in this cell; ``JobSpec.cell_size`` if it is whole."""
    context: int = 1
    """``context_parallel_size``: number of ranks in a lane that have the same shards, and each a part of the sequence.
    It may be smaller in a smaller cell, as may ``lanes`` and ``expert``."""
    context_levels: tuple[int, ...] = ()
    """``hierarchical_context_parallel_sizes``, innermost (neighbouring ranks) first; their product is ``context``."""
    lanes: int = 1
    """Number of lanes. Each computes a microbatch of its own, in step with the others; in a smaller cell several in
    turn (``lane_each``)."""
    expert: int = 1
    """``expert_model_parallel_size``: number of ranks over which a layer's experts are spread."""
    expert_tensor: int = 0
    """``expert_tensor_parallel_size``: number of ranks that each have a part of the same experts; 0: as ``tensor``."""
    each: int = 1
    """Number of places of a whole cell that each rank fills, or the first ones of an uneven gang; more than 1 in a
    smaller cell. It is the product of ``context_each``, ``lane_each`` and ``tensor_each``."""
    context_each: int = 1
    """Number of parts of the sequence that each rank has."""
    lane_each: int = 1
    """Number of turns in which the lanes of a whole cell are computed, for one microbatch of the plan: each rank has a
    lane in each, but for the last one of an uneven gang."""
    expert_each: int = 1
    """Number of a whole cell's expert-parallel ranks whose experts each rank has; 1 in an uneven gang."""
    uneven: int = 0
    """In an uneven gang, the number of lanes and expert-parallel ranks of a whole one; else 0."""
    experts: int = 0
    """``num_moe_experts``; 0 if it is not known, or there are none."""
    runs: tuple[int, ...] = ()
    """With an uneven gang in the job (:meth:`among`), the first experts of the *runs*: each gang has all experts of a
    run on one rank, and each part of a layer has the experts of one run."""

    @classmethod
    def of(
        cls,
        rank: int,
        *,
        tensor: int,
        context: int = 1,
        context_levels: Sequence[int] = (),
        expert: int = 1,
        expert_tensor: int | None = None,
        experts: int | None = None,
    ) -> Cell:
        """Return the whole cell of ``rank`` for Megatron's sizes.

        It has as many ranks as have the whole sequence and all experts between them.
        """
        sequence, parts = tensor * context, expert * (expert_tensor or tensor)
        # With one expert-parallel rank Megatron cuts experts like other weights.
        size = math.lcm(sequence, parts) if expert > 1 else sequence
        return cls(
            rank=rank,
            size=size,
            context=context,
            context_levels=tuple(context_levels),
            lanes=size // max(sequence, 1),
            expert=expert,
            expert_tensor=expert_tensor or 0,
            experts=experts or 0,
        )

    @classmethod
    def in_job(cls, rank: int, sizes: ParallelSizes) -> Cell:
        """As :meth:`of`, for an object with Megatron's names: its arguments, its config, or a ``JobSpec``."""
        experts = getattr(sizes, "num_experts", None) or getattr(sizes, "num_moe_experts", None)
        return cls.of(
            rank,
            tensor=sizes.tensor_model_parallel_size,
            context=sizes.context_parallel_size,
            context_levels=sizes.hierarchical_context_parallel_sizes or (),
            expert=sizes.expert_model_parallel_size,
            expert_tensor=sizes.expert_tensor_parallel_size,
            experts=experts,
        )

    def divisions(self, *, tensor: bool) -> tuple[int, ...]:
        """Return the values that ``each`` may have in smaller cells made of this whole one, ascending.

        Context-parallel ranks are put together first, as they have the same of each layer. Next are lanes, whose ranks
        have the same except for experts. Tensor-parallel ranks are put together only without expert parallelism, and
        if ``tensor``.
        """
        levels = (1, self.context) if self.context_levels else range(1, self.context + 1)
        found = [one for one in levels if self.context % one == 0]
        found += [self.context * one for one in range(2, self.lanes + 1) if self.lanes % one == 0]
        if self.expert == 1:
            of_tensor = range(2, self.tensor + 1) if tensor else ()
            return (*found, *(self.context * one for one in of_tensor if self.tensor % one == 0))
        if self.expert_tensor not in (0, self.tensor):
            return (1,)  # the experts of ranks that are put together would not be consecutive
        return tuple(one for one in found if self.expert % one == 0 or one % self.expert == 0)

    @property
    def uneven_sizes(self) -> tuple[int, ...]:
        """The numbers of ranks of uneven gangs that can be made of this whole cell, descending."""
        if not self.experts > self.expert == self.lanes or self.context > 1 or self.expert_parts != self.size:
            return ()
        return tuple(one * self.tensor for one in range(self.lanes - 1, 1, -1) if self.lanes % one)

    def smaller(self, size: int) -> Cell:
        """Return this whole cell with ``size`` ranks, as of one of its :meth:`divisions`, or of :attr:`uneven_sizes`.

        0: the whole cell.
        """
        if size in (0, self.size):
            return self
        if self.size % size:
            return self._uneven(size)
        each = self.size // size
        of_context, of_experts = min(each, self.context), min(each, self.expert)
        of_lanes = min(each // of_context, self.lanes)
        return replace(
            self,
            size=size,
            context=self.context // of_context,
            context_levels=(),
            lanes=self.lanes // of_lanes,
            expert=self.expert // of_experts,
            expert_tensor=0,
            each=each,
            context_each=of_context,
            lane_each=of_lanes,
            expert_each=of_experts,
        )

    def _uneven(self, size: int) -> Cell:
        lanes = size // self.tensor
        turns = -(-self.lanes // lanes)
        made = replace(
            self,
            size=size,
            lanes=lanes,
            expert=lanes,
            expert_tensor=0,
            each=turns,
            lane_each=turns,
            uneven=self.lanes,
        )
        return made.among({})

    def among(self, shapes: Shapes) -> Cell:
        """Return this cell in a job with smaller cells of these ``shapes``, which say which :attr:`runs` there are."""
        sizes = {one for one in (*shapes.values(), self.size) if self.full % one}
        if not sizes:
            return replace(self, runs=()) if self.runs else self
        starts = {*range(0, self.experts, self.experts // self.full_expert)}
        for size in sizes:
            starts |= {own[0] for own in Slots.evenly(self.experts, size // self.tensor).held}
        return replace(self, runs=tuple(sorted(starts)))

    def of_worker(self, worker: int, size: int = 0) -> list[Cell]:
        """Return the cells of all ranks of ``worker``, which are ``size``; 0: it is whole."""
        whole = self if self.each == 1 else self.whole
        shaped = replace(whole, rank=worker * self.full).smaller(size)
        return [replace(shaped, rank=rank, runs=self.runs or shaped.runs) for rank in shaped.ranks]

    @property
    def whole(self) -> Cell:
        """The whole cell that this one is, or was made of (then without ``context_levels``, which are not known)."""
        return replace(
            self,
            size=self.full,
            context=self.full_context,
            lanes=self.full_lanes,
            expert=self.full_expert,
            each=1,
            context_each=1,
            lane_each=1,
            expert_each=1,
            uneven=0,
        )

    @property
    def full(self) -> int:
        """``JobSpec.cell_size``: number of ranks of a whole cell, and of places in any cell."""
        return self.uneven * self.tensor if self.uneven else self.size * self.each

    @property
    def places(self) -> int:
        """Number of places of a whole cell that this rank fills: ``each``, or fewer in an uneven gang."""
        return len(self.held_lanes) if self.uneven else self.each

    @property
    def full_context(self) -> int:
        """``context_parallel_size``: number of parts of the sequence."""
        return self.context * self.context_each

    @property
    def full_lanes(self) -> int:
        """Number of lanes of a whole cell, and so of microbatches that it computes at once."""
        return self.uneven or self.lanes * self.lane_each

    @property
    def full_expert(self) -> int:
        """``expert_model_parallel_size``."""
        return self.uneven or self.expert * self.expert_each

    @property
    def tensor_each(self) -> int:
        """Number of tensor-parallel shards of each layer that this rank has."""
        return self.each // (self.context_each * self.lane_each)

    @property
    def full_tensor(self) -> int:
        """``tensor_model_parallel_size``: number of tensor-parallel ranks in a lane of a whole cell."""
        return self.tensor * self.tensor_each

    @property
    def worker(self) -> int:
        return self.rank // self.full

    @property
    def index(self) -> int:
        """This rank's index in its cell."""
        return self.rank % self.full

    @property
    def tensor(self) -> int:
        """Number of tensor-parallel ranks: those of a lane of this cell that have the same part of the sequence.

        It is ``tensor_model_parallel_size`` if the cell is whole.
        """
        return self.size // (self.context * self.lanes)

    @property
    def tensor_rank(self) -> int:
        """This rank's index in its tensor-parallel group."""
        return self.index % self.tensor

    @property
    def parts(self) -> Parts:
        """The parts of a layer, as the cells of this job cut it, and which of them this rank has."""
        return PartsByRun(self) if self.runs else Parts(self)

    @property
    def held_shards(self) -> range:
        """Which shards of its layers this rank has, as the job's tensor parallelism cuts them."""
        return range(self.tensor_rank * self.tensor_each, (self.tensor_rank + 1) * self.tensor_each)

    @property
    def held_experts(self) -> range:
        """Which experts of its layers this rank has, where :attr:`experts` is known."""
        rank = self.index // self.tensor % self.expert
        if self.uneven:
            own = Slots.evenly(self.experts, self.expert).held[rank]
            return range(own[0], own[-1] + 1)
        count = self.experts // self.expert
        return range(rank * count, (rank + 1) * count)

    @property
    def held_runs(self) -> tuple[int, ...]:
        """Which of the :attr:`runs` of experts this rank has."""
        own = self.held_experts
        return tuple(at for at, first in enumerate(self.runs) if first in own)

    @property
    def context_rank(self) -> int:
        """This rank's index in its context-parallel group."""
        return self.index // self.tensor % self.context

    @property
    def held_contexts(self) -> range:
        """Which parts of the sequence this rank has, as the job's context parallelism cuts it."""
        return range(self.context_rank * self.context_each, (self.context_rank + 1) * self.context_each)

    @property
    def lane(self) -> int:
        """The index of this rank's lane in its cell."""
        return self.index // (self.tensor * self.context)

    @property
    def held_lanes(self) -> range:
        """Which of a whole cell's lanes this rank computes the microbatches of, in turn."""
        if self.uneven:
            return range(self.lane, self.uneven, self.lanes)
        return range(self.lane * self.lane_each, (self.lane + 1) * self.lane_each)

    @property
    def expert_parts(self) -> int:
        """Number of parts into which a layer's experts are divided in this cell, on as many consecutive ranks."""
        return self.expert * (self.expert_tensor or self.tensor)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the cell."""
        first = self.worker * self.full
        return tuple(range(first, first + self.size))

    def numbers(self, worker: int) -> range:
        """Return the ranks that ``worker`` has if it is whole."""
        return range(worker * self.full, (worker + 1) * self.full)

    def pieces(self, cuts: bool) -> tuple[int, ...]:
        """Return the numbers of the pieces that this rank has of an activation, in their order there.

        The sequences of all lanes are cut into equal pieces, which are numbered lane by lane. Each context-parallel
        rank has two pieces, one from each end of the sequence (``mcore/contexts.py``). With ``cuts`` (sequence
        parallelism) these are cut finer, and each tensor-parallel rank has consecutive ones of them.
        """
        tensor, context = self.full_tensor if cuts else 1, self.full_context
        count, own = tensor, [*range(tensor)]
        if context > 1:
            finer = tensor // 2 if tensor % 2 == 0 else tensor
            low, high = self.held_contexts.start, self.held_contexts.stop
            ends = (*range(low, high), *range(2 * context - high, 2 * context - low))
            count, own = 2 * context * finer, [end * finer + one for end in ends for one in range(finer)]
        if cuts:
            length = len(own) // self.tensor
            own = own[self.tensor_rank * length : (self.tensor_rank + 1) * length]
        return tuple(lane * count + one for lane in self.held_lanes for one in own)

    def gives(self, other: Cell, *, cuts: bool) -> tuple[int, ...]:
        """Return the :meth:`pieces` of an activation that this rank sends to the rank of ``other``.

        Without ``cuts`` all tensor-parallel ranks have the same pieces, and only one of them sends.
        """
        if not (cuts or other.held_shards[0] in self.held_shards):
            return ()
        wanted = set(other.pieces(cuts))
        return tuple(one for one in self.pieces(cuts) if one in wanted)

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """This rank's tensor-parallel group."""
        return self._around(self.tensor)

    @property
    def context_ranks(self) -> tuple[int, ...]:
        """This rank's context-parallel group."""
        return self._around(self.context, self.tensor)

    @property
    def context_level_ranks(self) -> tuple[tuple[int, ...], ...]:
        """This rank's group at each of ``context_levels`` (megatron core_v0.16.1 core/parallel_state.py, line 360)."""
        steps = [
            self.tensor * math.prod(self.context_levels[:level]) for level in range(len(self.context_levels))
        ]
        return tuple(
            self._around(count, step) for count, step in zip(self.context_levels, steps, strict=True)
        )

    @property
    def lane_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's lane, which compute a microbatch together."""
        return self._around(self.tensor * self.context)

    @property
    def expert_ranks(self) -> tuple[int, ...]:
        """This rank's expert-parallel group."""
        return self._around(self.expert, self.expert_tensor or self.tensor)

    @property
    def expert_tensor_ranks(self) -> tuple[int, ...]:
        """This rank's tensor-parallel group for experts."""
        return self._around(self.expert_tensor or self.tensor)

    @property
    def expert_part_ranks(self) -> tuple[int, ...]:
        """The ranks around this one that have all experts once between them: both expert groups together."""
        return self._around(self.expert_parts)

    def _around(self, count: int, step: int = 1) -> tuple[int, ...]:
        first = self.rank - self.index // step % count * step
        return tuple(range(first, first + count * step, step))

    def named(self, name: str, rank: int) -> str:
        """Return the name of the group between this rank and ``rank`` of another worker.

        ``name`` is that of the workers' pair, which has a group for each two ranks that exchange anything.
        """
        return name if self.full == 1 else f"{name}.{min(self.rank, rank)}-{max(self.rank, rank)}"
