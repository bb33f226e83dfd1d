"""Placing the replicas of a layer on different nodes, so that the loss of a whole node leaves a holder of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.redundancy import with_keepers


def on_one_node(layout: Layout, nodes: Mapping[int, int]) -> dict[int, list[int]]:
    """Return, for each node, the layers of whose state some is on that node only: losing the node would end the job.

    Empty if there is only one node. ``nodes``: the node of each worker.
    """
    found: dict[int, list[int]] = {}
    if len({nodes[worker] for worker in layout.workers}) > 1:
        for layer, owners in enumerate(layout.owners):
            for on in {frozenset(nodes[worker] for worker in one) for one in owners}:
                if len(on) == 1:
                    found.setdefault(min(on), []).append(layer)
    return dict(sorted(found.items()))


def spread(layout: Layout, nodes: Mapping[int, int], optimizer_copies: int = 0) -> Layout:
    """Return ``layout`` with its workers in each other's places, so that fewer layers would be lost with one node.

    A layer would be lost if all its holders are on the node; or, with ``optimizer_copies``, if all owners of a slice of
    its optimizer state are. Returns ``layout`` itself if nothing is won.

    Workers are alike, so nothing else changes. The places that compute the same layers are dealt to the nodes in turn:
    they are on as many different nodes as there are nodes, or holders.
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
    """Return ``layout`` with worker ``places[w]`` in the place of each worker w."""

    def moved(rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(places[worker] for worker in row)) for row in rows)

    routes = tuple(
        replace(route, hops=tuple(replace(hop, worker=places[hop.worker]) for hop in route.hops))
        for route in layout.routes
    )
    keepers = tuple(tuple(places.get(worker, worker) for worker in ring) for ring in layout.keepers)
    return replace(layout, holders=moved(layout.holders), routes=routes, keepers=keepers).check()
