"""Shadows, and keepers of optimizer state: they decide which losses a layout survives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

from odyssey_megatron.cluster.state import WHOLE_CELL, Share
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import ring_of


def with_shadows(
    layout: Layout,
    previous: Layout | None,
    nodes: Mapping[int, int],
    least: int,
    costs: Costs,
    *,
    eager: bool = False,
    shares: Mapping[int, Share] | None = None,
) -> Layout:
    """Return ``layout`` with at least ``least`` holders of each layer, as far as there are workers.

    A shadow, a holder without microbatches, takes part in the layers' gradient reduction and step, so that it can take
    over with nothing sent. Layers with the same holders get the same shadow. Preferred is a worker

    1. on a node that holds none of these layers (``nodes``: node of each living worker),
    2. that has their state already (``previous``),
    3. with ``eager``, that comes before them on a route, since it has the input of their forwards; for the first layers
       this is the route's last worker, which waits longest for its own,
    4. that holds least for its ranks (``shares``: of workers that are not whole cells).
    """
    before = _workers_before(layout) if eager else {}
    before_holders = previous.holders if previous is not None else ()
    load = dict.fromkeys(nodes, 0)
    for layer, holders in enumerate(layout.holders):
        for worker in holders:
            load[worker] += costs.layers[layer].state_bytes
    of_rank = {
        worker: one.state / one.ranks for worker in nodes for one in [(shares or {}).get(worker, WHOLE_CELL)]
    }
    new = list(layout.holders)
    runs = [
        [layer for layer, _ in run] for _, run in groupby(enumerate(layout.holders), key=lambda item: item[1])
    ]
    size = {run[0]: costs.spans.state_bytes(run[0], run[-1] + 1) for run in runs}
    for run in sorted(runs, key=lambda run: (-size[run[0]], run)):
        while len(new[run[0]]) < min(least, len(nodes)):
            holders = new[run[0]]
            there = {nodes[worker] for worker in holders}
            shadow = min(
                (worker for worker in nodes if worker not in holders),
                key=lambda worker: (
                    nodes[worker] in there,
                    bool(before_holders) and not all(worker in before_holders[layer] for layer in run),
                    eager and not all(worker in before[layer] for layer in run),
                    load[worker] * of_rank[worker],
                    (worker - holders[0]) % (max(nodes) + 1),
                ),
            )
            load[shadow] += size[run[0]]
            for layer in run:
                new[layer] = tuple(sorted((*new[layer], shadow)))
    return replace(layout, holders=tuple(new))


def _workers_before(layout: Layout) -> dict[int, set[int]]:
    """Return, for each layer, the workers that come before it on a route; for the first hop the route's last worker."""
    before: dict[int, set[int]] = {layer: set() for layer in range(layout.num_layers)}
    for route in layout.routes:
        for above, hop in zip((route.hops[-1], *route.hops), route.hops, strict=False):
            for layer in range(hop.first, hop.last):
                before[layer].add(above.worker)
    return before


def filling(current: Layout, target: Layout) -> Layout:
    """Return ``current`` with the holders of ``target`` as additional holders, which get no microbatches yet.

    They get the layers' state while a step computes, which does not change it. They take part in that step's gradient
    reduction, and can be routed to from the next step on (two-speed recovery). If state is cut into slices they only
    get weights: the keepers stay the same, so that nobody waits for state to move.
    """
    pairs = list(zip(current.holders, target.holders, strict=True))
    holders = tuple(tuple(sorted({*now, *then})) for now, then in pairs)
    return replace(current, holders=holders, cuts=())


def with_keepers(
    layout: Layout, previous: Layout | None, nodes: Mapping[int, int], copies: int, *, joins: bool = True
) -> Layout:
    """Return ``layout`` with the optimizer state of each layer cut over its holders, in ``copies`` copies.

    With 0 copies every holder keeps all state. A layout that has keepers already, such as a job's first one when it
    comes back, keeps them as long as all of them are there. See :func:`odyssey_megatron.plan.placing.slices.ring_of`;
    ``nodes``: node of each living worker.
    """
    if not copies:
        return layout
    before = (
        layout.keepers
        or (previous.keepers if previous is not None else ())
        or ((),) * len(layout.all_holders)
    )
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
    rings = []
    for kind in zip(layout.all_holders, before, strict=True):
        if kind not in known:
            known[kind] = ring_of(*kind, nodes, copies, joins=joins)
        rings.append(known[kind])
    return replace(layout, keepers=tuple(rings), copies=copies)
