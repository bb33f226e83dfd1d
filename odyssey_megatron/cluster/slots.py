"""Where the experts of a layer sit on the ranks of a gang, of which some may have one more than others.

What sends tokens to experts counts on equally many for each rank. It is given *slots*, as many for each rank as the
fullest one has experts: a rank's experts are in its first slots, and the others, which nobody is in, get no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise


@dataclass(frozen=True, slots=True)
class Slots:
    """Of one layer."""

    held: tuple[tuple[int, ...], ...]
    """Of each expert-parallel rank the experts that it has, ascending: each expert is on one of them."""

    @classmethod
    def evenly(cls, experts: int, ranks: int) -> Slots:
        """``experts`` in their order over ``ranks``, as even as can be: the first ranks have one more.

        Raises:
            ValueError: a rank would have none.
        """
        if not 0 < ranks <= experts:
            raise ValueError(f"{experts} experts on {ranks} ranks: each rank has one at the least")
        each, more = divmod(experts, ranks)
        ends = accumulate((each + (rank < more) for rank in range(ranks)), initial=0)
        return cls(tuple(tuple(range(first, last)) for first, last in pairwise(ends)))

    @property
    def is_even(self) -> bool:
        """Each rank has equally many, in order, as Megatron has it: slots are experts."""
        return self.of_experts == tuple(range(self.count))

    @property
    def each(self) -> int:
        """Slots of a rank."""
        return max(map(len, self.held))

    @property
    def count(self) -> int:
        """Slots of all ranks."""
        return self.each * len(self.held)

    @property
    def of_experts(self) -> tuple[int, ...]:
        """The slot of each expert."""
        places = chain.from_iterable(
            ((expert, rank * self.each + place) for place, expert in enumerate(own))
            for rank, own in enumerate(self.held)
        )
        return tuple(slot for _, slot in sorted(places))
