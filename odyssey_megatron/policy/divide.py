"""Microbatches that do not divide among pipelines: each of those left over goes through several of them.

31 pipelines do 124 of 128 microbatches in four turns each, and the last four take a fifth one, in which most wait. Here
pipelines get what all of them can do, and the layers of each microbatch beyond that go to whoever of their holders has
time left, one stretch after the other: it has more hops than others, and no worker holds more for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from math import inf

from odyssey_megatron.plan.bound import cluster_bound_s
from odyssey_megatron.policy import ways
from odyssey_megatron.policy.balanced import even
from odyssey_megatron.policy.pipelines import MANY_WORKERS, WORTH
from odyssey_megatron.policy.search import Search
from odyssey_megatron.policy.seating import Further, Shape
from odyssey_megatron.policy.shares import SLACK
from odyssey_megatron.policy.stages import Stage, path_s, reached_s

_MOST = 3
"""Shapes that are looked at: where pipelines are short each is scheduled in some milliseconds."""

_TRIES = 6
"""As many are tried to be dealt out for that, each in about a millisecond."""

_MOST_VISITS = 1024
"""Of microbatches to workers, in one shape: more of them take too long to schedule, and divide better."""

_LONGER = (1.0, 1.005, 1.01, 1.02)
"""Times of the least time, in which what is left over is tried to be dealt out."""


def divided(search: Search, workers: int, microbatches: int, least: int = 2) -> Iterator[Shape]:
    """The most promising shapes over ``workers`` that are alike, with at least so many pipelines, if they may be worth
    it beside whole microbatches.
    """
    if not 1 < workers <= MANY_WORKERS or len(search.splits.costs.layers) < 4:
        return
    estimates = (one.estimate_s for one in search.partitions(workers, microbatches) if one.shares)
    below_s, found = min(estimates, default=inf) * WORTH, list[_Alike]()
    for turned in (search, *search.turned):
        for number in range(max(2, least), min(workers, microbatches) + 1):
            one = _Alike(turned.sharing(number), workers, number, microbatches)
            if one.fits and one.least_s < below_s and one.left > 0 and one.way_s < below_s:
                found.append(one)
    found.sort(key=lambda one: (max(one.least_s, one.way_s), one.way_s))
    shapes = (one.dealt(below_s) for one in found[:_TRIES])
    yield from islice((shape for shape in shapes if shape is not None), _MOST)


class _Alike:
    """So many pipelines whose lengths differ by one at most."""

    def __init__(self, search: Search, workers: int, number: int, microbatches: int) -> None:
        self.search, self.workers, self.number, self.microbatches = search, workers, number, microbatches
        self.splits = search.splits
        lengths = even(workers, number, self.splits.most_stages)
        self.kinds = [length for length, count in lengths for _ in range(count)]
        """Of each, how many stages it has."""

    @property
    def fits(self) -> bool:
        """All workers have a part in it, and enough memory; and there are not too many visits."""
        longest = self.kinds[0]
        return (
            sum(self.kinds) == self.workers
            and self.microbatches * longest * self.splits.legs <= 2 * _MOST_VISITS
            and all(self.splits.split(kind) is not None for kind in {*self.kinds})
            and self.microbatches * self._hops <= _MOST_VISITS
        )

    @cached_property
    def _stages(self) -> list[Stage]:
        """Of all pipelines."""
        return [stage for kind in self.kinds for stage in self.splits.stages(kind)]

    @cached_property
    def _hops(self) -> int:
        return max(sum(len(one.spans) for one in self.splits.stages(kind)) for kind in {*self.kinds})

    @cached_property
    def _work_s(self) -> float:
        """All work, if all workers are busy from when a microbatch can be there, as far as memory allows for that."""
        costs = self.splits.costs
        whole_s = cluster_bound_s(self.microbatches, costs, range(self.workers)) - costs.optimizer_s
        work_s = self.microbatches * costs.spans.compute_s(0, self.splits.last)
        busy, late_s = 0.0, 0.0
        for kind in self.kinds:
            for one in self.splits.stages(kind):
                share = self._own_s(one) / one.each_s
                busy, late_s = busy + share, late_s + share * self._reached_s(one)
        return max(whole_s, (work_s + late_s) / busy)

    @cached_property
    def least_s(self) -> float:
        """But for the optimizer's: an estimate."""
        costs, last, work_s = self.splits.costs, self.splits.last, self._work_s
        before = costs.spans.down_and_up_s(0, last) / costs.spans.compute_s(0, last)
        sums = [self.search.balanced.sums_s(kind, self.number) for kind in {*self.kinds}]
        return max(work_s + max(one for one, _ in sums), work_s * before + max(every for _, every in sums))

    def _turns(self, kind: int, time_s: float) -> int:
        """Microbatches that a pipeline can do in that time."""
        stages = self.splits.stages(kind)
        return min(int((time_s * SLACK - self._reached_s(one)) / one.each_s) for one in stages)

    def _own_s(self, one: Stage) -> float:
        return sum(self.splits.costs.spans.compute_s(a, b) for a, b in one.spans)

    def _reached_s(self, one: Stage) -> float:
        return reached_s(self.splits.costs, one)

    @property
    def left(self) -> int:
        """Microbatches that are left over at the least."""
        return self.microbatches - sum(self._turns(kind, self._work_s) for kind in self.kinds)

    @cached_property
    def way_s(self) -> float:
        """Of a microbatch that is left over: on each of its hops it waits, down and up, for half of a visit's forward
        or input gradient, about.
        """
        visits_s = sum(self._own_s(one) / len(one.spans) for one in self._stages)
        waits_s = max(self._hops, self.workers / self.left) * visits_s / self.workers / 3
        return waits_s + max(path_s(self.splits.costs, self.splits.stages(kind)) for kind in {*self.kinds})

    def dealt(self, below_s: float) -> Shape | None:
        """With what each pipeline and each worker gets, in the least time in which all can be dealt out."""
        for longer in _LONGER:
            time_s = self._work_s * longer
            counts = [self._turns(kind, time_s) for kind in self.kinds]
            left = self.microbatches - sum(counts)
            if time_s >= below_s or left <= 0:
                return None
            turns = [count for kind, count in zip(self.kinds, counts, strict=True) for _ in range(kind)]
            spare_s = [
                time_s * SLACK - self._reached_s(stage) - count * self._own_s(stage)
                for stage, count in zip(self._stages, turns, strict=True)
            ]
            further = self._further(spare_s, left) if min(counts) else None
            if further is not None:
                return Shape(
                    ends=tuple(self.splits.split(kind) or () for kind in self.kinds),
                    shares=tuple(counts),
                    estimate_s=max(self.least_s, self.way_s, time_s),
                    legs=self.splits.legs,
                    further=further,
                )
        return None

    @cached_property
    def _holders(self) -> list[tuple[int, int, list[int]]]:
        """(first layer, last, who has them), in the pieces that microbatches are cut in: embedding and head go with
        their neighbours.
        """
        last = self.splits.last
        pieces = [(0, 2), *((layer, layer + 1) for layer in range(2, last - 2)), (last - 2, last)]
        spans = [(a, b, seat) for seat, stage in enumerate(self._stages) for a, b in stage.spans]
        return [
            (first, end, [seat for a, b, seat in spans if a <= first and end <= b]) for first, end in pieces
        ]

    def _further(self, spare_s: Sequence[float], left: int) -> tuple[Further, ...] | None:
        """Routes of ``left`` microbatches, where each worker has so much time for them; None if that is not enough. A
        microbatch stays where it is as long as there is time, and goes on where there is most.
        """
        spare_s, routes = [*spare_s], list[Further]()
        pieces = [
            (first, end, holders, self.splits.costs.spans.compute_s(first, end))
            for first, end, holders in self._holders
        ]
        for _ in range(left):
            route, seat = list[tuple[int, int, int]](), -1
            for first, end, holders, takes_s in pieces:
                if seat in holders and spare_s[seat] >= takes_s:
                    route[-1] = seat, route[-1][1], end
                else:
                    seat = max(holders, key=spare_s.__getitem__)
                    if spare_s[seat] < takes_s:
                        return None
                    route.append((seat, first, end))
                spare_s[seat] -= takes_s
            routes.append(tuple(route))
        return tuple(routes)


def named(shape: Shape) -> str:
    """For tables: ``15 pipelines of 31 workers in a W, and 2 of 64 microbatches through several of them``."""
    lengths, left = [len(ends) for ends in shape.ends], len(shape.further)
    return (
        f"{len(lengths)} pipelines of {sum(lengths)} workers{ways.LEGS.get(shape.legs, '')}, and {left} of "
        f"{sum(shape.shares) + left} microbatches through several of them"
    )
