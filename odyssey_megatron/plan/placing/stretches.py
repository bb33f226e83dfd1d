"""How the ranks of a worker that have the same of a layer share out the optimizer state that the worker keeps.

Slices of a layer are cut over workers (``slices.py``). Several ranks of a cell may have the same of every layer, by
context parallelism. Then what one of them has of a layer is divided into as many *stretches* of equal size as a whole
cell has such ranks, and the slices are cut from each stretch: each of these ranks keeps its worker's slices of one
stretch. A rank of a smaller cell, which stands for several of them, keeps those of several. So a rank of a whole cell
keeps ``copies`` / (places x stretches) of the state, and all owners of a number are in different cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import EVERYTHING, WHOLE, Span


def in_stretch(span: Span, number: int, count: int) -> Span:
    """Return what ``span``, in shares of stretch ``number`` of ``count``, is in shares of all stretches together.

    What is side by side stays so, however small: edges are rounded down, each always to the same.
    """
    return (number * WHOLE + span[0]) // count, (number * WHOLE + span[1]) // count


def stretches(cell: Cell, layout: Layout) -> int:
    """Return the number of stretches of each layer; 1 where optimizer state is not cut."""
    return cell.parts.alike if layout.keepers else 1


def kept_by(cell: Cell, layout: Layout, worker: int) -> dict[int, tuple[Span, ...]]:
    """Return, for each layer, the spans of its optimizer state that the rank of ``cell`` keeps as one of ``worker``."""
    own = Stretches.of(cell, layout)
    return {layer: own.spans(spans) for layer, spans in layout.spans_kept_by(worker).items()}


@dataclass(frozen=True, slots=True)
class Stretches:
    """Which stretches of its layers one rank keeps state of."""

    count: int
    own: range

    @classmethod
    def of(cls, cell: Cell, layout: Layout) -> Stretches:
        """Return those of the rank of ``cell`` under ``layout``."""
        count = stretches(cell, layout)
        return cls(count, cell.parts.held_alike if count > 1 else range(1))

    def spans(self, of_worker: Iterable[Span]) -> tuple[Span, ...]:
        """Return what the rank has of its worker's spans, as spans of all that it has of the layer.

        If it has all stretches of all of it, that is one span, as for a rank that has nobody to share with.
        """
        found = tuple(of_worker)
        return found if found == (EVERYTHING,) and len(self.own) == self.count else self.each(found)

    def each(self, of_worker: Iterable[Span]) -> tuple[Span, ...]:
        """As :meth:`spans`, but always stretch by stretch, as other ranks may have these."""
        spans = [*of_worker]
        return tuple(in_stretch(span, number, self.count) for number in self.own for span in spans)

    def apart(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return the spans of :meth:`spans` as :meth:`each` has them."""
        return self.each(spans) if spans == (EVERYTHING,) else spans


class Seats(NamedTuple):
    """The ranks of a block's group, which has ``ranks`` ranks of each holder in turn, as they share out stretches.

    A *seat* is one or more consecutive ranks of a holder that keep the same stretches.
    """

    ranks: tuple[int, ...]
    """The number of ranks of each seat."""
    holders: tuple[int, ...]
    """The number of each seat's holder."""
    stretches: int

    @classmethod
    def of(cls, ranks: Sequence[int], count: int) -> Seats:
        """Return the seats of holders with so many ``ranks`` each, and ``count`` stretches."""
        seats = [min(one, count) for one in ranks]
        return cls(
            tuple(one // own for one, own in zip(ranks, seats, strict=True) for _ in range(own)),
            tuple(holder for holder, own in enumerate(seats) for _ in range(own)),
            count,
        )

    def keeping(self, holder: int, stretch: int) -> int:
        """Return the number of the seat of ``holder`` that keeps ``stretch``."""
        return self.holders.index(holder) + stretch * self.holders.count(holder) // self.stretches

    def kept(self) -> list[tuple[int, Stretches]]:
        """Return, for each seat, the number of its holder, and the stretches that it keeps."""
        found = []
        for seat, holder in enumerate(self.holders):
            each = self.stretches // self.holders.count(holder)
            first = (seat - self.holders.index(holder)) * each
            found.append((holder, Stretches(self.stretches, range(first, first + each))))
        return found
