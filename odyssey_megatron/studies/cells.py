"""Which cells a system trains with as single GPUs fail and are repaired: whole ones, or what is left of them, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from odyssey_megatron.cluster.cell import Shapes
from odyssey_megatron.cluster.places import Places
from odyssey_megatron.studies.trace import ClusterChange


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsChange:
    """The cells that a system has from ``t_s`` on."""

    t_s: float
    alive: tuple[int, ...]
    """The workers that it can train with, ascending."""
    lost: bool
    """Whether one of them was lost, in the middle of a step."""
    shapes: Shapes = field(default_factory=dict)
    """Worker -> its number of GPUs, for those that are smaller cells."""


def whole_cells(
    changes: Sequence[ClusterChange], workers: Sequence[int], cell_size: int
) -> Iterator[CellsChange]:
    """Yield the changes for a system whose cells leave with any of their GPUs, and come back with the last of them.

    Args:
        changes: those of GPUs, ascending in time.
        workers: all cells; that of a GPU is its number divided by ``cell_size``.
    """
    dead, alive = Counter[int](), set(workers)
    for change in changes:
        dead.update(gpu // cell_size for gpu in change.died)
        dead.subtract(gpu // cell_size for gpu in change.joined)
        hit = {gpu // cell_size for gpu in (*change.died, *change.joined)}
        now = (alive - hit) | {worker for worker in hit if not dead[worker]}
        if now != alive:
            yield CellsChange(t_s=change.t_s, alive=tuple(sorted(now)), lost=not alive <= now)
        alive = now


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a system does with what is left of a broken cell."""

    sizes: tuple[int, ...]
    """The numbers of GPUs that a cell may have, descending: the whole one's first (``JobSpec.cell_sizes``)."""
    gpus_per_node: int
    """A multiple of the whole cell's."""
    lost_s: float = 0.0
    """Time from a loss until what is left of the cell trains."""
    again_s: float = 0.0
    """Time that a cell is away when it becomes larger, as all of its ranks start anew; 0.0: it need not leave."""


def broken_cells(
    changes: Sequence[ClusterChange], workers: Sequence[int], rule: Rule
) -> Iterator[CellsChange]:
    """Yield the changes for a system in which broken cells go on by ``rule``; see :func:`whole_cells`.

    What becomes of the cells of a node is said by ``cluster/places.py``, as for a job's agent. A smaller cell that a
    repaired GPU completes leaves, and comes back whole. One that stays broken keeps its size.
    """
    broken = _Broken(rule, dict.fromkeys(workers, rule.sizes[0]))
    for change in changes:
        yield from broken.until(change.t_s)
        yield from broken.apply(change)
    yield from broken.until(float("inf"))


class _Node(Places):
    """The places of a node, on which GPUs are repaired, too."""

    def change(self, died: Collection[int], back: Collection[int], sizes: Sequence[int]) -> None:
        """Note that GPUs have died and come back, and all that follows."""
        for slot in died:
            if (rank := self.rank_in(slot)) is not None:
                self.lose(rank)
        self.settle(sizes)
        for slot in back:
            self.readmit(slot, sizes[0])
            self.settle(sizes)


@dataclass(slots=True)
class _Broken:
    rule: Rule
    cells: dict[int, int]
    """Worker -> the number of GPUs that it trains with; 0: it is away."""
    due: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Worker -> (when, the number of GPUs that it is to have then)."""
    nodes: dict[int, _Node] = field(default_factory=dict)
    """Those that anything has happened to."""

    def until(self, t_s: float) -> Iterator[CellsChange]:
        """Yield what is due before ``t_s``."""
        while self.due and (first_s := min(when_s for when_s, _ in self.due.values())) < t_s:
            self._enter(first_s)
            yield self._now(first_s, lost=False)

    def apply(self, change: ClusterChange) -> Iterator[CellsChange]:
        """Yield what ``change`` changes at once."""
        before, hit = dict(self.cells), set[int]()
        for node in sorted({gpu // self.rule.gpus_per_node for gpu in (*change.died, *change.joined)}):
            hit |= self._on_node(node, change)
        self._enter(change.t_s)
        if hit or self.cells != before:
            yield self._now(change.t_s, lost=bool(hit))

    def _on_node(self, number: int, change: ClusterChange) -> set[int]:
        """Note what happens on a node, and when its cells are to be what they become; return those that are lost."""
        rule, size = self.rule, self.rule.sizes[0]
        gpus = range(number * rule.gpus_per_node, (number + 1) * rule.gpus_per_node)
        whole_job = len(gpus) == len(self.cells) * size
        node = self.nodes.setdefault(number, _Node({gpu: gpu for gpu in gpus}, whole_job=whole_job))
        died, back = ([gpu for gpu in found if gpu in gpus] for found in (change.died, change.joined))
        hit = set[int]()
        for rank in map(node.rank_in, died):
            worker = -1 if rank is None else rank // size
            if rank is not None and rank % size < (self.cells[worker] or node.size_left(worker, size)):
                hit.add(worker)  # a rank that stands by is not missed
        node.change(died, back, rule.sizes)
        left = {worker: node.size_left(worker, size) for worker in sorted({gpu // size for gpu in gpus})}
        hit |= {
            worker for worker, then in left.items() if then < self.cells[worker]
        }  # its GPUs complete another
        trained = {worker for worker in hit if self.cells[worker]}
        for worker, then in left.items():
            self._aim(worker, then, change.t_s, died=bool(died), is_hit=worker in hit)
        return trained

    def _aim(self, worker: int, then: int, t_s: float, *, died: bool, is_hit: bool) -> None:
        """Have ``worker`` become a cell of ``then`` GPUs, if it is not to be one."""
        size, was_due = self.rule.sizes[0], worker in self.due
        if not is_hit and then == (self.due[worker][1] if was_due else self.cells[worker]):
            return
        self.due.pop(worker, None)
        if is_hit:
            self.cells[worker] = 0
        if not then or (self.cells[worker] and self.rule.again_s and then < size):
            return
        # A cell whose other ranks all stand by lacks the repaired one alone.
        starts = not self.cells[worker] and (was_due or then < size)
        wait_s = self.rule.lost_s if died else self.rule.again_s if starts else 0.0
        self.due[worker] = t_s + wait_s, then

    def _enter(self, t_s: float) -> None:
        """Do what is due by ``t_s``. A cell that becomes larger leaves first."""
        for worker, (_, then) in [one for one in self.due.items() if one[1][0] <= t_s]:
            if self.cells[worker] and self.rule.again_s:
                self.cells[worker], self.due[worker] = 0, (t_s + self.rule.again_s, then)
            else:
                self.cells[worker] = then
                del self.due[worker]

    def _now(self, t_s: float, *, lost: bool) -> CellsChange:
        whole = self.rule.sizes[0]
        shapes = {worker: size for worker, size in self.cells.items() if 0 < size < whole}
        alive = tuple(sorted(worker for worker, size in self.cells.items() if size))
        return CellsChange(t_s=t_s, alive=alive, lost=lost, shapes=shapes)
