"""Routes taken apart: each microbatch takes its own route through workers that hold the layers.

Pipelines leave workers idle if layers do not divide among stages, or microbatches among pipelines, and there are few of
them. It is then better that two workers compute a layer in turn, or that a microbatch changes pipelines in the middle.
Local search finds which layers of which microbatch run where, with the list schedule as judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from odyssey_megatron.cluster.state import Share
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.simulate import computed_before_s, step_end_s
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout, Route, layout_from_routes
from odyssey_megatron.plan.placing.memory import caps_for, minimum_bytes, state_bytes
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.policy.shapes.pipelines import WORTH
from odyssey_megatron.policy.shapes.turns import TURNS
from odyssey_megatron.policy.shapes.ways import hops

Judge = Callable[[Layout, int, float], float]
"""Called with a layout, the number of tries to improve its order, and a limit; returns the step. Infinite if there is
none, or if it is longer than the limit.
"""

Ways = tuple[tuple[int, ...], ...]
"""For each microbatch, the worker of each transformer layer. Embedding and head go with their neighbours."""

MOST_WAYS = 64
"""The largest workers times layers times microbatches: in larger jobs pipelines waste little, and there is too much to
try.
"""

_TRIES = 1500
"""The most layouts that are scheduled without finding a better one."""

_STALE = 150
"""Number of consecutive changes without improvement after which the search starts again elsewhere."""

_STEPS = 8000
"""The most changes, including those to layouts that are known or hopeless."""

_ROUNDS = ((400, 300), (150, 1000), (50, 3000))
"""Rounds in which the best layouts are judged once more: (visits in all of these layouts, tries to improve the order of
each).
"""

_PIPELINES_FIRST = 0.6
"""Probability of starting with whole microbatches on a worker, and of changing a single layer."""

_AT_ONCE = (1, 1, 2, 3)
"""Numbers of microbatches that are changed together, to draw from."""

_NEAR = 1.25
"""Multiple of the shortest step so far above which a layout is not scheduled to the end."""

_ALIKE = 1 + 1e-9


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """The search for mixed routes in one job."""

    workers: Sequence[int]
    microbatches: int
    costs: Costs
    speeds: Mapping[int, float]
    least_holders: int
    """The least number of holders of each layer."""
    judge: Judge
    tied: bool = False

    @property
    def layers(self) -> int:
        return len(self.costs.layers) - 2

    @property
    def is_small(self) -> bool:
        """Whether the job is small enough for this search."""
        return len(self.workers) > 1 and len(self.workers) * self.layers * self.microbatches <= MOST_WAYS

    def better(self, starts: Sequence[Layout]) -> Layout | None:
        """Return the best layout found, if it is worth it compared with the best of ``starts``."""
        shortest_s = min((self.judge(one, 0, inf) for one in starts), default=inf)
        found = self.best(starts, shortest_s * WORTH)
        return found[1] if found else None

    def best(self, starts: Sequence[Layout], below_s: float) -> tuple[float, Layout] | None:
        """Return (step, layout) of the best layout found, if its step is below ``below_s``."""
        return _Search(self, below_s).run([ways for one in starts if (ways := ways_of(one)) is not None])

    def layout(self, ways: Ways) -> Layout:
        by_way: dict[tuple[int, ...], list[int]] = {}
        for microbatch, way in enumerate(ways):
            by_way.setdefault(way, []).append(microbatch)
        routes = (
            Route(microbatches=tuple(ids), hops=hops((way[0], *way, way[-1]))) for way, ids in by_way.items()
        )
        return layout_from_routes(len(self.costs.layers), tuple(routes), tied=self.tied)


def judged_by(
    costs: Costs,
    speeds: Mapping[int, float],
    shares: Mapping[int, Share],
    kept: Callable[[Layout], Layout],
) -> Judge:
    """Return a judge for these costs. ``kept``: adds to a layout its shadows and the keepers of its state."""

    def judge(layout: Layout, tries: int, longest_s: float) -> float:
        layout = kept(layout)
        before_s = computed_before_s(layout, costs, longest_s) if longest_s < inf else None
        try:
            caps = caps_for(layout, costs, shares)
            order = order_routes(
                layout, costs, in_flight_cap=caps, speeds=speeds, before_s=before_s, tries=tries
            )
        except PlanInfeasible:
            return inf
        return step_end_s(layout, costs, order.done_s, order.tails())

    return judge


def ways_of(layout: Layout) -> Ways | None:
    """Return the ways in ``layout``; None if embedding or head is on another worker than its neighbour."""
    found: list[tuple[int, ...]] = [()] * layout.num_microbatches
    for route in layout.routes:
        each = [hop.worker for hop in route.hops for _ in range(hop.first, hop.last)]
        if each[0] != each[1] or each[-1] != each[-2]:
            return None
        for microbatch in route.microbatches:
            found[microbatch] = tuple(each[1:-1])
    return tuple(found)


_Judged = tuple[float, int, float]
"""(step or infinite, bytes needed above what there are, how unevenly workers are loaded); less is better."""


class _Search:
    """A local search from given ways, then from random ones.

    It changes a few layers of some microbatches as long as that makes the layout better. What looked best is judged
    again, with more tries.
    """

    def __init__(self, job: Mixing, below_s: float) -> None:
        self.job, self.rng, self.below_s = job, Random(0), below_s
        self.tries, self.steps = _TRIES, _STEPS
        each = [one.compute_s for one in job.costs.layers]
        self.seconds = [*each[1:-1]]
        self.seconds[0] += each[0]
        self.seconds[-1] += each[-1]
        speeds = (job.speeds.get(one, 1.0) for one in job.workers)
        self.least_s = sum(self.seconds) * job.microbatches / sum(speeds) * _ALIKE
        self.shortest_s = inf
        self.known: dict[Ways, _Judged] = {}

    def run(self, starts: Sequence[Ways]) -> tuple[float, Layout] | None:
        for ways in self._starts(starts):
            self._climb(ways)
            if self.tries <= 0 or self.steps <= 0 or self.shortest_s <= self.least_s:
                break
        promising = sorted((step_s, ways) for ways, (step_s, *_) in self.known.items() if step_s < inf)
        visits = self.job.microbatches * self.job.layers
        for most, tries in _ROUNDS:
            if promising and promising[0][0] <= self.least_s:
                break
            promising = sorted(
                (min(step_s, self.job.judge(self.job.layout(ways), tries, inf)), ways)
                for step_s, ways in promising[: max(1, most // visits)]
            )
        if not promising or promising[0][0] >= self.below_s:
            return None
        return promising[0][0], self.job.layout(promising[0][1])

    def _starts(self, starts: Sequence[Ways]) -> Iterator[Ways]:
        yield from starts
        rng, workers, layers = self.rng, self.job.workers, self.job.layers
        while True:
            if rng.random() < _PIPELINES_FIRST:
                yield tuple((rng.choice(workers),) * layers for _ in range(self.job.microbatches))
            else:
                yield tuple(
                    tuple(rng.choice(workers) for _ in range(layers)) for _ in range(self.job.microbatches)
                )

    def _climb(self, ways: Ways) -> None:
        now, stale = self._judged(ways), 0
        while stale < _STALE and self.tries > 0 and self.steps > 0:
            other = self._changed(ways)
            there = self._judged(other)
            stale = 0 if there < now else stale + 1
            if there <= now:
                now, ways = there, other

    def _changed(self, ways: Ways) -> Ways:
        rng, layers, found = self.rng, self.job.layers, list(ways)
        for _ in range(rng.choice(_AT_ONCE)):
            at, first = rng.randrange(len(found)), rng.randrange(layers)
            last = first + 1 if rng.random() < _PIPELINES_FIRST else rng.randint(first + 1, layers)
            worker = rng.choice(self.job.workers)
            found[at] = (*found[at][:first], *[worker] * (last - first), *found[at][last:])
        return tuple(found)

    def _judged(self, ways: Ways) -> _Judged:
        TURNS.pause()
        self.steps -= 1
        if ways not in self.known:
            self.known[ways] = self._judge(ways)
        return self.known[ways]

    def _judge(self, ways: Ways) -> _Judged:
        job, load = self.job, dict.fromkeys(self.job.workers, 0.0)
        for way in ways:
            for worker, seconds in zip(way, self.seconds, strict=True):
                load[worker] += seconds / job.speeds.get(worker, 1.0)
        uneven, least = sum(one * one for one in load.values()), job.least_holders
        alone = least > 1 and any(len(set(held)) < least for held in zip(*ways, strict=True))
        layout = job.layout(ways)
        if not alone and max(load.values()) < self.below_s:
            self.tries -= 1
            step_s = job.judge(layout, 0, self.shortest_s * _NEAR)
            if step_s < inf:
                if step_s < self.shortest_s:
                    self.shortest_s, self.tries = step_s, _TRIES
                return step_s, 0, uneven
        return inf, _excess_bytes(layout, job.costs), uneven


def _excess_bytes(layout: Layout, costs: Costs) -> int:
    """Return the bytes that workers would need above their memory, if every holder kept all optimizer state."""
    if costs.memory_bytes is None:
        return 0
    state, least = state_bytes(layout, costs), minimum_bytes(layout, costs)
    return sum(max(0, state[worker] + least[worker] - costs.memory_bytes) for worker in state)
