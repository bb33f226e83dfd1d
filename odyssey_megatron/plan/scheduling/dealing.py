"""Dealing a step's microbatches to routes when they cost different amounts: their sequences have unequal lengths.

A plan assumes that all microbatches cost the same, and gives each route a number of them by its speed. Here the plan's
microbatch numbers are taken as places, and before each step its microbatches are dealt to these places. That changes
neither the plan nor what makes up the global batch. A route is *dear* if its microbatches cost much for their number.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ENOUGH = 1e-3
"""A dearest route this close to the mean, which no dealing can be below, is not improved any more."""
_SWAPS = 256
"""The largest number of exchanges, since the ranks work out the dealing between two steps."""


def dearest(costs: Sequence[int], routes: Sequence[int], order: Sequence[int]) -> float:
    """Return the cost of the dearest route relative to its share: 1.0 is even.

    Args:
        costs: the cost of each of the step's microbatches; their sum is below 2**53.
        routes: for each place, the route that it is on.
        order: for each place, the microbatch that is in it.
    """
    at, sizes, cost = _counted(routes), _sizes(routes), np.asarray(costs, float)
    mean = float(cost.mean()) if len(cost) else 0.0
    if mean <= 0.0:
        return 1.0
    return float((np.bincount(at, weights=cost[np.asarray(order, int)]) / sizes).max()) / mean


def deal(costs: Sequence[int], routes: Sequence[int]) -> tuple[int, ...]:
    """Return the microbatch for each place such that the dearest route (:func:`dearest`) costs as little as is found.

    Each route keeps its places, and takes its microbatches in their order. They are dealt one by one, the most
    expensive first, each to the route that is least dear so far. Then the dearest route exchanges microbatches with
    others, one for one, while that makes the dearer of the two cheaper. If nothing better is found, microbatches stay
    in natural order. Deterministic.
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
    """Return the routes renumbered as 0, 1, 2, ..."""
    return np.unique(np.asarray(routes, np.int64), return_inverse=True)[1].reshape(-1)


def _sizes(routes: Sequence[int]) -> NDArray[np.int64]:
    """Return the number of places of each route."""
    return np.unique(np.asarray(routes, np.int64), return_counts=True)[1]


def _greedy(cost: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the route of each microbatch, by dealing greedily."""
    where = np.empty(len(cost), np.int64)
    free = sizes.tolist()
    # Of the routes with places left the one with the least cost for its size is first; of equals, with the least cost.
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
    """Improve ``where`` in place, by exchanges of two microbatches."""
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
