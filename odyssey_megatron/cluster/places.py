"""Which rank of a node runs in which slot, and what becomes of cells that have lost ranks for good.

The ranks left of such a cell join again as a smaller cell, of the largest number of ranks that the job allows
(``JobSpec.cell_sizes``). The other ranks that are left stand by: their processes join, and wait for the rest of their
cell. With two broken cells on a node, one can be completed: its missing rank is started in the slot of a rank of the
other cell that stood by. For the job that rank has come back; only the agent knows that it is in another slot. A
smaller cell always consists of the first ranks of its worker, whichever of them are lost: these start in the slots that
are left.

A cell with a slow rank may go on without it in the same way. No rank is lost then, and the slow slot is given to the
last ranks of the cell, which stand by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from odyssey_megatron.cluster.cell import NO_SHAPES, Cell
from odyssey_megatron.cluster.job import largest_cell


def completed(
    slots: Mapping[int, int],
    lost: Sequence[int],
    cell_size: int,
    smaller: Mapping[int, int] = NO_SHAPES,
    *,
    whole_job: bool = False,
) -> dict[int, int]:
    """Return missing rank -> the slot to start it in, so that one broken cell is whole again; {} if that cannot be.

    The cell that lacks the fewest ranks is completed, from those that lack the most. Ranks that train in a smaller cell
    stay there. Of two cells that lack equally many ranks, one that does not train comes first. The last cell that
    trains is not completed: it could not leave for that, as it alone has all layers.

    Args:
        slots: Rank -> slot, for the ranks that have one.
        lost: The ranks that have lost their slot.
        cell_size: The number of ranks of a whole cell.
        smaller: Worker -> its number of ranks, for workers that train as smaller cells.
        whole_job: Whether the job has no other ranks than these.
    """
    broken: dict[int, list[int]] = {}
    for rank in sorted(lost):
        broken.setdefault(Cell(rank=rank, size=cell_size).worker, []).append(rank)
    if not broken:
        return {}
    train = {rank // cell_size for rank in slots} - broken.keys() | smaller.keys()
    for whole in sorted(broken, key=lambda worker: (len(broken[worker]), worker in smaller, worker)):
        if whole_job and train == {whole}:
            continue
        others = sorted(
            (worker for worker in broken if worker != whole), key=lambda one: (-len(broken[one]), one)
        )
        spares = [
            slots[rank]
            for worker in others
            for rank in numbers(worker, cell_size)[smaller.get(worker, 0) :]
            if rank in slots
        ]
        if len(spares) >= len(broken[whole]):
            return dict(zip(broken[whole], spares, strict=False))
    return {}


def shrunk(slots: Mapping[int, int], worker: int, sizes: Sequence[int]) -> tuple[int, dict[int, int]]:
    """Return the smaller cell that the ranks left of ``worker`` can be, and which ranks have to move for it.

    Args:
        slots: As in :func:`completed`.
        sizes: ``JobSpec.cell_sizes``.

    Returns:
        Its number of ranks, 0 if too few are left; and missing rank -> the rank in whose slot it starts, so that the
        smaller cell consists of the first ranks.
    """
    cell_size = max(sizes)
    of_cell = numbers(worker, cell_size)
    left = [rank for rank in of_cell if rank in slots]
    size = largest_cell(sizes, len(left))
    if not size:
        return 0, {}
    lacking = [rank for rank in of_cell[:size] if rank not in slots]
    return size, dict(zip(lacking, reversed(left), strict=False))


def left_of_cells(
    slots: Mapping[int, int], lost: Sequence[int], sizes: Sequence[int], *, whole_job: bool = False
) -> dict[int, int]:
    """Return what becomes of the cells of one node whose GPUs are lost for good, one after another.

    Args:
        slots: Rank -> slot, of all ranks of the node when all is well.
        lost: The slots that are lost.
        sizes: ``JobSpec.cell_sizes``.
        whole_job: As in :func:`completed`.

    Returns:
        Worker -> number of ranks that it goes on with, for each cell that has lost any; that of a whole cell if it was
        completed from others, and 0 if what is left stands by.
    """
    places, size = Places(slots, whole_job=whole_job), max(sizes)
    for slot in lost:
        if (rank := places.rank_in(slot)) is not None:
            places.lose(rank)
            places.settle(sizes)
    hit = {Cell(rank=rank, size=size).worker for rank, slot in slots.items() if slot in lost}
    hit.update(places.broken(size))
    return {worker: places.size_left(worker, size) for worker in sorted(hit)}


def numbers(worker: int, cell_size: int) -> range:
    """Return the ranks of a worker's whole cell."""
    return Cell(rank=worker * cell_size, size=cell_size).numbers(worker)


class Move(NamedTuple):
    """A missing rank that starts in the slot of a spare one, which is lost in its stead."""

    missing: int
    spare: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComesBack:
    """How a cell that leaves between two steps is to come back."""

    generation: int
    """The generation that begins without it."""
    incarnations: tuple[int, ...]
    """Incarnations of its ranks that leave; this is not about other processes of the same ranks."""
    without: tuple[int, ...] = ()
    """Slow ranks that the cell is to do without, as a smaller cell. Empty: none stands by any more for being slow."""


class Places:
    """The slots of one node's ranks, and its broken and smaller cells.

    Args:
        slots: Rank -> slot, i.e. its number on the node.
        whole_job: Whether the job has no other nodes.
    """

    def __init__(self, slots: Mapping[int, int], *, whole_job: bool = False):
        self._whole_job = whole_job
        self._slots = dict(slots)
        """Rank -> slot, without the ranks that are lost for good."""
        self._began_with = frozenset(slots)
        self._lost: list[int] = []
        self.given_up: dict[int, int] = {}
        """Slot whose GPU is taken for broken -> the rank that was lost there. By now another rank may be without a slot
        in its stead: see :class:`Move`.
        """
        self._smaller: dict[int, int] = {}
        """Worker -> its number of ranks, for those that go on as smaller cells."""
        self._aside: set[int] = set()
        """The workers of these that have lost no rank, and go on without slow ranks, which stand by."""

    def slot(self, rank: int) -> int:
        return self._slots[rank]

    def rank_in(self, slot: int) -> int | None:
        """Return the rank that has ``slot``; None if it is lost."""
        return next((rank for rank, own in self._slots.items() if own == slot), None)

    def lose(self, rank: int) -> None:
        """Note that the GPU of ``rank`` is lost for good, as far as this agent can tell."""
        self.given_up[self._slots.pop(rank)] = rank
        self._lost.append(rank)

    def readmit(self, slot: int, cell_size: int) -> tuple[int, int]:
        """Give a slot that was given up, and whose GPU works again, to the cell that lacks the fewest ranks.

        Returns:
            The rank that is to start in ``slot``, and the number of ranks that its cell has gone on with so far; 0: it
            stood by.
        """
        del self.given_up[slot]
        lacks = Counter(one // cell_size for one in self._lost)
        rank = min(self._lost, key=lambda one: (lacks[one // cell_size], one))
        worker = rank // cell_size
        before = self.size_left(worker, cell_size)
        self._lost.remove(rank)
        self._slots[rank] = slot
        if self._has_all(worker, cell_size):
            self._smaller.pop(worker, None)
            self._aside.discard(worker)
        return rank, before

    def broken(self, cell_size: int) -> list[int]:
        """Return the workers that have lost ranks."""
        return sorted({Cell(rank=one, size=cell_size).worker for one in self._lost})

    def complete(
        self, cell_size: int, training: Mapping[int, int] = NO_SHAPES
    ) -> tuple[list[Move], int | None]:
        """Give a broken cell the ranks that it lacks from others, if that makes it whole.

        Args:
            cell_size: As in :func:`completed`.
            training: Worker -> its number of ranks, for cells whose processes are a smaller one now, though they may
                be about to become whole.

        Returns:
            The moves, and the worker of the cell if it was to go on as a smaller cell.
        """
        train = {**training, **self._smaller}
        found = completed(self._slots, self._lost, cell_size, train, whole_job=self._whole_job)
        ranks = {slot: rank for rank, slot in self._slots.items()}
        moves = [self._move(missing, ranks[slot]) for missing, slot in found.items()]
        workers = {Cell(rank=missing, size=cell_size).worker for missing in found}
        grown = next((worker for worker in workers if self._smaller.pop(worker, 0)), None)
        self._aside -= workers
        return moves, grown

    def can_shrink(self, worker: int, sizes: Sequence[int]) -> int:
        """Return how many ranks ``worker`` would have as a smaller cell, if its cell has to change; 0 if not.

        It has to change if it is to have another size, or ranks have to move. ``sizes`` are ``JobSpec.cell_sizes``.
        """
        size, moves = shrunk(self._slots, worker, sizes)
        return 0 if size == self._smaller.get(worker, max(sizes)) and not moves else size

    def living(self, worker: int, cell_size: int) -> list[int]:
        """Return the ranks that are left of ``worker``."""
        return [rank for rank in numbers(worker, cell_size) if rank in self._slots]

    def too_few(self, worker: int, sizes: Sequence[int]) -> bool:
        """Whether ``worker`` was a smaller cell until now and has too few ranks left for any: it stands by from now
        on.
        """
        size, _ = shrunk(self._slots, worker, sizes)
        if size:
            return False
        self._aside.discard(worker)
        return self._smaller.pop(worker, 0) > 0

    def is_all_here(self, worker: int, cell_size: int) -> bool:
        """Whether the whole cell began on this node; if it is spread over several, each agent knows only its own
        ranks.
        """
        return self._began_with.issuperset(numbers(worker, cell_size))

    def size_left(self, worker: int, cell_size: int) -> int:
        """Return the number of ranks that ``worker`` goes on with; 0 if it stands by."""
        return cell_size if self._has_all(worker, cell_size) else self._smaller.get(worker, 0)

    def shrink(self, worker: int, sizes: Sequence[int]) -> list[Move]:
        """Have what is left of ``worker`` go on as a smaller cell; return the moves for that."""
        size, moves = shrunk(self._slots, worker, sizes)
        self._smaller[worker] = size
        return [self._move(missing, spare) for missing, spare in moves.items()]

    def settle(self, sizes: Sequence[int]) -> None:
        """Complete a broken cell if that can be, and have what is left of others go on as smaller cells."""
        size = max(sizes)
        self.complete(size)
        for worker in self.broken(size):
            if not self.too_few(worker, sizes) and self.is_all_here(worker, size):
                self.shrink(worker, sizes)

    def set_aside(self, worker: int, slow: Collection[int], sizes: Sequence[int]) -> int:
        """Have ``worker``, a whole cell, go on as a smaller one without its ``slow`` ranks.

        A rank of the smaller cell that would be in a slow slot changes slots with one that stands by. Return its number
        of ranks; 0 if the cell stays whole.
        """
        of_cell = numbers(worker, max(sizes))
        size = largest_cell(sizes, len(of_cell) - len(slow))
        if not size or worker in self._smaller or not self._has_all(worker, max(sizes)):
            return 0
        within = [rank for rank in of_cell[:size] if rank in slow]
        others = [rank for rank in of_cell[size:] if rank not in slow]
        for one, other in zip(within, reversed(others), strict=False):
            self._slots[one], self._slots[other] = self._slots[other], self._slots[one]
        self._smaller[worker] = size
        self._aside.add(worker)
        return size

    def take_back(self, worker: int, cell_size: int) -> bool:
        """Make ``worker`` a whole cell again, if only slow ranks of it stood by; return whether it is whole now."""
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
        """Whether any cell goes on as a smaller one."""
        return bool(self._smaller)

    def size_of(self, rank: int, cell_size: int) -> int:
        """Return the number of ranks of the smaller cell that a new process of ``rank`` is in; 0 if it is in none."""
        size = self._smaller.get(rank // cell_size, 0)
        return size if rank % cell_size < size else 0
