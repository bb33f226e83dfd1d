"""Which rank of a node runs in which slot, and what is made of cells that have lost ranks for good.

What is left of such a cell joins again as a smaller cell of as many ranks as divide a whole one, where the job allows
that; what is over stands by: processes that join, and wait for the rest of their cell. With two broken cells on a node,
one can be completed: its missing rank is started where a rank of the other stood by. For the job that is a rank that
comes back; only the agent knows that it came back in another place. A smaller cell is the first ranks of its worker,
whichever of them are lost: its processes start in the places of those that are left.

A cell with a slow rank may go on without it in the same way: nobody is lost then, and who is slow stands by as the last
of the cell, in the place where it was slow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from odyssey_megatron.cluster.cell import NO_SHAPES, Cell
from odyssey_megatron.cluster.job import largest_cell


def completed(
    slots: Mapping[int, int], lost: Sequence[int], cell_size: int, smaller: Mapping[int, int] = NO_SHAPES
) -> dict[int, int]:
    """Missing rank -> the slot to start it in, so that one broken cell is whole again; empty where that cannot be.

    The cell that lacks fewest is completed, from those that lack most; what trains in a smaller cell stays there, and
    of two that lack as many the one that trains not at all comes first.

    Args:
        slots: rank -> slot, of the ranks that have one.
        lost: ranks that have none any more, and miss it.
        cell_size: ranks of a cell.
        smaller: worker -> places that each rank fills, of those that train as smaller cells.
    """
    broken: dict[int, list[int]] = {}
    for rank in sorted(lost):
        broken.setdefault(Cell(rank=rank, size=cell_size).worker, []).append(rank)
    if not broken:
        return {}
    for whole in sorted(broken, key=lambda worker: (len(broken[worker]), worker in smaller, worker)):
        others = sorted(
            (worker for worker in broken if worker != whole), key=lambda one: (-len(broken[one]), one)
        )
        spares = [
            slots[rank]
            for worker in others
            for rank in numbers(worker, cell_size)[cell_size // smaller[worker] if worker in smaller else 0 :]
            if rank in slots
        ]
        if len(spares) >= len(broken[whole]):
            return dict(zip(broken[whole], spares, strict=False))
    return {}


def shrunk(slots: Mapping[int, int], worker: int, sizes: Sequence[int]) -> tuple[int, dict[int, int]]:
    """How many places of a whole cell each rank of ``worker`` fills with what is left of it, 0 if that is too little;
    and which ranks start in the places of which others, so that the first ones are there.

    Args:
        slots: as in :func:`completed`.
        sizes: ``JobSpec.cell_sizes``.
    """
    cell_size = max(sizes)
    of_cell = numbers(worker, cell_size)
    left = [rank for rank in of_cell if rank in slots]
    size = largest_cell(sizes, len(left))
    if not size:
        return 0, {}
    lacking = [rank for rank in of_cell[:size] if rank not in slots]
    return cell_size // size, dict(zip(lacking, reversed(left), strict=False))


def numbers(worker: int, cell_size: int) -> range:
    """The ranks of a worker's whole cell."""
    return Cell(rank=worker * cell_size, size=cell_size).numbers(worker)


class Move(NamedTuple):
    """A rank that starts where another one was, which is lost in its stead."""

    missing: int
    spare: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComesBack:
    """As what a cell comes back that leaves between two steps."""

    generation: int
    """That begins without it."""
    incarnations: tuple[int, ...]
    """Of its ranks that leave: others are none of these."""
    without: tuple[int, ...] = ()
    """Ranks that stand by, while the others are a smaller cell; none: as it was before any stood by for being slow."""


class Places:
    """Of one node.

    Args:
        slots: rank -> its number on the node.
    """

    def __init__(self, slots: Mapping[int, int]):
        self._slots = dict(slots)
        """Not of those that are lost for good."""
        self._began_with = frozenset(slots)
        self._lost: list[int] = []
        self._smaller: dict[int, int] = {}
        """Worker -> places of a whole cell that each of its ranks fills, of those that go on as smaller cells."""
        self._aside: set[int] = set()
        """Of these workers, those that have lost nobody: who was slow stands by."""

    def slot(self, rank: int) -> int:
        return self._slots[rank]

    def lose(self, rank: int) -> None:
        """Its GPU is lost for good, as far as this agent can tell."""
        del self._slots[rank]
        self._lost.append(rank)

    def broken(self, cell_size: int) -> list[int]:
        """Workers that have lost ranks."""
        return sorted({Cell(rank=one, size=cell_size).worker for one in self._lost})

    def complete(self, cell_size: int) -> tuple[list[Move], int | None]:
        """Gives a broken cell what it lacks of another one, if that is enough: the moves, and its worker if it has been
        a smaller cell.
        """
        found = completed(self._slots, self._lost, cell_size, self._smaller)
        ranks = {slot: rank for rank, slot in self._slots.items()}
        moves = [self._move(missing, ranks[slot]) for missing, slot in found.items()]
        workers = {Cell(rank=missing, size=cell_size).worker for missing in found}
        grown = next((worker for worker in workers if self._smaller.pop(worker, 0)), None)
        self._aside -= workers
        return moves, grown

    def can_shrink(self, worker: int, sizes: Sequence[int]) -> int:
        """How many places each rank of ``worker`` would fill with what is left of it, if it is to be another cell than
        it is, or to have others of the ranks that are left; 0: it stays as it is. ``sizes``: ``JobSpec.cell_sizes``.
        """
        each, moves = shrunk(self._slots, worker, sizes)
        return 0 if each == self._smaller.get(worker, 1) and not moves else each

    def living(self, worker: int, cell_size: int) -> list[int]:
        """What is left of ``worker``."""
        return [rank for rank in numbers(worker, cell_size) if rank in self._slots]

    def too_few(self, worker: int, sizes: Sequence[int]) -> bool:
        """``worker`` has been a smaller cell, and what is left of it is none: it stands by from now on."""
        each, _ = shrunk(self._slots, worker, sizes)
        if each:
            return False
        self._aside.discard(worker)
        return self._smaller.pop(worker, 0) > 0

    def is_all_here(self, worker: int, cell_size: int) -> bool:
        """The whole cell began on this node: agents of several know of their own ranks only."""
        return self._began_with.issuperset(numbers(worker, cell_size))

    def shrink(self, worker: int, sizes: Sequence[int]) -> list[Move]:
        """What is left of ``worker`` goes on as a smaller cell."""
        each, moves = shrunk(self._slots, worker, sizes)
        self._smaller[worker] = each
        return [self._move(missing, spare) for missing, spare in moves.items()]

    def set_aside(self, worker: int, slow: Collection[int], sizes: Sequence[int]) -> int:
        """``worker``, a whole cell, goes on as a smaller one without its ``slow`` ranks: who would be in it in one of
        their places changes places with one that would not. Returns how many places each rank fills; 0: it stays whole.
        """
        of_cell = numbers(worker, max(sizes))
        size = largest_cell(sizes, len(of_cell) - len(slow))
        if not size or worker in self._smaller or not self._has_all(worker, max(sizes)):
            return 0
        within = [rank for rank in of_cell[:size] if rank in slow]
        others = [rank for rank in of_cell[size:] if rank not in slow]
        for one, other in zip(within, reversed(others), strict=False):
            self._slots[one], self._slots[other] = self._slots[other], self._slots[one]
        self._smaller[worker] = each = len(of_cell) // size
        self._aside.add(worker)
        return each

    def take_back(self, worker: int, cell_size: int) -> bool:
        """``worker`` is a whole cell again, if only slow ranks of it stood by; whether it is."""
        if worker not in self._aside or not self._has_all(worker, cell_size):
            return False
        self._aside.remove(worker)
        del self._smaller[worker]
        return True

    def _has_all(self, worker: int, cell_size: int) -> bool:
        return all(rank in self._slots for rank in numbers(worker, cell_size))

    def _move(self, missing: int, spare: int) -> Move:
        slot = self._slots[missing] = self._slots.pop(spare)
        self._lost[self._lost.index(missing)] = spare
        return Move(missing, spare, slot)

    @property
    def has_smaller(self) -> bool:
        """Some cell goes on as a smaller one."""
        return bool(self._smaller)

    def filled(self, rank: int, cell_size: int) -> int:
        """Places of a whole cell that a new process of ``rank`` fills: one where it stands by."""
        each = self._smaller.get(rank // cell_size, 1)
        return each if rank % cell_size < cell_size // each else 1
