"""Where the experts of a layer are on the ranks of a gang, some of which may have one expert more than others.

Megatron's token dispatchers expect the same number of experts on each rank. They are given *slots* instead: each rank
has as many slots as the fullest rank has experts. A rank's experts are in its first slots; the rest stay empty, and get
no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of one layer."""

    held: tuple[tuple[int, ...], ...]
    """The experts of each expert-parallel rank, ascending; each expert is on one rank."""

    @classmethod
    def evenly(cls, experts: int, ranks: int) -> Slots:
        """Spread ``experts`` experts in order over ``ranks`` ranks, as evenly as possible; the first have one more.

        Raises:
            ValueError: a rank would have none.
        """
        if not 0 < ranks <= experts:
            raise ValueError(f"{experts} experts on {ranks} ranks: each rank has one at the least")
        each, more = divmod(experts, ranks)
        ends = accumulate((each + (rank < more) for rank in range(ranks)), initial=0)
        return cls(tuple(tuple(range(first, last)) for first, last in pairwise(ends)))

    @property
    def each(self) -> int:
        """Number of slots of each rank."""
        return max(map(len, self.held))

    @property
    def count(self) -> int:
        """Number of slots of all ranks together."""
        return self.each * len(self.held)

    @property
    def of_experts(self) -> tuple[int, ...]:
        """The slot of each expert."""
        places = chain.from_iterable(
            ((expert, rank * self.each + place) for place, expert in enumerate(own))
            for rank, own in enumerate(self.held)
        )
        return tuple(slot for _, slot in sorted(places))
