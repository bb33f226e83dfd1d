"""Shapes for microbatches that do not divide among pipelines: each of those left over goes through several pipelines.

For example, 31 pipelines do 124 of 128 microbatches in four turns each. The last four microbatches would take a fifth
turn, in which most pipelines wait. Here each pipeline gets as many microbatches as all of them can do. The layers of
each remaining microbatch go, one stretch after the other, to those of their holders that have time left. Such a
microbatch has more hops than others, and no worker holds more layers for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from math import inf

from odyssey_megatron.plan.checking.bound import cluster_bound_s
from odyssey_megatron.policy.shapes.pipelines import MANY_WORKERS, WORTH
from odyssey_megatron.policy.shapes.search import Search
from odyssey_megatron.policy.shapes.seating import Further, PipelineShapes
from odyssey_megatron.policy.shapes.shares import SLACK
from odyssey_megatron.policy.shapes.stages import Stage, path_s, reached_s

_MOST = 2
"""The most shapes that are proposed. Where pipelines are short each is scheduled in some milliseconds."""

_TRIES = 8
"""The most shapes for which dealing out is tried, each in about a millisecond."""

_MOST_VISITS = 1024
"""The most visits of microbatches to workers in one shape: more take too long to schedule, and divide better."""

_COARSE = 0.25
"""A fraction of a visit: what coarse visits are taken to cost beyond the estimate, to choose between similar shapes."""

_LONGER = (1.0, 1.005, 1.01, 1.02)
"""Multiples of the least time, in which dealing out the remaining microbatches is tried in turn."""


def divided(search: Search, workers: int, microbatches: int, least: int = 2) -> tuple[PipelineShapes, ...]:
    """Return the most promising shapes over ``workers`` equal workers with at least ``least`` pipelines, and two.

    There are none unless they may be worth it compared with whole microbatches.
    """
    key = workers, microbatches, max(2, least)
    if key not in search.divided:
        search.divided[key] = tuple(_divided(search, *key))
    return search.divided[key]


def _divided(search: Search, workers: int, microbatches: int, least: int) -> Iterator[PipelineShapes]:
    costs = search.splits.costs
    if not 1 < workers <= MANY_WORKERS or len(costs.layers) < 4:
        return
    estimates = (one.estimate_s for one in search.partitions(workers, microbatches) if one.shares)
    below_s, found = min(estimates, default=inf) * WORTH, list[_Alike]()
    proved_s = cluster_bound_s(microbatches, costs, range(workers))
    known: dict[tuple[int, int], _Kind] = {}
    for turned in (search, *search.turning) if proved_s < below_s else ():
        for number in range(least, min(workers, microbatches) + 1):
            kinds = _kinds(turned.sharing(number), workers, number, known)
            if kinds and microbatches * max(kind.hops for kind, _ in kinds) <= _MOST_VISITS:
                one = _Alike(turned.sharing(number), kinds, microbatches, proved_s)
                if one.likely_s < below_s:
                    found.append(one)
    fast = sorted(found, key=lambda one: (one.likely_s, one.way_s))
    fine = sorted(found, key=lambda one: (one.likely_s + _COARSE * one.visit_s, one.way_s))
    in_turn = dict.fromkeys(chain.from_iterable(zip(fast, fine, strict=True)))
    shapes = (one.dealt(below_s) for one in islice(in_turn, _TRIES))
    yield from islice((shape for shape in shapes if shape is not None), _MOST)


class _Kind:
    """Pipelines of one length."""

    def __init__(self, search: Search, length: int) -> None:
        costs, spans = search.splits.costs, search.splits.costs.spans
        self.stages = search.splits.stages(length)
        self.own_s = [sum(spans.compute_s(a, b) for a, b in one.spans) for one in self.stages]
        """Seconds that each worker computes for a microbatch."""
        self.reached_s = [reached_s(costs, one) for one in self.stages]
        self.hops = sum(len(one.spans) for one in self.stages)
        self.path_s = path_s(costs, self.stages)
        busy = [own_s / one.each_s for own_s, one in zip(self.own_s, self.stages, strict=True)]
        self.busy = sum(busy)
        """The number of workers whose whole time can be used, as far as memory allows."""
        self.late_s = sum(share * late_s for share, late_s in zip(busy, self.reached_s, strict=True))
        self.visits_s = sum(
            own_s / len(one.spans) for own_s, one in zip(self.own_s, self.stages, strict=True)
        )

    def turns(self, time_s: float) -> int:
        """Return the number of microbatches that such a pipeline can do in ``time_s``."""
        pairs = zip(self.reached_s, self.stages, strict=True)
        return min(int((time_s * SLACK - late_s) / one.each_s) for late_s, one in pairs)


def _kinds(
    search: Search, workers: int, number: int, known: dict[tuple[int, int], _Kind]
) -> list[tuple[_Kind, int]]:
    """Return (kind, number of pipelines) for ``number`` pipelines whose lengths differ by at most one.

    The list is empty if they do not fit, or if a worker would be in no pipeline.
    """
    lengths = search.balanced.lengths(workers, number)
    if lengths is None or sum(length * count for length, count in lengths) < workers:
        return []
    for length, _ in lengths:
        if (id(search), length) not in known:
            known[id(search), length] = _Kind(search, length)
    return [(known[id(search), length], count) for length, count in lengths]


class _Alike:
    """Pipelines whose lengths differ by at most one, before microbatches are dealt out."""

    def __init__(
        self, search: Search, kinds: Sequence[tuple[_Kind, int]], microbatches: int, proved_s: float
    ) -> None:
        """``proved_s``: a lower bound for any layout."""
        self.search, self.splits, self.kinds, self.microbatches = search, search.splits, kinds, microbatches
        costs, last = self.splits.costs, self.splits.last
        number, workers = (
            sum(count for _, count in kinds),
            sum(len(one.stages) * count for one, count in kinds),
        )
        self.visit_s = sum(one.visits_s * count for one, count in kinds) / workers
        """Mean time that a worker computes for one visit of a microbatch."""
        work_s = microbatches * costs.spans.compute_s(0, last) + sum(one.late_s * n for one, n in kinds)
        self.work_s = max(proved_s, work_s / sum(one.busy * count for one, count in kinds))
        """The time of all work, if all workers are busy as soon as a microbatch can reach them."""
        before = costs.spans.down_and_up_s(0, last) / costs.spans.compute_s(0, last)
        last_s, every_s = (
            max(each)
            for each in zip(
                *(search.balanced.sums_s(len(one.stages), number) for one, _ in kinds), strict=True
            )
        )
        left = microbatches - sum(one.turns(self.work_s) * count for one, count in kinds)
        hops = max(*(one.hops for one, _ in kinds), workers / left) if left > 0 else inf
        self.way_s = max(one.path_s for one, _ in kinds) + hops * self.visit_s / 3
        """The time of a microbatch that is left over. On each hop, down and up, it waits for about half of the forward
        or input gradient of a visit. Infinite if none is left over.
        """
        self.likely_s = max(self.work_s + last_s, self.work_s * before + every_s, self.way_s)
        """An estimate of the step without the optimizer."""

    def dealt(self, below_s: float) -> PipelineShapes | None:
        """Return the shape with what each pipeline and each worker gets, in the least time in which all can be dealt
        out.

        None if that is not below ``below_s``, or nothing is left over.
        """
        each = [one for one, count in self.kinds for _ in range(count)]
        stages = [stage for one in each for stage in one.stages]
        holders = self._holders(stages)
        for longer in _LONGER:
            time_s = self.work_s * longer
            turns = {id(one): one.turns(time_s) for one, _ in self.kinds}
            counts = [turns[id(one)] for one in each]
            left = self.microbatches - sum(counts)
            if time_s >= below_s or left <= 0:
                return None
            spare_s = [
                time_s * SLACK - late_s - count * own_s
                for one, count in zip(each, counts, strict=True)
                for late_s, own_s in zip(one.reached_s, one.own_s, strict=True)
            ]
            further = self._further(holders, spare_s, left) if min(counts) else None
            if further is not None:
                return PipelineShapes(
                    ends=tuple(self.splits.split(len(one.stages)) or () for one in each),
                    shares=tuple(counts),
                    estimate_s=max(self.likely_s, time_s),
                    way=self.splits.way,
                    further=further,
                )
        return None

    def _holders(self, stages: Sequence[Stage]) -> list[tuple[int, int, list[int]]]:
        """Return (first layer, last, seats that have them) for each piece that microbatches are cut into.

        Embedding and head go with their neighbours.
        """
        last = self.splits.last
        ends = [0, *range(2, last - 1), last]
        piece_of = [piece for piece, (a, b) in enumerate(pairwise(ends)) for _ in range(a, b)]
        found: list[list[int]] = [[] for _ in range(len(ends) - 1)]
        for seat, stage in enumerate(stages):
            for a, b in stage.spans:
                for piece in range(piece_of[a], piece_of[b - 1] + 1):
                    found[piece].append(seat)
        return [(a, b, seats) for (a, b), seats in zip(pairwise(ends), found, strict=True)]

    def _further(
        self, holders: Sequence[tuple[int, int, list[int]]], spare_s: list[float], left: int
    ) -> tuple[Further, ...] | None:
        """Return routes for ``left`` microbatches, with ``spare_s`` seconds left on each seat; None if that is not
        enough.

        A microbatch stays on its seat as long as there is time, and then goes to the one that has most.
        """
        compute_s, routes = self.splits.costs.spans.compute_s, list[Further]()
        pieces = [(first, end, seats, compute_s(first, end)) for first, end, seats in holders]
        for _ in range(left):
            route, seat = list[tuple[int, int, int]](), -1
            for first, end, seats, takes_s in pieces:
                if seat in seats and spare_s[seat] >= takes_s:
                    route[-1] = seat, route[-1][1], end
                else:
                    seat = max(seats, key=spare_s.__getitem__)
                    if spare_s[seat] < takes_s:
                        return None
                    route.append((seat, first, end))
                spare_s[seat] -= takes_s
            routes.append(tuple(route))
        return tuple(routes)


def named(shape: PipelineShapes) -> str:
    """Describe ``shape`` for tables: ``15 pipelines of 31 workers in a W, and 2 of 64 microbatches through several of
    them``.
    """
    lengths, left = [len(ends) for ends in shape.ends], len(shape.further)
    return (
        f"{len(lengths)} pipelines of {sum(lengths)} workers{shape.way.text}, and {left} of "
        f"{sum(shape.shares) + left} microbatches through several of them"
    )
