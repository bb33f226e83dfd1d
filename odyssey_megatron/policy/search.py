"""The search for ragged pipelines over the workers that are left."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout, layout_from_routes, pipeline_route
from odyssey_megatron.plan.simulate import reduce_s
from odyssey_megatron.plan.transfer import assign_seats


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Pipelines without workers: what a replan chooses among."""

    ends: tuple[tuple[int, ...], ...]
    """Per pipeline, where each stage ends."""
    shares: tuple[int, ...]
    """Per pipeline, its number of microbatches."""
    estimate_s: float


def shapes(num_workers: int, num_microbatches: int, costs: Costs) -> tuple[Shape, ...]:
    """For each number of pipelines the balanced shape, fastest estimate first.

    Lengths differ by one at most, layers are split min-max, microbatches go to the pipeline that would finish
    first. Chameleon's Algorithm 1 (papers.md §1.4) enumerates far more; on layers of equal cost these win there too.
    """
    splitter = _Splitter(costs)
    found = []
    for pipelines in range(1, min(num_workers, num_microbatches) + 1):
        short, longer = divmod(num_workers, pipelines)
        lengths = [min(short + (i < longer), splitter.most_stages) for i in range(pipelines)]
        rates = [splitter.rate(length) for length in lengths]
        shares = min_max_shares(num_microbatches, rates)
        estimate = max(once + (m - 1) * each for m, (once, each) in zip(shares, rates, strict=True))
        estimate += max(splitter.reduction_s(length, pipelines) for length in set(lengths))
        ends = tuple(splitter.split(length) for length in lengths)
        found.append(Shape(ends=ends, shares=shares, estimate_s=estimate))
    return tuple(sorted(found, key=lambda shape: (shape.estimate_s, len(shape.shares))))


def min_max_shares(count: int, rates: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Splits ``count`` microbatches so that the slowest pipeline finishes earliest; each gets at least one.

    ``rates``: per pipeline, (seconds for the first, seconds for each further one). Giving the next one to whoever
    would then finish first is exact (papers.md §8.3).
    """
    shares = [1] * len(rates)
    heap = [(once + each, i) for i, (once, each) in enumerate(rates)]
    heapify(heap)
    for _ in range(count - len(rates)):
        finish, i = heap[0]
        shares[i] += 1
        heapreplace(heap, (finish + rates[i][1], i))
    return tuple(shares)


class _Splitter:
    """Min-max splits of the layers, one for each number of stages; each stage has a transformer layer."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.sums = [0.0, *accumulate(layer.compute_s for layer in costs.layers)]
        self.most_stages = max(1, len(costs.layers) - 2)
        last = len(costs.layers)
        self.bottlenecks = sorted({self.sums[b] - self.sums[a] for a in range(last) for b in range(a + 1, last + 1)})
        self._splits: dict[int, tuple[int, ...]] = {}
        self._rates: dict[int, tuple[float, float]] = {}

    def split(self, stages: int) -> tuple[int, ...]:
        """Stage ends such that the slowest stage is as fast as possible, then the others as equal as possible.

        The slowest stage is the sum of some span of layers, so the sorted sums are bisected; whether one is
        enough is seen by filling stages greedily. Few stages at the limit leave the scheduler slack.
        """
        if stages not in self._splits:
            at = bisect_left(self.bottlenecks, True, key=lambda limit: self._fits(stages, limit))
            self._splits[stages] = self._even(stages, self.bottlenecks[at] * (1 + 1e-9))
        return self._splits[stages]

    def _window(self, stage: int, stages: int) -> tuple[int, int]:
        """Where ``stage`` may end: each stage needs a transformer layer, the last one also the head."""
        last = len(self.costs.layers)
        return (last, last) if stage == stages - 1 else (stage + 2, last - (stages - stage))

    def _fits(self, stages: int, limit: float) -> bool:
        start, sums = 0, self.sums
        for stage in range(stages):
            low, high = self._window(stage, stages)
            if sums[low] - sums[start] > limit * (1 + 1e-9):
                return False
            start = max(low, bisect_right(sums, sums[start] + limit * (1 + 1e-9), low, high + 1) - 1)
        return True

    def _even(self, stages: int, limit: float) -> tuple[int, ...]:
        """Least sum of squares among the splits within ``limit``; later stages the longer ones.

        First stages keep the most microbatches in flight, so what is uneven should not burden them.
        """
        sums = self.sums
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for stage in range(stages):
            low, high = self._window(stage, stages)
            reached: dict[int, tuple[float, tuple[int, ...]]] = {}
            for start, (squares, ends) in best.items():
                for end in range(max(low, start + 1), high + 1):
                    load = sums[end] - sums[start]
                    if load > limit:
                        break
                    option = (squares + load * load, (*ends, end))
                    if end not in reached or option < reached[end]:
                        reached[end] = option
            best = reached
        return best[len(self.costs.layers)][1]

    def rate(self, stages: int) -> tuple[float, float]:
        """(seconds until the slowest stage has done one microbatch, its seconds for each further one).

        With the backward split and 1F1B's memory the generator has no bubble but the warm-up: the slowest stage
        starts when the first activation reaches it and then has all its work to do. (Chameleon's Eq. 9,
        papers.md §1.3, counts the drain as well.) The last of equally slow stages starts latest.
        """
        if stages not in self._rates:
            starts = (0, *self.split(stages)[:-1])
            spans = list(zip(starts, self.split(stages), strict=True))
            each, start = max((self.sums[b] - self.sums[a], a) for a, b in spans)
            head = sum(layer.forward_s for layer in self.costs.layers[:start])
            self._rates[stages] = (head + each + (stages - 1) * self.costs.message_s(), each)
        return self._rates[stages]


    def reduction_s(self, stages: int, pipelines: int) -> float:
        """Gradient reduction of the stage with the most parameters, as one block over all pipelines."""
        ends = self.split(stages)
        spans = zip((0, *ends[:-1]), ends, strict=True)
        return max(reduce_s(self.costs, first, last, pipelines) for first, last in spans)


def place(
    shape: Shape,
    workers: Collection[int],
    previous: Layout,
    costs: Costs,
    speeds: Mapping[int, float] | None = None,
) -> Layout:
    """``shape`` on actual workers, so that the fewest bytes move; microbatches dealt out evenly in order.

    Raises:
        PlanInfeasible: fewer workers than stages.
    """
    seats = [
        tuple(range(first, last))
        for ends in shape.ends
        for first, last in zip((0, *ends[:-1]), ends, strict=True)
    ]
    if len(seats) > len(workers):
        raise PlanInfeasible(f"{len(seats)} stages need as many workers, {len(workers)} are alive")
    held = {worker: previous.held_by(worker) for worker in workers}
    seated = iter(assign_seats(seats, sorted(workers), held, costs))
    dealt = deal(shape.shares)
    routes = tuple(
        pipeline_route(tuple(next(seated) for _ in ends), ends, microbatches)
        for ends, microbatches in zip(shape.ends, dealt, strict=True)
    )
    return layout_from_routes(len(costs.layers), routes)


def deal(shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Microbatch ids 0..sum-1 for each pipeline, spread evenly: round-robin where shares are equal."""
    order = sorted(
        ((2 * i + 1) / (2 * share), pipeline)
        for pipeline, share in enumerate(shares)
        for i in range(share)
    )
    ids: list[list[int]] = [[] for _ in shares]
    for microbatch, (_, pipeline) in enumerate(order):
        ids[pipeline].append(microbatch)
    return tuple(tuple(one) for one in ids)
