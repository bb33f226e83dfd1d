"""``check_units()``: whether each unit of a layer's state is where a generation needs it when its first step ends.

A unit is what one rank may have of a layer by itself: one part of it (``cluster/parts.py``: a shard, or some experts),
and of that part's optimizer state one span (``plan/placing/slices.py``). Parts are the same in all layers, so whole
workers are checked by their spans, and the ranks of each shape of cell by their parts.

This is a second opinion. Who sends what is worked out by ``plan/placing/transfer.py`` and ``cluster/cell.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import lru_cache

from odyssey_megatron.cluster.cell import Cell, Shapes
from odyssey_megatron.errors import PlanInvalid
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import Span, joined, kept, without
from odyssey_megatron.plan.plan import Transfer
from odyssey_megatron.plan.sending.generation import Generation


def check_units(generation: Generation, cell: Cell) -> None:
    """Check that the members of ``generation`` have all that its plan takes for granted.

    - All ranks of each worker in the layout are members: the first ones of a smaller cell, else all.
    - The ranks of each cell have all parts of a layer between them.
    - Each keeper of a span of a layer's state has it, or is sent it by a worker that has it. A worker whose ranks are
      new has nothing yet.

    Args:
        cell: the whole cell of any rank.

    Raises:
        PlanInvalid: this is not so; it names the worker, the layer, and what is missing.
    """
    shapes, layout = dict(generation.shapes), generation.plan.layout
    members = frozenset(generation.members)
    _check_ranks(cell, shapes, layout.workers, members)
    check_parts(cell, frozenset((cell.full, *shapes.values())))
    if generation.previous is not None:
        fresh = {rank // cell.full for rank in generation.fresh}
        has = {rank // cell.full for rank in members} - fresh
        check_state(generation.previous, layout, generation.plan.transfers, has)


def _check_ranks(cell: Cell, shapes: Shapes, workers: Collection[int], members: frozenset[int]) -> None:
    possible = {cell.full // each for each in cell.divisions(tensor=True)} | {*cell.uneven_sizes}
    for worker, size in shapes.items():
        if size not in possible:
            raise PlanInvalid(
                f"worker {worker} has {size} rank(s); a cell of {cell.full} can have {sorted(possible)}"
            )
    for worker in workers:
        ranks = cell.numbers(worker)[: shapes.get(worker, cell.full)]
        if missing := [rank for rank in ranks if rank not in members]:
            raise PlanInvalid(f"worker {worker} holds layers, and its rank(s) {missing} are no members")


@lru_cache(maxsize=64)
def check_parts(cell: Cell, sizes: frozenset[int]) -> None:
    """Check that in a job with cells of these ``sizes``, whole ones among them, each cell has all parts of a layer.

    Raises:
        PlanInvalid: the ranks of a cell lack some.
    """
    made = cell.among(dict(enumerate(sizes)))
    for size in sizes:
        ranks = made.of_worker(0, size)
        lacks = {*range(ranks[0].parts.count)}.difference(*(one.parts.held for one in ranks))
        if lacks:
            raise PlanInvalid(
                f"{size} of {cell.full} ranks lack part(s) {sorted(lacks)} of each layer between them"
            )


def check_state(
    previous: Layout, layout: Layout, transfers: Sequence[Transfer], has: Collection[int]
) -> None:
    """Check that each keeper in ``layout`` comes to all state that it is to have.

    Args:
        previous: the layout whose keepers are complete and current.
        has: the workers that still have what they had in ``previous``.

    Raises:
        PlanInvalid: a keeper lacks a span, or a worker is to send one that it has not.
    """
    sent: dict[tuple[int, int], list[Span]] = defaultdict(list)
    had = [kept(found) for found in previous.states]
    for layer, source, target, span in transfers:
        if any(without((span,), had[layer].get(source, ()) if source in has else ())):
            raise PlanInvalid(
                f"worker {source} is to send {span} of layer {layer} to {target}, and has not all of it"
            )
        sent[layer, target].append(span)
    stay = {*layout.workers} <= {*has}
    for layer, (before, after) in enumerate(zip(previous.states, layout.states, strict=True)):
        if stay and before == after:
            continue
        for worker, spans in kept(after).items():
            own = had[layer].get(worker, ()) if worker in has else ()
            if own == spans:
                continue
            lacks = list(without(joined(spans), sorted((*own, *sent.get((layer, worker), ())))))
            if lacks:
                raise PlanInvalid(
                    f"worker {worker} is to keep {list(spans)} of layer {layer}, and lacks {lacks}"
                )
