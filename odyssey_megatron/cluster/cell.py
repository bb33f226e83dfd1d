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


class Link(NamedTuple):
    """From a rank to one of another worker."""

    rank: int
    places: range
    """That both fill."""


Shapes = Mapping[int, int]
"""Worker -> how many places each of its ranks fills (``Cell.each``), of those that are not whole."""
NO_SHAPES: Shapes = MappingProxyType({})


def ranks_that_go_on(size: int, living: int) -> int:
    """Of a cell of ``size`` ranks that has so many ``living``: the most that divide a whole one; 0 if none lives."""
    return max((one for one in range(1, living + 1) if size % one == 0), default=0)


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
    """Each computes a microbatch of its own, in step with the others."""
    expert: int = 1
    """``expert_model_parallel_size``: ranks that have each some of a layer's experts."""
    expert_tensor: int = 0
    """``expert_tensor_parallel_size``: ranks that have each a part of the same experts; 0: as ``tensor``."""
    each: int = 1
    """Places of a whole cell that each rank fills: more than one in a smaller cell, which has lost ranks and goes on
    with the first so many. Only cells of tensor-parallel ranks shrink."""

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

    def smaller(self, each: int) -> Cell:
        """This rank's cell, which is whole, with one rank where there were ``each``."""
        return replace(self, size=self.size // each, each=each, expert_tensor=0) if each > 1 else self

    @property
    def full(self) -> int:
        """``JobSpec.cell_size``: ranks of a whole cell, and the places that there are in any."""
        return self.size * self.each

    @property
    def worker(self) -> int:
        return self.rank // self.full

    @property
    def index(self) -> int:
        """This rank's number in its cell."""
        return self.rank % self.full

    @property
    def places(self) -> range:
        """Those of a whole cell that this rank fills."""
        return range(self.index * self.each, (self.index + 1) * self.each)

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
    def held_parts(self) -> range:
        """Which shards of its layers this rank has, as the job's tensor parallelism cuts them."""
        return range(self.tensor_rank * self.each, (self.tensor_rank + 1) * self.each)

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
        return math.lcm(self.tensor, self.expert_parts) * self.each

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the cell."""
        first = self.worker * self.full
        return tuple(range(first, first + self.size))

    def numbers(self, worker: int) -> range:
        """Of the ranks that ``worker`` has if it is whole."""
        return range(worker * self.full, (worker + 1) * self.full)

    def having(self, worker: int, part: int, parts: int, each: int = 1) -> tuple[int, ...]:
        """The ranks of ``worker``, of which each fills ``each`` places, that have ``part`` of what is in ``parts``."""
        return tuple(worker * self.full + place // each for place in range(part, self.full, parts))

    def links(self, worker: int, each: int = 1) -> list[Link]:
        """The ranks of ``worker``, of which each fills ``each`` places, that fill places of this one's: those to
        exchange with, ascending.
        """
        first, places = worker * self.full, self.places
        return [
            Link(first + one, range(max(places.start, one * each), min(places.stop, (one + 1) * each)))
            for one in range(places.start // each, (places.stop - 1) // each + 1)
        ]

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

    def named(self, name: str, places: range) -> str:
        """``name`` of a group between workers, of which there is one for each link: for those ``places``."""
        return name if self.full == 1 else f"{name}.{places.start}"
