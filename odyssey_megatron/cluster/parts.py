"""The parts that a layer is cut into, and which of them the rank of a cell has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from odyssey_megatron.cluster.shapes import Each

if TYPE_CHECKING:
    from odyssey_megatron.cluster.cell import Cell


@lru_cache(maxsize=256)
def filled(places: int, ranks: int) -> tuple[range, ...]:
    """Return which of ``places`` each of ``ranks`` ranks stands for: equally many side by side, or, where their number
    does not divide that of the places, as lanes of an uneven gang are dealt out (``Cell.held_lanes``).
    """
    if places % ranks:
        return tuple(range(one, places, ranks) for one in range(ranks))
    each = places // ranks
    return tuple(range(one * each, (one + 1) * each) for one in range(ranks))


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts as the ranks of a whole cell have them, experts included. A rank of a smaller cell has several, which in a
    smaller gang differ in their experts only.
    """

    cell: Cell

    @property
    def count(self) -> int:
        """Number of different parts of a layer."""
        cell = self.cell
        return math.lcm(cell.tensor, cell.expert_parts) * cell.expert_each * cell.tensor_each

    @property
    def of_experts(self) -> int:
        """Number of different parts of a layer's experts: ``Cell.expert_parts`` of a whole cell."""
        return self.cell.expert_parts * self.cell.expert_each * self.cell.tensor_each

    @property
    def alike(self) -> int:
        """Number of ranks of a whole cell that have the same of every layer, but for experts spread over ranks."""
        return self.cell.full // self.cell.full_tensor

    @property
    def held_alike(self) -> range:
        """Which of these :attr:`alike` ranks' places this rank fills."""
        cell = self.cell
        return filled(self.alike, cell.size // cell.tensor)[cell.index // cell.tensor]

    @property
    def experts_alike(self) -> int:
        """Number of ranks of a whole cell that have the same experts of every layer."""
        return self.cell.full // self.of_experts

    @property
    def held_experts_alike(self) -> range:
        """Which of these :attr:`experts_alike` ranks' places this rank fills."""
        cell = self.cell
        return filled(self.experts_alike, cell.size // cell.expert_parts)[cell.index // cell.expert_parts]

    @property
    def each(self) -> Each:
        """How much of each layer this rank has."""
        return Each(self.cell.tensor_each, self.cell.expert_each)

    @property
    def held(self) -> tuple[int, ...]:
        """Which parts of its layers this rank has."""
        cell = self.cell
        if cell.each == 1:
            return (cell.index % self.count,)
        if cell.full_expert == 1:
            return tuple(cell.held_shards)
        first = cell.index // cell.tensor % cell.expert * cell.expert_each
        return tuple(cell.tensor_rank + cell.tensor * one for one in range(first, first + cell.expert_each))

    def own(self, parts: int) -> tuple[int, ...]:
        """Return which parts this rank has of something that is in ``parts`` parts on the ranks of a whole cell."""
        if self.cell.each == 1:
            return (self.cell.index % parts,)
        return tuple(self.cell.held_shards) if parts == self.cell.full_tensor else self.held

    def slot(self, part: int) -> int:
        """Return the first of the places this rank fills that has ``part``, as an index in a whole cell."""
        cell = self.cell
        if cell.each == 1:
            return cell.index
        expert, shard = divmod(part, cell.full_tensor)
        first = cell.held_lanes[0] * cell.full_context + cell.held_contexts[0]
        return (first + (expert - first) % cell.full_expert) * cell.full_tensor + shard

    def fills(self, slot: int) -> bool:
        """Whether the place ``slot`` (an index in a whole cell) is one of those that this rank fills."""
        place, shard = divmod(slot, self.cell.full_tensor)
        lane, context = divmod(place, self.cell.full_context)
        cell = self.cell
        return lane in cell.held_lanes and context in cell.held_contexts and shard in cell.held_shards

    def given_to(self, other: Parts) -> tuple[int, ...]:
        """Return the parts of a layer that this rank sends to the rank of ``other``.

        Of several ranks that have the same part only one sends it.
        """
        return tuple(part for part in other.held if self.fills(other.slot(part)))


class PartsByRun(Parts):
    """The smaller parts of a job with an uneven gang: each has the experts of one run (``Cell.runs``).

    One rank of each gang has a part, and a place of a whole cell has several: so a part is its own :meth:`slot`.
    """

    __slots__ = ()

    @property
    def count(self) -> int:
        return len(self.cell.runs) * self.cell.tensor

    @property
    def of_experts(self) -> int:
        return self.count

    @property
    def experts_alike(self) -> int:
        return 1

    @property
    def each(self) -> Each:
        runs = self.cell.runs
        ends = (*runs[1:], self.cell.experts)
        return Each(self.cell.tensor_each, 1, tuple((runs[at], ends[at]) for at in self.cell.held_runs))

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(self.cell.tensor_rank + self.cell.tensor * at for at in self.cell.held_runs)

    def own(self, parts: int) -> tuple[int, ...]:
        return tuple(self.cell.held_shards) if parts == self.cell.full_tensor else self.held

    def slot(self, part: int) -> int:
        return part

    def given_to(self, other: Parts) -> tuple[int, ...]:
        held = self.held
        return tuple(part for part in other.held if part in held)
