"""Which ranks a worker has, and what of a layer each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol


class ParallelSizes(Protocol):
    """Of a worker, in Megatron's words."""

    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def context_parallel_size(self) -> int: ...
    @property
    def hierarchical_context_parallel_sizes(self) -> Sequence[int] | None: ...
    @property
    def expert_model_parallel_size(self) -> int: ...
    @property
    def expert_tensor_parallel_size(self) -> int | None: ...


Shapes = Mapping[int, int]
"""Worker -> how many places each of its ranks fills (``Cell.each``), of those that are not whole."""
NO_SHAPES: Shapes = MappingProxyType({})


class Each(NamedTuple):
    """How much of a layer a rank has, beside one of a whole cell."""

    shards: int = 1
    """Of what is cut over tensor-parallel ranks."""
    experts: int = 1
    """Of those that are spread over expert-parallel ranks: so many times as many."""


ONE = Each()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Which worker a rank belongs to, and its place there: consecutive ranks in Megatron's order, tensor parallelism
    first, context parallelism second, and third the replicas over which experts are spread (lanes).
    """

    rank: int
    size: int = 1
    """Ranks of this cell; where it is whole, ``JobSpec.cell_size``."""
    context: int = 1
    """``context_parallel_size``: ranks of a lane that have the same shards, and each a part of the sequence."""
    context_levels: tuple[int, ...] = ()
    """``hierarchical_context_parallel_sizes``, whose product ``context`` is: ranks in a row, rows in a row, ..."""
    lanes: int = 1
    """Each computes a microbatch of its own, in step with the others; where it has lost ranks several in turn."""
    expert: int = 1
    """``expert_model_parallel_size``: ranks that have each some of a layer's experts."""
    expert_tensor: int = 0
    """``expert_tensor_parallel_size``: ranks that have each a part of the same experts; 0: as ``tensor``."""
    each: int = 1
    """Places of a whole cell that each rank fills: more than one in a smaller cell, which has lost ranks and goes on
    with the first so many."""
    context_each: int = 1
    """Of these, context-parallel ones, so many parts of the sequence; the others are lanes, or parts of layers."""
    lane_each: int = 1
    """Of these, lanes: so many microbatches of a plan's one."""
    expert_each: int = 1
    """Expert-parallel ranks of a whole cell whose experts each rank has."""

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
    ) -> Cell:
        """By Megatron's sizes. A worker is as many ranks as have the whole sequence, and all experts."""
        sequence, experts = tensor * context, expert * (expert_tensor or tensor)
        # With one expert-parallel rank Megatron cuts experts like other weights.
        size = math.lcm(sequence, experts) if expert > 1 else sequence
        return cls(
            rank=rank,
            size=size,
            context=context,
            context_levels=tuple(context_levels),
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
            context_levels=sizes.hierarchical_context_parallel_sizes or (),
            expert=sizes.expert_model_parallel_size,
            expert_tensor=sizes.expert_tensor_parallel_size,
        )

    def divisions(self, *, tensor: bool) -> tuple[int, ...]:
        """How many places each rank may fill, ascending, where this cell is whole. Context-parallel ranks are put
        together first: they have the same of each layer. Then lanes, whose ranks have the same but for experts; and in
        cells without expert parallelism, if ``tensor``, tensor-parallel ranks.
        """
        levels = (1, self.context) if self.context_levels else range(1, self.context + 1)
        found = [one for one in levels if self.context % one == 0]
        found += [self.context * one for one in range(2, self.lanes + 1) if self.lanes % one == 0]
        if self.expert == 1:
            of_tensor = range(2, self.tensor + 1) if tensor else ()
            return (*found, *(self.context * one for one in of_tensor if self.tensor % one == 0))
        if self.expert_tensor not in (0, self.tensor):
            return (1,)  # the experts of ranks that are put together would not follow upon each other
        return tuple(one for one in found if self.expert % one == 0 or one % self.expert == 0)

    def smaller(self, each: int) -> Cell:
        """This rank's cell, which is whole, with one rank where there were ``each``, one of its :meth:`divisions`."""
        if each == 1:
            return self
        of_context, of_experts = min(each, self.context), min(each, self.expert)
        of_lanes = min(each // of_context, self.lanes)
        return replace(
            self,
            size=self.size // each,
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

    def of_worker(self, worker: int, each: int) -> list[Cell]:
        """The ranks of ``worker``, of which each fills so many places."""
        whole = self if self.each == 1 else self.whole
        shaped = replace(whole, rank=worker * self.full).smaller(each)
        return [replace(shaped, rank=rank) for rank in shaped.ranks]

    @property
    def whole(self) -> Cell:
        """Of this one, as far as smaller cells know it: without levels of context-parallel ranks."""
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
        )

    @property
    def full(self) -> int:
        """``JobSpec.cell_size``: ranks of a whole cell, and the places that there are in any."""
        return self.size * self.each

    @property
    def full_context(self) -> int:
        """Parts of the sequence in a whole cell: ``context_parallel_size``."""
        return self.context * self.context_each

    @property
    def full_lanes(self) -> int:
        """Microbatches that a whole cell computes at once."""
        return self.lanes * self.lane_each

    @property
    def full_expert(self) -> int:
        """``expert_model_parallel_size``."""
        return self.expert * self.expert_each

    @property
    def tensor_each(self) -> int:
        """Tensor-parallel parts of each layer that this rank has."""
        return self.each // (self.context_each * self.lane_each)

    @property
    def of_layer(self) -> Each:
        """What this rank has of each layer."""
        return Each(self.tensor_each, self.expert_each)

    @property
    def full_tensor(self) -> int:
        """Those of a whole cell: ``tensor_model_parallel_size``."""
        return self.tensor * self.tensor_each

    @property
    def worker(self) -> int:
        return self.rank // self.full

    @property
    def index(self) -> int:
        """This rank's number in its cell."""
        return self.rank % self.full

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks of this cell; where it is whole, ``tensor_model_parallel_size``: ranks of a lane that
        have the same part of the sequence.
        """
        return self.size // (self.context * self.lanes)

    @property
    def tensor_rank(self) -> int:
        """This rank's number among those."""
        return self.index % self.tensor

    @property
    def held_shards(self) -> range:
        """Which shards of its layers this rank has, as the job's tensor parallelism cuts them."""
        return range(self.tensor_rank * self.tensor_each, (self.tensor_rank + 1) * self.tensor_each)

    @property
    def held_parts(self) -> tuple[int, ...]:
        """Which of the :attr:`parts` of its layers this rank has. In a smaller gang they are alike but for experts."""
        if self.each == 1:
            return (self.index % self.parts,)
        if self.full_expert == 1:
            return tuple(self.held_shards)
        first = self.index // self.tensor % self.expert * self.expert_each
        return tuple(self.tensor_rank + self.tensor * one for one in range(first, first + self.expert_each))

    @property
    def context_rank(self) -> int:
        """Which part of the sequence this rank has."""
        return self.index // self.tensor % self.context

    @property
    def held_contexts(self) -> range:
        """Which parts of the sequence this rank has, as the job's context parallelism cuts it."""
        return range(self.context_rank * self.context_each, (self.context_rank + 1) * self.context_each)

    @property
    def lane(self) -> int:
        """The number of this rank's among those of its cell."""
        return self.index // (self.tensor * self.context)

    @property
    def held_lanes(self) -> range:
        """Which of a whole cell's microbatches this rank computes."""
        return range(self.lane * self.lane_each, (self.lane + 1) * self.lane_each)

    @property
    def expert_parts(self) -> int:
        """Parts in which the experts of a layer are: on ranks in a row."""
        return self.expert * (self.expert_tensor or self.tensor)

    @property
    def full_expert_parts(self) -> int:
        """Those of a whole cell."""
        return self.expert_parts * self.expert_each * self.tensor_each

    @property
    def parts(self) -> int:
        """Different parts of a layer that the ranks of a whole cell have, experts included."""
        return math.lcm(self.tensor, self.expert_parts) * self.expert_each * self.tensor_each

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the cell."""
        first = self.worker * self.full
        return tuple(range(first, first + self.size))

    def numbers(self, worker: int) -> range:
        """Of the ranks that ``worker`` has if it is whole."""
        return range(worker * self.full, (worker + 1) * self.full)

    def slot(self, part: int) -> int:
        """Of the ranks of a whole cell whose places this one fills, the first that has that ``part``."""
        if self.each == 1:
            return self.index
        expert, shard = divmod(part, self.full_tensor)
        first = self.held_lanes[0] * self.full_context + self.held_contexts[0]
        return (first + (expert - first) % self.full_expert) * self.full_tensor + shard

    def fills(self, slot: int) -> bool:
        """Whether this rank is in that place of a whole cell, among others perhaps."""
        place, shard = divmod(slot, self.full_tensor)
        lane, context = divmod(place, self.full_context)
        return lane in self.held_lanes and context in self.held_contexts and shard in self.held_shards

    def own(self, parts: int) -> tuple[int, ...]:
        """Of what is in so many ``parts`` on the ranks of a whole cell, those that this rank has."""
        if self.each == 1:
            return (self.index % parts,)
        return tuple(self.held_shards) if parts == self.full_tensor else self.held_parts

    def having(self, worker: int, part: int, parts: int, each: int = 1) -> tuple[int, ...]:
        """The ranks of ``worker``, of which each fills ``each`` places, that have ``part`` of what is in ``parts``."""
        if each == 1:
            return tuple(range(worker * self.full + part, (worker + 1) * self.full, parts))
        return tuple(one.rank for one in self.of_worker(worker, each) if part in one.own(parts))

    def pieces(self, cuts: bool) -> tuple[int, ...]:
        """Of the equal pieces of all lanes' sequences those that this rank has of an activation, in their order.

        Context-parallel ranks have two pieces each, one from each end (``mcore/contexts.py``). With ``cuts`` (sequence
        parallelism) those of tensor-parallel ranks are as many finer ones that lie side by side in these.
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
        """The :meth:`pieces` of an activation that it sends to the rank of ``other``. Where tensor-parallel ranks have
        all the same, one does.
        """
        if not (cuts or other.held_shards[0] in self.held_shards):
            return ()
        wanted = set(other.pieces(cuts))
        return tuple(one for one in self.pieces(cuts) if one in wanted)

    def moves(self, other: Cell) -> tuple[int, ...]:
        """The parts of a layer that it sends to the rank of ``other``: of ranks that have the same, one does."""
        return tuple(part for part in other.held_parts if self.fills(other.slot(part)))

    def counterparts(self, worker: int, each: int = 1) -> list[Cell]:
        """The ranks of ``worker``, of which each fills ``each`` places, that this one exchanges anything with."""
        if each == self.each:
            return [replace(self, rank=worker * self.full + self.index)]

        def exchange(one: Cell) -> bool:
            ways = ((self, one), (one, self))
            return any(a.moves(b) or a.gives(b, cuts=True) or a.gives(b, cuts=False) for a, b in ways)

        return [one for one in self.of_worker(worker, each) if exchange(one)]

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """This rank's tensor-parallel group."""
        return self._around(self.tensor)

    @property
    def context_ranks(self) -> tuple[int, ...]:
        """Its context-parallel group."""
        return self._around(self.context, self.tensor)

    @property
    def context_level_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Its group of each of their levels (megatron core_v0.16.1 core/parallel_state.py, line 360)."""
        steps = [
            self.tensor * math.prod(self.context_levels[:level]) for level in range(len(self.context_levels))
        ]
        return tuple(
            self._around(count, step) for count, step in zip(self.context_levels, steps, strict=True)
        )

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

    def named(self, name: str, rank: int) -> str:
        """``name`` of a group between workers, of which there is one for each two ranks that exchange anything: for
        this one and that ``rank``.
        """
        return name if self.full == 1 else f"{name}.{min(self.rank, rank)}-{max(self.rank, rank)}"
