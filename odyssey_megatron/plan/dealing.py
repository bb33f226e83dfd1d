"""Which microbatch of a step goes where, where they are not equally dear: as their sequences are, of unequal lengths.

A plan counts on microbatches that cost the same, and gives each route as many as it is fast. So the numbers of a plan's
microbatches are places, and which microbatch of the step is in which place is dealt before each step. Nothing of the
plan changes by it, nor what makes up the global batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ENOUGH = 1e-3
"""A dearest route this close to what no dealing is below is not improved any more."""
_SWAPS = 256
"""At most: the ranks work it out between two steps."""


def dearest(costs: Sequence[int], routes: Sequence[int], order: Sequence[int]) -> float:
    """How many times its share the route costs that has most to do for what the plan gives it: 1.0 is even.

    Args:
        costs: of the step's microbatches, together below 2**53.
        routes: of each place, which route it is on.
        order: of each place, which microbatch is in it.
    """
    at, sizes, cost = _counted(routes), _sizes(routes), np.asarray(costs, float)
    mean = float(cost.mean()) if len(cost) else 0.0
    if mean <= 0.0:
        return 1.0
    return float((np.bincount(at, weights=cost[np.asarray(order, int)]) / sizes).max()) / mean


def deal(costs: Sequence[int], routes: Sequence[int]) -> tuple[int, ...]:
    """Of each place the microbatch in it, such that the dearest route (:func:`dearest`) is as little dear as is found.

    Each route keeps its places, and takes its microbatches in their order. They go one by one, from the dearest on,
    each to the route that is least dear until then; at last the dearest route exchanges some with others, one for one,
    while that makes the dearer of the two less dear. Natural order where nothing better is found. Deterministic.
    """
    natural = tuple(range(len(costs)))
    at, sizes, cost = _counted(routes), _sizes(routes), np.asarray(costs, float)
    if len(sizes) < 2 or cost.min() == cost.max():
        return natural
    where = _greedy(cost, sizes)
    _exchange(where, cost, sizes)
    order = np.empty(len(cost), int)
    order[np.argsort(at, kind="stable")] = np.argsort(where, kind="stable")
    dealt = tuple(int(one) for one in order)
    better = dearest(costs, routes, dealt) < dearest(costs, routes, natural) * (1 - 1e-9)
    return dealt if better else natural


def _counted(routes: Sequence[int]) -> NDArray[np.int64]:
    """Routes as 0, 1, 2, ..."""
    return np.unique(np.asarray(routes, np.int64), return_inverse=True)[1].reshape(-1)


def _sizes(routes: Sequence[int]) -> NDArray[np.int64]:
    """Places of each."""
    return np.unique(np.asarray(routes, np.int64), return_counts=True)[1]


def _greedy(cost: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each microbatch its route."""
    where = np.empty(len(cost), np.int64)
    free = sizes.tolist()
    # Of all that have room, the one with the least for its size; of equals that with most places left.
    least = [(0.0, 0.0, route) for route in range(len(free))]
    heapq.heapify(least)
    for microbatch in np.argsort(-cost, kind="stable").tolist():
        _, load, route = heapq.heappop(least)
        where[microbatch] = route
        load, free[route] = load + float(cost[microbatch]), free[route] - 1
        if free[route]:
            heapq.heappush(least, (load / float(sizes[route]), load, route))
    return where


def _exchange(where: NDArray[np.int64], cost: NDArray[np.float64], sizes: NDArray[np.int64]) -> None:
    """Improves ``where``, in place."""
    load, mean = np.bincount(where, weights=cost), float(cost.mean())
    for _ in range(_SWAPS):
        dear = int(np.argmax(load / sizes))
        level = float(load[dear] / sizes[dear])
        if level <= mean * (1 + _ENOUGH):
            return
        own, others = np.flatnonzero(where == dear), np.flatnonzero(where != dear)
        moved = cost[own][:, None] - cost[others][None, :]
        theirs = where[others]
        after = np.maximum((load[dear] - moved) / sizes[dear], (load[theirs] + moved) / sizes[theirs])
        best = int(np.argmin(after))
        if after.flat[best] >= level * (1 - 1e-12):
            return
        gives, takes = int(own[best // len(others)]), int(others[best % len(others)])
        cheap, shift = int(where[takes]), float(cost[gives] - cost[takes])
        where[gives], where[takes] = cheap, dear
        load[dear] -= shift
        load[cheap] += shift
