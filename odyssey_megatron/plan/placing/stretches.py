"""How the ranks of a worker that have the same of a layer share out the optimizer state that the worker keeps.

Slices of a layer are cut over workers (``slices.py``). Several ranks of a cell may have the same of every layer:
context-parallel ranks, and the lanes of a gang, but for its experts. Then what one of them has of a layer is divided
into as many *stretches* of equal size as a whole cell has such ranks, and the slices are cut from each stretch: each of
these ranks keeps its worker's slices of one stretch. A rank of a smaller cell, which stands for several of them, keeps
those of several. So a rank of a whole cell keeps ``copies`` / (places x stretches) of the state, and all owners of a
number are in different cells.

In a gang a layer's experts are a :class:`Kind` of their own: fewer ranks have the same of them, often none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.parts import filled
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import EVERYTHING, WHOLE, Span

DENSE: Span = (WHOLE, 2 * WHOLE)
"""In a gang, all of a layer but its experts. Spans of that lie in here, and those of experts in :data:`EXPERTS`; spans
that lie in ``EVERYTHING`` are of both.
"""
EXPERTS: Span = (2 * WHOLE, 3 * WHOLE)
"""In a gang, the experts that a rank has of a layer."""


def of_kind(span: Span, *, spread: bool) -> Span | None:
    """Return what ``span`` has of experts that are ``spread`` over ranks, or else of everything but these, in shares of
    that; None: nothing.
    """
    first = span[0] - span[0] % WHOLE
    if first not in (0, (EXPERTS if spread else DENSE)[0]):
        return None
    return span[0] - first, span[1] - first


def is_everything(spans: tuple[Span, ...]) -> bool:
    """Whether ``spans``, which a rank keeps, are all that there is of a layer."""
    return spans in ((EVERYTHING,), (DENSE, EXPERTS))


def in_stretch(span: Span, number: int, count: int) -> Span:
    """Return what ``span``, in shares of stretch ``number`` of ``count``, is in shares of all stretches together.

    What is side by side stays so, however small: edges are rounded down, each always to the same.
    """
    return (number * WHOLE + span[0]) // count, (number * WHOLE + span[1]) // count


def kept_by(cell: Cell, layout: Layout, worker: int) -> dict[int, tuple[Span, ...]]:
    """Return, for each layer, the spans of its optimizer state that the rank of ``cell`` keeps as one of ``worker``."""
    own = Stretches.of(cell, layout)
    return {layer: own.spans(spans) for layer, spans in layout.spans_kept_by(worker).items()}


class Kind(NamedTuple):
    """Numbers of a layer that are cut together, as one rank has them."""

    all: Span
    """``EVERYTHING``, or in a gang ``DENSE`` or ``EXPERTS``."""
    parts: int
    """Number of different parts of it that ranks of a cell have (``Parts.own``)."""
    stretches: int
    own: range
    """The stretches of which this rank keeps state."""

    def cut(self, of_worker: Span, stretch: int) -> Span:
        """Return the span of ``stretch`` that a slice ``of_worker`` is."""
        low, high = in_stretch(of_worker, stretch, self.stretches)
        return self.all[0] + low, self.all[0] + high

    def each(self, of_worker: Iterable[Span], own: range | None = None) -> tuple[Span, ...]:
        """Return what the rank has of its worker's spans, stretch by stretch. ``own``: those of another rank."""
        spans = [*of_worker]
        return tuple(self.cut(span, one) for one in (self.own if own is None else own) for span in spans)


@dataclass(frozen=True, slots=True)
class Stretches:
    """Which stretches of its layers one rank keeps state of."""

    kinds: tuple[Kind, ...]
    """One; in a gang two, of which the second is of experts."""

    @classmethod
    def of(cls, cell: Cell, layout: Layout) -> Stretches:
        """Return those of the rank of ``cell`` under ``layout``, which has one stretch if state is not cut."""
        return cls.of_cell(cell) if layout.keepers else cls((Kind(EVERYTHING, 1, 1, range(1)),))

    @classmethod
    def of_cell(cls, cell: Cell) -> Stretches:
        """Return those of the rank of ``cell`` in a job whose optimizer state is cut."""
        parts, is_gang = cell.parts, cell.full_expert > 1
        all_but = Kind(DENSE if is_gang else EVERYTHING, cell.full_tensor, parts.alike, parts.held_alike)
        if not is_gang:
            return cls((all_but,))
        own = parts.held_experts_alike
        return cls((all_but, Kind(EXPERTS, parts.of_experts, parts.experts_alike, own)))

    @property
    def shares_out(self) -> bool:
        """Whether ranks of a whole cell share anything out."""
        return any(one.stretches > 1 for one in self.kinds)

    @property
    def most(self) -> int:
        """Number of stretches of all kinds together."""
        return sum(one.stretches for one in self.kinds)

    def spans(self, of_worker: Iterable[Span]) -> tuple[Span, ...]:
        """Return what the rank has of its worker's spans, as spans of all that it has of the layer.

        If it has all stretches of all of a kind, that is one span, as for a rank that has nobody to share with.
        """
        found = tuple(of_worker)
        is_all = found == (EVERYTHING,)
        return tuple(
            span
            for one in self.kinds
            for span in ((one.all,) if is_all and len(one.own) == one.stretches else one.each(found))
        )

    def each(self, of_worker: Iterable[Span]) -> tuple[Span, ...]:
        """As :meth:`spans`, but always stretch by stretch, as other ranks may have these."""
        spans = [*of_worker]
        return tuple(span for one in self.kinds for span in one.each(spans))

    def every(self, of_worker: Iterable[Span]) -> tuple[Span, ...]:
        """As :meth:`each`, of all ranks of the worker together."""
        spans = [*of_worker]
        return tuple(span for one in self.kinds for span in one.each(spans, range(one.stretches)))

    def apart(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return the spans of :meth:`spans` as :meth:`each` has them."""
        whole = {one.all: one.each([EVERYTHING]) for one in self.kinds}
        return tuple(each for span in spans for each in whole.get(span, (span,)))


class Piece(NamedTuple):
    """What of a layer's state goes from one rank to another in one message."""

    number: int
    """Which of the parts that this rank has it is of."""
    slot: int
    """Tells it from the others that go between two workers in one transfer."""
    span: Span


def exchanged(source: Cell, target: Cell, of_worker: Span, *, sends: bool) -> list[Piece]:
    """Return what the rank ``source`` sends the rank ``target`` of the span ``of_worker`` in a job whose optimizer
    state is cut; numbers are those of the source if it ``sends``, else of the target.
    """
    found, before = list[Piece](), 0
    for given, taken in zip(Stretches.of_cell(source).kinds, Stretches.of_cell(target).kinds, strict=True):
        has, lacks = source.parts.own(given.parts), target.parts.own(given.parts)
        numbers = has if sends else lacks
        found += [
            Piece(numbers.index(part), before + stretch * given.parts + part, taken.cut(of_worker, stretch))
            for stretch in taken.own
            for part in lacks
            if stretch in given.own and part in has
        ]
        before += given.stretches * given.parts
    return found


class Seats(NamedTuple):
    """The ranks of a block's group, as they share out its ``stretches``."""

    ranks: Sequence[int]
    """The number of ranks that each of the block's holders has in the group, which come in turn."""
    stretches: int

    def keeping(self, holder: int, stretch: int) -> int:
        """Return the number in the group of the rank of ``holder`` that keeps ``stretch``."""
        own = filled(self.stretches, self.ranks[holder])
        return sum(self.ranks[:holder]) + next(at for at, one in enumerate(own) if stretch in one)

    def kept(self) -> list[tuple[int, range]]:
        """Return, for each rank of the group, the number of its holder, and the stretches that it keeps."""
        return [
            (holder, own) for holder, count in enumerate(self.ranks) for own in filled(self.stretches, count)
        ]
