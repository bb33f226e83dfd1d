"""Whose fault it is that a step's numbers are not finite: the model's own, or a worker's that computes wrongly.

Each worker has noted whether all that it made is finite (``Progress.sums``). So it is known where on the path
of a microbatch the first number was made that is not: by a worker that was given finite ones. The step is
done once more, in the same schedule, with microbatches exchanged, such that those in question go through
other workers. What is finite there was made wrongly here; what is not is the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.execute.progress import MessageKey, Progress
from odyssey_megatron.plan.layout import Hop, Layout
from odyssey_megatron.plan.schedule import Op, Program

Exchange = Mapping[int, int]
"""Microbatch -> the microbatch that is computed in its place."""

_ATTEMPTS = 3
"""Attempts at most. More than one is needed where a worker has computed more than half of all microbatches."""

Marks = frozenset[tuple[Op, int, int]]
"""What is not finite: (SEND_FORWARD, microbatch, the last layer that made it), (SEND_BACKWARD, microbatch,
the first layer that made it), (REDUCE_GRAD, worker, the first layer of the block).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """The workers whose numbers are the first on their path that are not finite."""

    tainted: frozenset[int] = frozenset()
    """Microbatches with a number on their path that is not finite."""
    by_path: dict[int, frozenset[int]] = field(default_factory=dict)
    """Worker -> a microbatch for which it was given finite numbers, and made others."""
    by_gradient: dict[int, frozenset[int]] = field(default_factory=dict)
    """Worker -> the microbatches whose weight gradients it has added up to numbers that are not finite,
    though everything else on the paths of these microbatches is.
    """

    @property
    def questions(self) -> dict[int, frozenset[int]]:
        """Worker -> the microbatches that other workers must compute, to tell whether it is to blame."""
        workers = self.by_path.keys() | self.by_gradient.keys()
        none = frozenset[int]()
        return {one: self.by_path.get(one, none) | self.by_gradient.get(one, none) for one in sorted(workers)}


def suspects(layout: Layout, marks: Marks) -> Suspects:
    """Return the suspects; ``layout`` has the routes that the microbatches took."""
    paths = _paths(layout)
    made: dict[int, set[int]] = {}
    for microbatch, hops in paths.items():
        for op, order in ((Op.SEND_FORWARD, hops), (Op.SEND_BACKWARD, hops[::-1])):
            first = next((hop for hop in order if _marked(marks, op, microbatch, hop)), None)
            if first is not None:
                made.setdefault(first.worker, set()).add(microbatch)
                break
    tainted = frozenset(microbatch for op, microbatch, _ in marks if op is not Op.REDUCE_GRAD)
    added: dict[int, frozenset[int]] = {}
    for op, worker, layer in sorted(marks, key=lambda mark: mark[1:]):
        if op is not Op.REDUCE_GRAD:
            continue
        through = frozenset(
            microbatch
            for microbatch, hops in paths.items()
            if any(
                hop.worker == worker and layer in layout.with_tied(range(hop.first, hop.last)) for hop in hops
            )
        )
        if not through & tainted:
            added[worker] = added.get(worker, frozenset()) | through
    return Suspects(
        tainted=tainted,
        by_path={worker: frozenset({min(ones)}) for worker, ones in made.items()},
        by_gradient=added,
    )


def exchanged(layout: Layout, questions: Mapping[int, frozenset[int]]) -> Exchange:
    """Return pairs of microbatches that change places.

    As many as possible of those in question go past the worker that they ask about; the others stay.
    """
    through = _through(layout)
    places: dict[int, int] = {}
    for worker, asked in questions.items():
        for microbatch in sorted(asked - places.keys()):
            free = [
                one
                for one in through
                if one not in places and one not in asked and worker not in through[one] and one != microbatch
            ]
            if not free:
                continue
            # Prefer one that avoids all suspects: what two of them get wrong alike would be taken for the
            # model's own.
            other = min(free, key=lambda one: (len(through[one] & questions.keys()), one))
            places |= {microbatch: other, other: microbatch}
    return places


def in_place(layout: Layout, exchange: Exchange) -> Layout:
    """Return ``layout`` with the routes that the microbatches take after the exchange."""
    routes = tuple(
        replace(route, microbatches=tuple(exchange.get(one, one) for one in route.microbatches))
        for route in layout.routes
    )
    return replace(layout, routes=routes)


def renumbered(program: Program, exchange: Exchange) -> Program:
    """Return ``program`` with the exchanged microbatches in place of each other."""
    return tuple(one._replace(microbatch=exchange.get(one.microbatch, one.microbatch)) for one in program)


class Inquiry:
    """Finds out which suspects are guilty: those whose microbatches in question were all finite elsewhere.

    Args:
        before: The suspects of the attempt whose numbers are not finite.
    """

    def __init__(self, layout: Layout, before: Suspects):
        self._layout, self._before = layout, before
        self._open = before.questions

    def next_exchange(self) -> Exchange:
        """Return the exchange for another attempt; empty if that could tell nothing more."""
        return exchanged(self._layout, {worker: asked for worker, asked in self._open.items() if asked})

    def hear(self, layout: Layout, after: Suspects, *, finite: bool) -> None:
        """Take in the result of an attempt.

        Args:
            layout: The layout with the routes that the microbatches took in it.
            after: The suspects of that attempt.
            finite: Whether all totals were finite.
        """
        through = _through(layout)
        for worker, asked in list(self._open.items()):
            elsewhere = frozenset(one for one in asked if worker not in through[one])
            others = after.by_gradient.keys() - {worker}
            same = elsewhere & after.tainted or any(through[one] & others for one in elsewhere)
            # A sum that is too large only where all of it is in one place is nobody's fault.
            too_large = worker in self._before.by_gradient and not finite and worker not in after.by_gradient
            if same or too_large:
                del self._open[worker]
            else:
                self._open[worker] = asked - elsewhere

    @property
    def guilty(self) -> list[int]:
        """The workers that made numbers which are not finite, where others did not."""
        return [worker for worker, asked in self._open.items() if not asked]


def examine(
    layout: Layout,
    cell: Cell,
    group: dist.ProcessGroup,
    progress: Progress,
    again: Callable[[Exchange], tuple[Progress, bool]],
) -> tuple[dict[int, str], frozenset[int]]:
    """Return worker -> what is wrong with its numbers, empty if nobody's are, and the microbatches in which a number is
    not finite. Collective.

    Args:
        group: The group of all members.
        progress: The progress of the attempt whose numbers are not finite.
        again: Does the step once more with these microbatches exchanged. Returns the progress, and whether
            all totals are finite.
    """
    before = suspects(layout, _marks(layout, cell, group, progress))
    inquiry = Inquiry(layout, before)
    for _ in range(_ATTEMPTS):
        if not (exchange := inquiry.next_exchange()):
            break
        trial, finite = again(exchange)
        moved = in_place(layout, exchange)
        inquiry.hear(moved, suspects(moved, _marks(moved, cell, group, trial)), finite=finite)
    wrong = {
        worker: f"its {'weight' if worker in before.by_gradient else 'activations or'} gradients of microbatch(es) "
        f"{sorted(before.questions[worker])} were not finite, and those that others computed of the same were"
        for worker in inquiry.guilty
    }
    return wrong, before.tainted


def _marks(layout: Layout, cell: Cell, group: dist.ProcessGroup, progress: Progress) -> Marks:
    """Return the marks of all members together. A cell is marked if any of its ranks is."""
    width, height = len(layout.all_holders), layout.num_microbatches
    ops = {Op.SEND_FORWARD: 0, Op.SEND_BACKWARD: height, Op.REDUCE_GRAD: 2 * height}
    table = torch.zeros(2 * height + max(layout.workers) + 1, width, dtype=torch.int32)
    for key, sums in progress.sums.items():
        if not all(math.isfinite(float(one)) for one in sums):
            op, row, layer = _place(key, cell.worker)
            table[ops[op] + row, layer] = 1
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    found = table.nonzero().tolist()
    names = list(ops)
    return frozenset(
        (names[min(row // height, 2)], row - ops[names[min(row // height, 2)]], layer) for row, layer in found
    )


def _place(key: MessageKey, worker: int) -> tuple[Op, int, int]:
    op, microbatch, edge = key
    if op is Op.REDUCE_GRAD:
        return op, worker, edge
    return op, microbatch, edge - 1 if op is Op.SEND_FORWARD else edge


def _paths(layout: Layout) -> dict[int, tuple[Hop, ...]]:
    return {microbatch: route.hops for route in layout.routes for microbatch in route.microbatches}


def _through(layout: Layout) -> dict[int, set[int]]:
    """Return microbatch -> the workers on its path."""
    return {one: {hop.worker for hop in hops} for one, hops in _paths(layout).items()}


def _marked(marks: Marks, op: Op, microbatch: int, hop: Hop) -> bool:
    return any((op, microbatch, layer) in marks for layer in range(hop.first, hop.last))
