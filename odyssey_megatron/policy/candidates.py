"""Candidates: the layouts that a recovery may lead to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.names import layer_names
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Hop, Layout, Route


def reroute(
    previous: Layout,
    alive: Collection[int],
    costs: Costs,
    speeds: Mapping[int, float] | None = None,
) -> Layout:
    """``previous`` without the dead: their microbatches go through other holders of the same layers.

    No state moves. Each microbatch of a dead worker is given, in order, to the holder that is done first
    with what it has so far; so is each of a slow one, itself among the holders, which leaves it the share that its
    speed allows. Source: ReCycle's adaptive pipelining (papers.md §2.2), here for any holders and speeds (§8.2).

    Raises:
        PlanInfeasible: some layer has no other holder.
    """
    there = set(alive)
    holders = tuple(tuple(w for w in held if w in there) for held in previous.holders)
    orphans = [layer for layer, left in enumerate(holders) if not left]
    if orphans:
        dead = sorted({w for layer in orphans for w in previous.holders[layer]})
        raise PlanInfeasible(f"no other holder of {layer_names(orphans, len(holders))} of worker(s) {dead}")
    spread = _Spread(holders, costs, speeds or {})
    steady = {worker for worker in there if spread.speeds.get(worker, 1.0) >= 1.0}
    for route in previous.routes:
        for hop in route.hops:
            if hop.worker in steady:
                spread.add_load(hop, len(route.microbatches))
    # Microbatch by microbatch over all broken routes, so that the first ones do not take the best holders.
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
    return Layout(holders=holders, routes=routes, cuts=cuts).check()


def heirs(
    layout: Layout, costs: Costs, speeds: Mapping[int, float] | None = None
) -> dict[tuple[int, int], int]:
    """(microbatch, first layer of a hop) -> the worker that :func:`reroute` gives the hop to if its own dies.

    Only where that worker could run the forward ahead (:mod:`odyssey_megatron.plan.eager`): it has the hop's input.
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
                heir = next((one.worker for one in takes), -1)
                if heir in near:
                    found[microbatch, hop.first] = heir
    return found


def drop_pipelines(previous: Layout, alive: Collection[int]) -> Layout:
    """``previous`` without the broken routes: the whole ones share their microbatches.

    No state moves and no microbatch changes pipeline in the middle. What is left of a broken pipeline holds
    on, without microbatches, so that it stays current. Source: ReCoVer and TorchFT drop replicas like this
    (papers.md §5).

    Raises:
        PlanInfeasible: no route is whole.
    """
    there = set(alive)
    whole = [route for route in previous.routes if all(hop.worker in there for hop in route.hops)]
    if not whole:
        raise PlanInfeasible("every pipeline has lost a worker")
    paths: dict[int, tuple[Hop, ...]] = {m: route.hops for route in whole for m in route.microbatches}
    shares = [(len(route.microbatches), i) for i, route in enumerate(whole)]
    heapify(shares)
    for microbatch in range(previous.num_microbatches):
        if microbatch not in paths:
            share, least = shares[0]
            heapreplace(shares, (share + 1, least))
            paths[microbatch] = whole[least].hops
    holders = tuple(tuple(w for w in held if w in there) for held in previous.holders)
    return Layout(holders=holders, routes=group_routes(paths)).check()


def shift_layers(rerouted: Layout, costs: Costs, speeds: Mapping[int, float] | None = None) -> Layout:
    """``rerouted`` with its stage boundaries moved, away from the stages that lost workers.

    The routes stay, so only boundary layers are sent, to the workers of the neighbouring stage. Boundaries are
    min-max over stages of work / living speed, then as near as possible to where they are. Source: ResiHP's
    layer repartition (papers.md §4.2), on top of rerouting.

    Raises:
        PlanInfeasible: the stages are not the same on all routes, or the boundaries are where they should be.
    """
    cuts = {tuple(hop.last for hop in route.hops) for route in rerouted.routes}
    if len(cuts) != 1:
        raise PlanInfeasible("the pipelines are cut differently, so there are no common boundaries to move")
    (ends,) = cuts
    stages = [rerouted.holders[end - 1] for end in ends]
    if len({worker for holders in stages for worker in holders}) < sum(map(len, stages)):
        raise PlanInfeasible("some worker holds several stages")
    capacity = [sum((speeds or {}).get(worker, 1.0) for worker in holders) for holders in stages]
    moved = recut([layer.compute_s for layer in costs.layers], capacity, ends)
    if moved == ends:
        raise PlanInfeasible("no boundary is better elsewhere")
    starts = (0, *moved[:-1])
    routes = tuple(
        Route(
            microbatches=route.microbatches,
            hops=tuple(
                Hop(worker=hop.worker, first=first, last=last)
                for hop, first, last in zip(route.hops, starts, moved, strict=True)
            ),
        )
        for route in rerouted.routes
    )
    holders = tuple(
        stages[stage]
        for stage, (first, last) in enumerate(zip(starts, moved, strict=True))
        for _ in range(first, last)
    )
    return Layout(holders=holders, routes=routes).check()


def recut(work: Sequence[float], capacity: Sequence[float], ends: tuple[int, ...]) -> tuple[int, ...]:
    """New stage ends: least maximum of work / capacity, then least movement; a transformer layer a stage."""
    last, stages = len(work), len(ends)
    sums = [0.0, *accumulate(work)]
    limit = _least_limit(sums, capacity, ends)
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, ())}
    for stage in range(stages):
        low, high = _window(stage, stages, last)
        reached: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        for start, (slowest, moved, path) in best.items():
            for end in range(max(low, start + 1), high + 1):
                load = (sums[end] - sums[start]) / capacity[stage]
                if load > limit:
                    break
                load = round(load / limit, 9)  # equal on paper must compare equal
                option = (max(slowest, load), moved + abs(end - ends[stage]), (*path, end))
                if end not in reached or option < reached[end]:
                    reached[end] = option
        best = reached
    return best[last][2] if last in best else ends


def _window(stage: int, stages: int, last: int) -> tuple[int, int]:
    """Where ``stage`` may end: each stage needs a transformer layer, the last one also the head."""
    return (last, last) if stage == stages - 1 else (stage + 2, last - (stages - stage))


def _least_limit(sums: Sequence[float], capacity: Sequence[float], ends: tuple[int, ...]) -> float:
    """The least maximum of work / capacity, to nine digits: what is equal on paper must be within it.

    Bisected; filling the stages greedily shows whether a limit is enough.
    """
    last, stages = len(sums) - 1, len(ends)

    def enough(limit: float) -> bool:
        start = 0
        for stage in range(stages):
            low, high = _window(stage, stages, last)
            room = sums[start] + limit * capacity[stage]
            if sums[low] > room:
                return False
            start = min(high, bisect_right(sums, room) - 1)
        return start == last

    spans = pairwise((0, *ends))
    most = max((sums[b] - sums[a]) / capacity[i] for i, (a, b) in enumerate(spans)) * (1 + 1e-9)
    least = 0.0
    while most - least > 1e-10 * most:
        middle = (least + most) / 2
        least, most = (least, middle) if enough(middle) else (middle, most)
    return most * (1 + 1e-9)


def group_routes(paths: Mapping[int, tuple[Hop, ...]]) -> tuple[Route, ...]:
    """Microbatch -> path, as routes: equal paths share one; ascending by first microbatch."""
    members: dict[tuple[Hop, ...], list[int]] = {}
    known: dict[int, list[int]] = {}  # hashing a path is slow, and most microbatches share the path object
    for microbatch in sorted(paths):
        path = paths[microbatch]
        if id(path) not in known:
            known[id(path)] = members.setdefault(path, [])
        known[id(path)].append(microbatch)
    return tuple(Route(microbatches=tuple(ids), hops=hops) for hops, ids in members.items())


def merge_hops(hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """The same path with neighbouring visits to one worker made one."""
    merged: list[Hop] = []
    for hop in hops:
        if merged and merged[-1].worker == hop.worker:
            hop = Hop(worker=hop.worker, first=merged.pop().first, last=hop.last)
        merged.append(hop)
    return tuple(merged)


class _Spread:
    """Hands visits to the holder that would finish first; keeps each worker's load in seconds."""

    def __init__(
        self, holders: tuple[tuple[int, ...], ...], costs: Costs, speeds: Mapping[int, float]
    ) -> None:
        self.holders, self.speeds = holders, speeds
        self.compute_s = costs.spans.compute_s
        self.load: dict[int, float] = {}
        self.choices: dict[tuple[int, int], tuple[int, list[tuple[float, int]]]] = {}

    def add_load(self, hop: Hop, count: int) -> None:
        seconds = self._seconds(hop.first, hop.last, hop.worker)
        self.load[hop.worker] = self.load.get(hop.worker, 0.0) + count * seconds

    def cover(self, first: int, last: int) -> list[Hop]:
        """Hops over ``[first, last)``: as few as the holders allow, then whoever would be done first."""
        hops = []
        while first < last:
            if (first, last) not in self.choices:
                self.choices[first, last] = self._choices(first, last)
            end, heap = self.choices[first, last]
            # Loads only grow, so an entry that is still true is the least.
            while True:
                finish, worker = heap[0]
                now = self.load.get(worker, 0.0) + self._seconds(first, end, worker)
                if now == finish:
                    break
                heapreplace(heap, (now, worker))
            self.load[worker] = finish
            hops.append(Hop(worker=worker, first=first, last=end))
            first = end
        return hops

    def _choices(self, first: int, last: int) -> tuple[int, list[tuple[float, int]]]:
        """How far the furthest-reaching holders of layer ``first`` go, and (when done, worker) of each."""
        reach: dict[int, list[int]] = {}
        for worker in self.holders[first]:
            end = first + 1
            while end < last and worker in self.holders[end]:
                end += 1
            reach.setdefault(end, []).append(worker)
        end = max(reach)
        heap = [(self.load.get(w, 0.0) + self._seconds(first, end, w), w) for w in reach[end]]
        heapify(heap)
        return end, heap

    def _seconds(self, first: int, last: int, worker: int) -> float:
        return self.compute_s(first, last) / self.speeds.get(worker, 1.0)
