"""Layouts that avoid slow links, for their routes or for their sums."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from odyssey_megatron.plan.checking.simulate import reduce_s
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Hop, Layout
from odyssey_megatron.plan.placing.spread import with_places
from odyssey_megatron.plan.placing.transfer import cheapest_assignment
from odyssey_megatron.policy.routes.paths import group_routes

_WORKERS = 256
"""In larger jobs no workers change places: trying all pairs takes too long."""
_EXCHANGES = 8

_Hops = tuple[Hop, ...]
_Path = tuple[tuple[int, ...], _Hops]
"""(microbatches, hops that they take)."""


def waits_s(layout: Layout, costs: Costs) -> float:
    """Return how much longer the messages of a step take than without slow links, all added up."""
    if not costs.slow_links:
        return 0.0
    return sum(
        len(route.microbatches) * _longer_s(one.worker, other.worker, costs.lags_s)
        for route in layout.routes
        for one, other in pairwise(route.hops)
    )


def _longer_s(above: int, below: int, lags_s: Mapping[tuple[int, int], float]) -> float:
    """Return the delay of an activation down and its gradient up."""
    return lags_s.get((above, below), 0.0) + lags_s.get((below, above), 0.0)


def around(layout: Layout, costs: Costs) -> Layout:
    """Return ``layout`` with routes that go on by other workers of the next stage, so that slow links carry fewer
    messages.

    No worker gets more or other work, and nothing moves. At each boundary of routes that are cut alike, two of them
    exchange the rest of their way below, for as many microbatches as both have, as long as that helps. Layouts whose
    routes visit a worker more than once stay as they are.
    """
    if not waits_s(layout, costs) or layout.revisits:
        return layout
    alike: dict[tuple[int, ...], list[_Path]] = {}
    for route in layout.routes:
        alike.setdefault(tuple(hop.last for hop in route.hops), []).append((route.microbatches, route.hops))
    for ends, paths in alike.items():
        for at in range(1, len(ends)):
            _join_anew(paths, at, costs)
    routes = group_routes(
        {microbatch: hops for paths in alike.values() for ids, hops in paths for microbatch in ids}
    )
    return replace(layout, routes=routes).check()


def _join_anew(paths: list[_Path], at: int, costs: Costs) -> None:
    """Exchange the hops from ``at`` on among ``paths``."""

    def price(above: _Hops, below: _Hops) -> int:
        """Return the delay in picoseconds, as sums of integers are exact."""
        one, other = above[at - 1].worker, below[at].worker
        # Two hops in a row on one worker would have to be merged into one.
        return round(1e12 * _longer_s(one, other, costs.lags_s)) if one != other else 10**18

    place = 0
    while place < len(paths):
        ids, hops = paths[place]
        now, best, partner = price(hops, hops), 0, place
        for other, (_, theirs) in enumerate(paths) if now else ():
            gain = now + price(theirs, theirs) - price(hops, theirs) - price(theirs, hops)
            if gain > best:
                best, partner = gain, other
        if not best:
            place += 1
            continue
        other_ids, theirs = paths[partner]
        both = min(len(ids), len(other_ids))
        paths[place] = ids[:both], hops[:at] + theirs[at:]
        paths[partner] = other_ids[:both], theirs[:at] + hops[at:]
        paths += [path for path in ((ids[both:], hops), (other_ids[both:], theirs)) if path[0]]
        place = 0


def exchanged(layout: Layout, costs: Costs) -> Layout:
    """Return ``layout`` with workers in each other's places, so that slow links carry fewer messages. State moves.

    Workers that no fast link joins with the others, such as those of a node with a slow network, are put next to each
    other along the pipelines. Then pairs change places one after the other, as long as that helps.
    """
    if len(layout.workers) > _WORKERS or layout.revisits:
        return layout
    best = min((layout, around(_gathered(layout, costs), costs)), key=lambda one: waits_s(one, costs))
    for _ in range(_EXCHANGES):
        tried = (around(one, costs) for one in _exchanges(best, costs))
        found = min(tried, key=lambda one: waits_s(one, costs), default=best)
        if waits_s(found, costs) >= waits_s(best, costs):
            break
        best = found
    return best


def sums_wait_s(layout: Layout, costs: Costs) -> float:
    """Return how much longer the sums of a step take than if none were slow, all added up."""
    if not costs.slow_sums:
        return 0.0
    return sum(
        (costs.sum_factor(block.holders) - 1)
        * reduce_s(costs, block.first, block.last, len(block.holders), layout.copies)
        for block in layout.blocks()
    )


def side_by_side(layout: Layout, costs: Costs) -> Layout:
    """Return ``layout`` with workers in each other's places, so that fewer sums cross a slow network.

    Of the workers that compute the same layers, all come to the slow node (or whatever else has made sums slow), or
    none, as far as there is room. Activations cross that network instead. Returns ``layout`` itself if nothing is
    better.
    """
    best = layout
    for slow in costs.slow_sums if not layout.revisits else ():
        if slow.crosses:
            found = around(_side_by_side(best, {*slow.workers} & {*layout.workers}), costs)
            best = found if sums_wait_s(found, costs) < sums_wait_s(best, costs) else best
    return best


def _side_by_side(layout: Layout, inside: set[int]) -> Layout:
    """Return ``layout`` with whole groups of workers that compute the same layers moved ``inside``.

    Groups of which most workers are there come first. They change places with other workers that are inside, as few as
    possible.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for worker in layout.workers:
        alike.setdefault(tuple(layout.held_by(worker)), []).append(worker)
    room, come, stay = len(inside), list[int](), set[int]()
    for workers in sorted(alike.values(), key=lambda of: (-len(inside.intersection(of)), of)):
        if len(workers) <= room and not (len(workers) == 1 and workers[0] not in inside):
            room -= len(workers)
            come += [worker for worker in workers if worker not in inside]
            stay |= inside.intersection(workers)
    pairs = dict(zip(come, sorted(inside - stay), strict=False))
    return with_places(layout, _places(layout.workers, pairs | {b: a for a, b in pairs.items()}))


def _exchanges(layout: Layout, costs: Costs) -> Iterator[Layout]:
    used = {
        worker
        for route in layout.routes
        for one, other in pairwise(route.hops)
        if _longer_s(one.worker, other.worker, costs.lags_s)
        for worker in (one.worker, other.worker)
    }
    workers, holds = layout.workers, {worker: layout.held_by(worker) for worker in layout.workers}
    for worker in sorted(used):
        for other in workers:
            if holds[other] != holds[worker]:  # exchanging workers that hold the same changes nothing
                yield with_places(layout, _places(workers, {worker: other, other: worker}))


def _gathered(layout: Layout, costs: Costs) -> Layout:
    """Return ``layout`` with the smallest part into which slow links cut the workers on the first seats, pipeline by
    pipeline.

    Workers that were there take the seats that become free, with the same layers where possible.
    """
    seats = [*dict.fromkeys(hop.worker for route in layout.routes for hop in route.hops)]
    parts = _parts(seats, costs)
    if len(parts) == 1:
        return layout
    part = min(parts, key=lambda one: (len(one), min(one)))
    holds = {worker: layout.held_by(worker) for worker in seats}
    first = seats[: len(part)]
    come = sorted(part - set(first))
    go = [worker for worker in first if worker not in part]
    # Each pair of ``go`` and ``come`` exchange their seats.
    rows = [[float(holds[one] != holds[other]) for other in come] for one in go]
    pairs = [(go[row], come[column]) for row, column in enumerate(cheapest_assignment(rows))]
    return with_places(layout, _places(layout.workers, dict(pairs) | {b: a for a, b in pairs}))


def _places(workers: Collection[int], changed: Mapping[int, int]) -> dict[int, int]:
    return {worker: changed.get(worker, worker) for worker in workers}


def _parts(workers: Sequence[int], costs: Costs) -> list[set[int]]:
    """Return the sets of workers that are joined by fast links, directly or through others."""
    left, found = set(workers), list[set[int]]()
    while left:
        part, new = set[int](), {min(left)}
        while new:
            part, left = part | new, left - new
            new = {other for other in left if any(not _longer_s(one, other, costs.lags_s) for one in new)}
        found.append(part)
    return found
