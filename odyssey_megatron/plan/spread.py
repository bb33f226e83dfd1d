"""Replicas of a layer on different nodes, so that the loss of one whole node leaves somebody who has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.redundancy import with_keepers


def on_one_node(layout: Layout, nodes: Mapping[int, int]) -> dict[int, list[int]]:
    """Node -> the layers whose state is there and nowhere else: losing it ends the job. Empty where one node is all
    there is. ``nodes``: of each worker.
    """
    found: dict[int, list[int]] = {}
    if len({nodes[worker] for worker in layout.workers}) > 1:
        for layer, owners in enumerate(layout.owners):
            for on in {frozenset(nodes[worker] for worker in one) for one in owners}:
                if len(on) == 1:
                    found.setdefault(min(on), []).append(layer)
    return dict(sorted(found.items()))


def spread(layout: Layout, nodes: Mapping[int, int], optimizer_copies: int = 0) -> Layout:
    """``layout`` with its workers in one another's places, so that fewer layers have all holders on one node, or all
    owners of a slice of their optimizer state where that is to be cut into slices with so many owners; itself where
    that cannot be.

    Workers are alike, so nothing else changes. Those that compute the same layers stand next to one another, and are
    dealt to the nodes in turn: as many different ones as there are nodes, or holders.
    """
    first: dict[int, tuple[int, int]] = {}
    for number, route in enumerate(layout.routes):
        for hop in route.hops:
            first.setdefault(hop.worker, (hop.first, number))
    before: Counter[int] = Counter()
    turn = {}
    for worker in sorted(layout.workers, key=lambda worker: (nodes[worker], worker)):
        turn[worker] = (before[nodes[worker]], nodes[worker])
        before[nodes[worker]] += 1
    standing = sorted(layout.workers, key=lambda worker: (first.get(worker, (layout.num_layers, 0)), worker))
    places = dict(zip(standing, sorted(layout.workers, key=turn.__getitem__), strict=True))
    found = with_places(layout, places)

    def alone(one: Layout) -> int:
        kept = with_keepers(one, None, nodes, optimizer_copies)
        return sum(map(len, on_one_node(kept, nodes).values()))

    return found if alone(found) < alone(layout) else layout


def with_places(layout: Layout, places: Mapping[int, int]) -> Layout:
    """``layout`` with another worker in the place of each."""

    def moved(rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(places[worker] for worker in row)) for row in rows)

    routes = tuple(
        replace(route, hops=tuple(replace(hop, worker=places[hop.worker]) for hop in route.hops))
        for route in layout.routes
    )
    keepers = tuple(tuple(places.get(worker, worker) for worker in ring) for ring in layout.keepers)
    return replace(layout, holders=moved(layout.holders), routes=routes, keepers=keepers).check()
