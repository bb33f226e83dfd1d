"""State transfers: who sends which layers to whom, and which worker takes which seat of a new layout.

A seat is a worker's position in a layout: the set of layers that whoever takes it must hold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from heapq import heapreplace
from typing import Any

from odyssey_megatron.errors import LayersLost
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import (
    EVERYTHING,
    Slice,
    Span,
    bytes_of,
    firsts,
    joined,
    kept,
    without,
)
from odyssey_megatron.plan.plan import Transfer
from odyssey_megatron.plan.schedule import Program, computed_layers


def check_living(previous: Layout, alive: Collection[int]) -> None:
    """Check that the ``alive`` workers have all state of ``previous`` between them.

    Raises:
        LayersLost: they do not; it names the layers and the workers that had them.
    """
    there, owners = set(alive), previous.owners
    lost_of = {kind: [one for one in kind if there.isdisjoint(one)] for kind in set(owners)}
    gone = [lost_of[kind] for kind in owners]
    lost = tuple(layer for layer, one in enumerate(gone) if one)
    if lost:
        had = tuple(sorted({worker for layer in lost for one in gone[layer] for worker in one}))
        held = all(there.intersection(previous.all_holders[layer]) for layer in lost)
        raise LayersLost(lost, had, num_layers=previous.num_layers, copies=previous.copies if held else 0)


def plan_transfers(
    previous: Layout, target: Layout, alive: Collection[int], costs: Costs
) -> tuple[Transfer, ...]:
    """Return the transfers of all state that workers of ``target`` lack.

    Each is sent by that living owner in ``previous`` which has least to send so far. A holder that keeps no optimizer
    state is sent nothing here: it gets the weights as after every step.

    Layers go out in order of size, the largest first, as in Graham's rule of 1969 (longest processing time first). His
    bound of 4/3 of the optimum does not apply here, where only a few workers can send a layer: it is for jobs that any
    machine can do.

    Raises:
        LayersLost: see :func:`check_living`.
    """
    check_living(previous, alive)
    there, sizes = frozenset(alive), [one.state_bytes for one in costs.all_layers]
    whole: dict[int, list[tuple[int, int, tuple[int, ...]]]] = defaultdict(list)
    cut: dict[int, dict[int, list[tuple[Span, int, tuple[int, ...]]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for layer, (before, after) in enumerate(zip(previous.states, target.states, strict=True)):
        for worker, span, sources in _missing(before, after, there) if before != after else ():
            if span == EVERYTHING:
                whole[sizes[layer]].append((layer, worker, sources))
            else:
                cut[sizes[layer]][worker].append((span, layer, sources))
    # The slices that one worker is sent of several layers stand together, so that the wire can name them together.
    loads, transfers = _Loads(), list[Transfer]()
    for size in sorted(whole.keys() | cut.keys(), reverse=True):
        for layer, worker, sources in sorted(whole.get(size, ())):
            transfers.append(Transfer(layer, loads.least(sources, size), worker))
        for worker, parts in sorted(cut[size].items()):
            for span, layer, sources in sorted(parts):
                transfers.append(Transfer(layer, loads.least(sources, bytes_of(span, size)), worker, span))
    return tuple(transfers)


class _Loads:
    """The number of bytes that each worker has to send."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = defaultdict(int)
        self._heaps: dict[int, tuple[tuple[int, ...], list[tuple[int, int]]]] = {}
        """Identity of a tuple of sources -> (that tuple, its heap). To hash a thousand workers for each transfer takes
        longer than all else. In the heap are (bytes when last looked at, worker). Bytes only grow, so a first entry
        that is still true is the least.
        """

    def least(self, sources: tuple[int, ...], size_bytes: int) -> int:
        """Return that one of ``sources`` which sends least so far, and add ``size_bytes`` to what it sends."""
        known = self._heaps.get(id(sources))
        if known is None:
            known = self._heaps[id(sources)] = sources, [(0, one) for one in sources]
        heap = known[1]
        while (now := self._sent[heap[0][1]]) != heap[0][0]:
            heapreplace(heap, (now, heap[0][1]))
        source = heap[0][1]
        self._sent[source] += size_bytes
        return source


@lru_cache(maxsize=256)
def _missing(
    before: tuple[Slice, ...], after: tuple[Slice, ...], alive: frozenset[int]
) -> tuple[tuple[int, Span, tuple[int, ...]], ...]:
    """Return the spans of a layer that workers lack when its slices change from ``before`` to ``after``.

    Each is (worker, span, living workers that have all of the span, ascending), in as few spans as possible.
    """
    found = []
    had, starts = kept(before), [one.span[0] for one in before]
    there = [alive.intersection(one.owners) for one in before]
    senders: dict[
        tuple[int, int], tuple[int, ...]
    ] = {}  # by the first and the last slice of ``before`` in the span
    for worker, spans in sorted(kept(after).items()):
        for start, stop in without(joined(spans), had.get(worker, ())):
            while start < stop:
                place = first = bisect_right(starts, start) - 1
                sources, end = there[place], before[place].span[1]
                while end < stop and (further := sources & there[place + 1]):
                    sources, place, end = further, place + 1, before[place + 1].span[1]
                if (first, place) not in senders:
                    senders[first, place] = tuple(sorted(sources))
                found.append((worker, (start, min(end, stop)), senders[first, place]))
                start = end
    return tuple(found)


def needed_at_once(layout: Layout, worker: int, program: Program, held: Collection[int]) -> set[int]:
    """Return the layers that must reach ``worker`` before a step of ``layout`` in which it runs ``program``.

    These are the layers that it computes, and those of which it sends weights before the step. They do not include
    the layers in ``held``, which it holds so far: of these it lacks at most optimizer state.
    """
    sends = {layer for layer, found in enumerate(layout.states) if layout.keepers and worker in firsts(found)}
    return (sends | layout.with_tied(computed_layers(program))).difference(held)


def transfer_s(transfers: Sequence[Transfer], costs: Costs) -> float:
    """Return the time until all transfers have arrived.

    A worker sends one transfer at a time, and receives one at a time meanwhile.
    """
    sent, received = defaultdict[int, float](float), defaultdict[int, float](float)
    sizes = costs.moved_bytes
    for layer, source, target, span in transfers:
        seconds = costs.link_latency_s + bytes_of(span, sizes[layer]) / costs.link_bytes_per_s
        sent[source] += seconds
        received[target] += seconds
    return max((*sent.values(), *received.values()), default=0.0)


def assign_seats(
    seats: Sequence[Collection[int]],
    workers: Sequence[int],
    held: Mapping[int, Collection[int]],
    costs: Costs,
) -> tuple[int, ...]:
    """Return the worker for each seat such that the fewest bytes move.

    Args:
        seats: for each seat the layers that its worker must hold.
        workers: at least as many as seats.
        held: worker -> the layers that it has.

    A worker that has all a seat needs and nothing else takes it outright. That loses nothing: missing bytes
    obey the triangle inequality, so swapping it in makes no assignment worse. The rest is a linear
    assignment problem (Kuhn-Munkres; the papers' choice, arXiv 2508.21613).
    """
    taken: dict[int, int] = {}
    by_layers: dict[frozenset[int], list[int]] = {}
    for worker in sorted(workers, reverse=True):
        by_layers.setdefault(frozenset(held.get(worker, ())), []).append(worker)
    for seat, layers in enumerate(seats):
        exact = by_layers.get(frozenset(layers))
        if exact:
            taken[seat] = exact.pop()
    open_seats = [seat for seat in range(len(seats)) if seat not in taken]
    left = sorted(worker for group in by_layers.values() for worker in group)
    sizes = [layer.state_bytes for layer in costs.all_layers]
    have = [frozenset(held.get(worker, ())) for worker in left]
    missing = []
    lacks: dict[frozenset[int], list[int]] = {}
    for seat in open_seats:
        layers = frozenset(seats[seat])
        if layers not in lacks:
            each = {held: sum(sizes[layer] for layer in layers - held) for held in set(have)}
            lacks[layers] = [each[held] for held in have]
        missing.append(lacks[layers])
    solve = cheapest_assignment if len(open_seats) <= _EXACT_SEATS else greedy_assignment
    for row, column in enumerate(solve(missing)):
        taken[open_seats[row]] = left[column]
    return tuple(taken[seat] for seat in range(len(seats)))


_EXACT_SEATS = 256
"""Up to this number of seats the cubic solver is fast enough to decide within a second."""


def greedy_assignment(cost: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return a column for each row, cheapest pairs first: fast, but not the least sum.

    Rows that are one object, and equal columns, are taken together.
    """
    rows: dict[int, list[int]] = {}
    for row in range(len(cost) - 1, -1, -1):
        rows.setdefault(id(cost[row]), []).append(row)
    kinds = [cost[alike[0]] for alike in rows.values()]
    columns: dict[tuple[float, ...], list[int]] = {}
    for column in range(len(cost[0]) - 1, -1, -1):
        columns.setdefault(tuple(kind[column] for kind in kinds), []).append(column)
    pairs = sorted((price, i, j) for j, prices in enumerate(columns) for i, price in enumerate(prices))
    row_lists, column_lists = list(rows.values()), list(columns.values())
    taken = [-1] * len(cost)
    for _, i, j in pairs:
        while row_lists[i] and column_lists[j]:
            taken[row_lists[i].pop()] = column_lists[j].pop()
    return tuple(taken)


def cheapest_assignment(cost: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return the column of each row such that the sum is least. There are at least as many columns as rows."""
    if not cost:
        return ()
    if len(cost) == 1:
        return (min(range(len(cost[0])), key=lambda column: (cost[0][column], column)),)
    return tuple(int(column) for column in _solver()(cost)[1])


def warm_up() -> None:
    """Import the assignment solver (half a second) before a recovery has to wait for it."""
    _solver()


def _solver() -> Callable[[Sequence[Sequence[float]]], tuple[Any, Any]]:
    # Imported here, so that the package imports fast, and without SciPy if nothing is assigned.
    from scipy.optimize import linear_sum_assignment

    solver: Callable[[Sequence[Sequence[float]]], tuple[Any, Any]] = linear_sum_assignment
    return solver
