"""The cells of all workers of a generation, as one rank sees them: who has what it has, and with whom it exchanges."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from odyssey_megatron.cluster.cell import Cell, Shapes


@dataclass(frozen=True, slots=True)
class Cells:
    """All workers' cells, and which rank of one of them this is."""

    cell: Cell
    """This rank's."""
    shapes: Shapes = field(default_factory=dict)

    def ranks_of(self, worker: int) -> list[Cell]:
        """Return the cell of each rank of ``worker``."""
        return self.cell.of_worker(worker, self.shapes.get(worker, 0))

    def alike(self, worker: int) -> bool:
        """Whether ``worker`` has as many ranks as this one, so that each rank has one counterpart there."""
        return self.shapes.get(worker, self.cell.full) == self.cell.size

    def counterparts(self, worker: int) -> list[Cell]:
        """Return the ranks of ``worker`` with which this one exchanges anything."""
        here = self.cell
        if self.alike(worker):
            return [replace(here, rank=worker * here.full + here.index)]

        def exchange(there: Cell) -> bool:
            return any(
                a.parts.given_to(b.parts) or a.gives(b, cuts=True) or a.gives(b, cuts=False)
                for a, b in ((here, there), (there, here))
            )

        return [there for there in self.ranks_of(worker) if exchange(there)]

    def having(self, worker: int, part: int, parts: int) -> tuple[int, ...]:
        """Return the ranks of ``worker`` that have ``part`` of something in ``parts`` parts."""
        if worker in self.shapes or self.cell.runs:
            return tuple(one.rank for one in self.ranks_of(worker) if part in one.parts.own(parts))
        return tuple(self.cell.numbers(worker)[part::parts])
