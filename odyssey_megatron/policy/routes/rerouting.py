"""Routes around workers that are dead or slow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heapify, heapreplace

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.names import layer_names
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Hop, Layout
from odyssey_megatron.policy.routes.paths import group_routes, merge_hops


def reroute(
    previous: Layout,
    alive: Collection[int],
    costs: Costs,
    speeds: Mapping[int, float] | None = None,
) -> Layout:
    """Return ``previous`` without the dead: their microbatches go through other holders of the same layers.

    No state moves. Each microbatch of a dead worker is given, in order, to the holder that would be done first with
    what it has so far. So is each microbatch of a slow worker, which is itself among the holders and keeps the share
    that its speed allows. Of holders that would be done together, the one on the earliest route is taken, in an order
    that does not depend on numbers: whichever replica has died, the result looks the same, and is known if it was
    worked out before. Source: ReCycle's adaptive pipelining (arXiv 2405.14009), here for any holders and speeds (§8.2).

    Raises:
        PlanInfeasible: some layer has no other holder.
    """
    there = set(alive)
    holders = tuple(tuple(w for w in held if w in there) for held in previous.holders)
    orphans = [layer for layer, left in enumerate(holders) if not left]
    if orphans:
        dead = sorted({w for layer in orphans for w in previous.holders[layer]})
        raise PlanInfeasible(f"no other holder of {layer_names(orphans, len(holders))} of worker(s) {dead}")
    spread = _Spread(holders, costs, speeds or {}, _places(previous))
    steady = {worker for worker in there if spread.speeds.get(worker, 1.0) >= 1.0}
    for route in previous.routes:
        for hop in route.hops:
            if hop.worker in steady:
                spread.add_load(hop, len(route.microbatches))
    # Microbatch by microbatch over all broken routes, so that the first routes do not take the best holders.
    paths: dict[int, tuple[Hop, ...]] = {}
    for route in previous.routes:
        broken = any(hop.worker not in steady for hop in route.hops)
        for microbatch in route.microbatches:
            paths[microbatch] = () if broken else route.hops
    by_microbatch = {m: route.hops for route in previous.routes for m in route.microbatches}
    for microbatch in sorted(m for m, path in paths.items() if not path):
        hops: list[Hop] = []
        for hop in by_microbatch[microbatch]:
            hops += [hop] if hop.worker in steady else spread.cover(hop.first, hop.last)
        paths[microbatch] = merge_hops(hops)
    routes = group_routes(paths)
    ends = {hop.first for route in routes for hop in route.hops}
    cuts = tuple(block.first for block in previous.blocks() if block.first not in ends)
    return Layout(holders=holders, routes=routes, cuts=cuts, tied=previous.tied).check()


def failover_targets(
    layout: Layout, costs: Costs, speeds: Mapping[int, float] | None = None
) -> dict[tuple[int, int], int]:
    """Return the failover target of each hop: (microbatch, first layer of a hop) -> the worker that gets the hop if its
    own worker dies.

    That is the one that :func:`reroute` would choose. Only workers that could run the forward ahead count, because they
    have the hop's input (:mod:`odyssey_megatron.plan.scheduling.eager`).
    """
    found: dict[tuple[int, int], int] = {}
    several: dict[int, list[tuple[Hop, tuple[int, ...], set[int]]]] = {}
    for route in layout.routes:
        for at, hop in enumerate(route.hops):
            others = set(layout.holders[hop.first]).intersection(*layout.holders[hop.first + 1 : hop.last])
            others.discard(hop.worker)
            near = others & {route.hops[at - 1].worker} if at else others
            if len(others) == len(near) == 1:
                found |= {(microbatch, hop.first): min(near) for microbatch in route.microbatches}
            elif near:
                several.setdefault(hop.worker, []).append((hop, route.microbatches, near))
    for worker, wanted in several.items():
        try:
            after = reroute(layout, [one for one in layout.workers if one != worker], costs, speeds)
        except PlanInfeasible:
            continue
        paths = {microbatch: route.hops for route in after.routes for microbatch in route.microbatches}
        for hop, microbatches, near in wanted:
            for microbatch in microbatches:
                takes = (one for one in paths[microbatch] if one.first <= hop.first and hop.last <= one.last)
                target = next((one.worker for one in takes), -1)
                if target in near:
                    found[microbatch, hop.first] = target
    return found


def _places(layout: Layout) -> dict[int, int]:
    """Return worker -> position of its first route, with routes sorted by size, kind and microbatches, as orders have
    them.
    """
    found: dict[int, int] = {}
    in_order = sorted(layout.routes, key=lambda one: (-len(one.microbatches), one.spans, one.microbatches))
    for place, route in enumerate(in_order):
        for hop in route.hops:
            found.setdefault(hop.worker, place)
    return found


class _Spread:
    """Gives visits to the holder that would finish first; keeps each worker's load in seconds."""

    def __init__(
        self,
        holders: tuple[tuple[int, ...], ...],
        costs: Costs,
        speeds: Mapping[int, float],
        places: Mapping[int, int],
    ) -> None:
        self.holders, self.speeds, self.places = holders, speeds, places
        self.compute_s = costs.spans.compute_s
        self.load: dict[int, float] = {}
        self.choices: dict[tuple[int, int], tuple[int, list[tuple[float, int, int]]]] = {}

    def add_load(self, hop: Hop, count: int) -> None:
        seconds = self._seconds(hop.first, hop.last, hop.worker)
        self.load[hop.worker] = self.load.get(hop.worker, 0.0) + count * seconds

    def cover(self, first: int, last: int) -> list[Hop]:
        """Return hops over ``[first, last)``: as few as the holders allow, each on whoever would be done first."""
        hops = []
        while first < last:
            if (first, last) not in self.choices:
                self.choices[first, last] = self._choices(first, last)
            end, heap = self.choices[first, last]
            # Loads only grow, so the least entry is right if it is still true.
            while True:
                finish, place, worker = heap[0]
                now = self.load.get(worker, 0.0) + self._seconds(first, end, worker)
                if now == finish:
                    break
                heapreplace(heap, (now, place, worker))
            self.load[worker] = finish
            hops.append(Hop(worker=worker, first=first, last=end))
            first = end
        return hops

    def _choices(self, first: int, last: int) -> tuple[int, list[tuple[float, int, int]]]:
        """Return how far the furthest-reaching holders of layer ``first`` go, and a heap of (when done, place, worker)
        of them.
        """
        reach: dict[int, list[int]] = {}
        for worker in self.holders[first]:
            end = first + 1
            while end < last and worker in self.holders[end]:
                end += 1
            reach.setdefault(end, []).append(worker)
        end = max(reach)
        heap = [
            (
                self.load.get(worker, 0.0) + self._seconds(first, end, worker),
                self.places.get(worker, -1),
                worker,
            )
            for worker in reach[end]
        ]
        heapify(heap)
        return end, heap

    def _seconds(self, first: int, last: int, worker: int) -> float:
        return self.compute_s(first, last) / self.speeds.get(worker, 1.0)
