"""Who holds more than it computes, and who keeps optimizer state: what decides which losses can be survived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from math import inf

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.memory import one_f_one_b_bytes, state_bytes


def with_shadows(
    layout: Layout,
    previous: Layout | None,
    nodes: Mapping[int, int],
    least: int,
    costs: Costs,
    *,
    eager: bool = False,
    shares: Mapping[int, float] | None = None,
) -> Layout:
    """``layout`` with at least ``least`` holders of each layer, as far as there are workers.

    A shadow, a holder without microbatches, takes part in the layers' gradient reduction and step, so that it can take
    over with nothing sent (design section 2). Layers with the same holders get the same shadow: one that has their
    state already (``previous``), on a node that holds none of them (``nodes``: node of each living worker), with the
    least to hold for its ranks (``shares``: worker -> ``WorkerState.share``, where that is not 1). ``eager``: before
    that, if it can be had, the worker before them on a route, which has the input of their forwards; before the first
    ones the last, which waits longest for its own.
    """
    before = _workers_before(layout) if eager else {}
    load = dict.fromkeys(nodes, 0)
    for layer, holders in enumerate(layout.holders):
        for worker in holders:
            load[worker] += costs.layers[layer].state_bytes
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
                    previous is not None and not all(worker in previous.states[layer] for layer in run),
                    eager and not all(worker in before[layer] for layer in run),
                    load[worker] / (shares or {}).get(worker, 1.0),
                    (worker - holders[0]) % (max(nodes) + 1),
                ),
            )
            load[shadow] += size[run[0]]
            for layer in run:
                new[layer] = tuple(sorted((*new[layer], shadow)))
    return replace(layout, holders=tuple(new))


def _workers_before(layout: Layout) -> dict[int, set[int]]:
    """Layer -> the workers that come before its own on a route; before the first ones the route's last."""
    before: dict[int, set[int]] = {layer: set() for layer in range(layout.num_layers)}
    for route in layout.routes:
        for above, hop in zip((route.hops[-1], *route.hops), route.hops, strict=False):
            for layer in range(hop.first, hop.last):
                before[layer].add(above.worker)
    return before


def filling(current: Layout, target: Layout) -> Layout:
    """``current``, where the holders of ``target`` hold their layers already, without microbatches.

    They get the layers' state while a step computes, which does not change it, take part in that step's gradient
    reduction, and can be routed to from the next one on (design section 2, two-speed recovery).
    """
    pairs = list(zip(current.holders, target.holders, strict=True))
    holders = tuple(tuple(sorted({*now, *then})) for now, then in pairs)
    # Those who have the state already come first: the others get the weights from the first one.
    states = tuple(
        (*now, *(worker for worker in then if worker not in now))
        for now, then in zip(current.states, target.states, strict=True)
    )
    filled = Layout(holders=holders, routes=current.routes, tied=current.tied)
    all_keep = all(set(keep) == set(held) for keep, held in zip(states, filled.all_holders, strict=True))
    return replace(filled, keepers=() if all_keep else states)


def with_keepers(
    layout: Layout,
    previous: Layout | None,
    nodes: Mapping[int, int],
    copies: int,
    costs: Costs,
    *,
    joins: bool = True,
    shares: Mapping[int, float] | None = None,
) -> Layout:
    """``layout`` with the optimizer state of each layer on ``copies`` of its holders; 0 leaves it on all.

    A layout that has its keepers, as the first one of a job to which it comes back, stays as it is. Otherwise whoever
    kept a layer before, and still holds it, goes on while it has room: only what must move moves. Whoever keeps least
    joins, on another node than the rest where that can be had (``nodes``: node of each worker). The first keeper sends
    the weights, and the others' state is spare (:meth:`Layout.spare_states`): of those who have it already, so that
    nobody waits for what moves, the one who is first of least. Without ``joins`` nobody joins where one is left.
    """
    holders, size_bytes = layout.all_holders, [one.optimizer_bytes for one in costs.all_layers]
    as_many = [min(copies, len(one)) for one in holders]
    if not copies or as_many == [len(keepers) for keepers in layout.keepers]:
        return layout
    room = _room_bytes(layout, copies, costs, shares or {})
    keep: list[list[int]] = [[] for _ in holders]
    load, sends = dict.fromkeys(layout.workers, 0), dict.fromkeys(layout.workers, 0)

    def fits(worker: int, layer: int) -> bool:
        return load[worker] + size_bytes[layer] <= room[worker]

    def add(worker: int, layer: int) -> None:
        keep[layer].append(worker)
        load[worker] += size_bytes[layer]

    largest_first = sorted(range(len(holders)), key=lambda layer: (-size_bytes[layer], layer))
    for layer in largest_first:
        for worker in previous.states[layer] if previous else ():
            if worker in holders[layer] and len(keep[layer]) < copies and fits(worker, layer):
                add(worker, layer)
    for layer in largest_first:
        kept = len(keep[layer])
        while len(keep[layer]) < (as_many[layer] if joins else 1):
            there = {nodes[worker] for worker in keep[layer]}
            new = min(
                (worker for worker in holders[layer] if worker not in keep[layer]),
                key=lambda worker: (not fits(worker, layer), nodes[worker] in there, load[worker], worker),
            )
            add(new, layer)
        first = min(keep[layer][: kept or copies], key=lambda worker: (sends[worker], worker))
        keep[layer].remove(first)
        keep[layer].insert(0, first)
        sends[first] += size_bytes[layer]
    return replace(layout, keepers=tuple(map(tuple, keep)))


def _room_bytes(layout: Layout, copies: int, costs: Costs, shares: Mapping[int, float]) -> dict[int, float]:
    """Worker -> optimizer state that it should have at most: what weights, gradients and 1F1B's activations leave, and
    where that is less, its part of each layer that it holds, in whole layers.
    """
    if costs.memory_bytes is None:
        return dict.fromkeys(layout.workers, inf)
    nobody_keeps = replace(layout, keepers=((),) * len(layout.all_holders))
    state, activations = state_bytes(nobody_keeps, costs), one_f_one_b_bytes(layout, costs)
    part, largest = dict.fromkeys(layout.workers, 0.0), dict.fromkeys(layout.workers, 0)
    for layer, holders in zip(costs.all_layers, layout.all_holders, strict=True):
        for worker in holders:
            part[worker] += layer.optimizer_bytes * min(1.0, copies / len(holders))
            largest[worker] = max(largest[worker], layer.optimizer_bytes)
    budget = {worker: costs.memory_bytes * shares.get(worker, 1.0) for worker in layout.workers}
    return {
        worker: max(budget[worker] - state[worker] - activations[worker], part[worker] + largest[worker])
        for worker in layout.workers
    }
