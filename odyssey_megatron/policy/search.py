"""The search for ragged pipelines over the workers that are left."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import inf

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout, layout_from_routes, pipeline_route
from odyssey_megatron.plan.simulate import reduce_s
from odyssey_megatron.plan.transfer import assign_seats
from odyssey_megatron.policy import partition
from odyssey_megatron.policy.cuts import recut, window
from odyssey_megatron.policy.partition import MANY_WORKERS, Partition

SLACK = 1 + 1e-9
"""Sums of floats that are equal on paper must compare equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Pipelines without workers: what a replan chooses among."""

    ends: tuple[tuple[int, ...], ...]
    """Per pipeline, where each stage ends."""
    shares: tuple[int, ...]
    """Per pipeline, its number of microbatches."""
    estimate_s: float


@lru_cache(maxsize=8)
def search_for(costs: Costs, budget_bytes: int | None, optimizer_copies: int = 0) -> Search:
    """The search of these costs, with what it has worked out so far: the next decision reuses it."""
    return Search(costs, budget_bytes, optimizer_copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast a pipeline is: a microbatch each ``each_s``, after a warm-up of ``head_s``."""

    head_s: float
    each_s: float

    def finish_s(self, microbatches: int) -> float:
        return self.head_s + microbatches * self.each_s


class Search:
    """Layer splits and rates for one job, kept for all the shapes that share them.

    Chameleon's Algorithm 1 (papers.md §1.4) enumerates integer partitions of the workers, remainders of the
    microbatches and remainders of the layers, and simulates each. Here the splits are min-max by construction,
    the shares exact for the rates, and only lengths that differ by one are looked at: on layers of like
    cost a more uneven partition has a slower slowest stage.
    """

    def __init__(self, costs: Costs, budget_bytes: int | None = None, optimizer_copies: int = 0) -> None:
        self.costs, self.budget, self.copies = costs, budget_bytes, optimizer_copies
        self.last = len(costs.layers)
        self.most_stages = max(1, self.last - 2)
        self._spans = costs.spans
        self._stage_s = [
            [self._one_stage_s(a, b) if a < b else 0.0 for b in range(self.last + 1)]
            for a in range(self.last)
        ]
        self._limits = sorted({s for row in self._stage_s for s in row if 0.0 < s < inf})
        self._splits: dict[int, tuple[int, ...] | None] = {}
        self._paces: dict[int, list[tuple[float, float, int, int]]] = {}
        self._shared: dict[int, Search] = {}
        self._ranked: dict[tuple[int, int], tuple[tuple[float, int], ...]] = {}
        self._partitions: dict[tuple[int, int], tuple[Partition, ...]] = {}

    def sharing(self, pipelines: int) -> Search:
        """This search, where each layer's optimizer state is shared out among the holders in so many pipelines.

        Of many only the first four binary digits count: what is kept of the state is little then, and searches few.
        """
        rounded = max(0, pipelines.bit_length() - 4)
        pipelines = pipelines >> rounded << rounded
        if self.budget is None or not 0 < self.copies < pipelines:
            return self
        if pipelines not in self._shared:
            part = self.copies / pipelines
            layers = (
                replace(one, optimizer_bytes=round(part * one.optimizer_bytes))
                for one in self.costs.all_layers
            )
            self._shared[pipelines] = Search(self.costs.with_layers(layers), self.budget)
        return self._shared[pipelines]

    def _one_stage_s(self, first: int, last: int) -> float:
        """Seconds a microbatch that a stage of these layers can sustain; infinite if they do not fit.

        Its work, or, with room for k microbatches, a k-th of the time that one stays: down to the head, up
        again, and through its own weight gradient (Little's law).
        """
        work = self._spans.compute_s(first, last)
        if self.budget is None:
            return work
        room = self.budget - self._spans.kept_bytes(first, last)
        each = self._spans.activation_bytes(first, last)
        if room < each:
            return inf
        down_and_up_s = self._spans.down_and_up_s
        stay = down_and_up_s(first, self.last) + work - down_and_up_s(first, last)
        return max(work, stay / (room // each)) if each else work

    def pace_s(self, first: int, last: int) -> float:
        """Seconds a microbatch that a stage of these layers can sustain."""
        return self._stage_s[first][last]

    def ranked(self, num_workers: int, num_microbatches: int) -> tuple[tuple[float, int], ...]:
        """(estimated step, number of pipelines) of every balanced shape that fits, fastest first.

        Large clusters: of all numbers of pipelines with the same lengths only the least and the greatest.
        """
        if (num_workers, num_microbatches) not in self._ranked:
            most = min(num_workers, num_microbatches)
            numbers = set(range(1, most + 1))
            if num_workers > MANY_WORKERS:
                lengths = range(1, min(num_workers, self.most_stages) + 1)
                numbers = {n for a in lengths for n in (num_workers // a, num_workers // a + 1) if n <= most}
            estimates = ((self.estimate_s(num_workers, num_microbatches, n), n) for n in numbers)
            found = sorted((estimate_s, n) for estimate_s, n in estimates if estimate_s is not None)
            self._ranked[num_workers, num_microbatches] = tuple(found)
        return self._ranked[num_workers, num_microbatches]

    def partitions(self, num_workers: int, num_microbatches: int) -> tuple[Partition, ...]:
        """The best for each number of pipelines, of any lengths, fastest first."""
        key = (num_workers, num_microbatches)
        if key not in self._partitions:
            self._partitions[key] = partition.ranked(self, num_workers, num_microbatches)
        return self._partitions[key]

    def shape_of(self, found: Partition, num_workers: int, num_microbatches: int) -> Shape:
        """``found`` with its stages. Raises PlanInfeasible."""
        if not found.shares:
            return self.shape(num_workers, num_microbatches, found.number)
        splits = [self.sharing(found.number).split(stages) for stages, _ in found.shares]
        return Shape(
            ends=tuple(split or () for split in splits),
            shares=tuple(count for _, count in found.shares),
            estimate_s=found.estimate_s,
        )

    def estimate_s(self, num_workers: int, num_microbatches: int, pipelines: int) -> float | None:
        """Estimated step of the balanced shape of so many pipelines; None if it does not fit."""
        own = self.sharing(pipelines)
        rates = own._rates(num_workers, pipelines)
        return None if rates is None else own._estimate_s(rates, num_microbatches, pipelines)

    def shape(self, num_workers: int, num_microbatches: int, pipelines: int) -> Shape:
        """The balanced shape of so many pipelines.

        Raises:
            PlanInfeasible: a stage would not fit; says how much memory the leanest split needs.
        """
        if (own := self.sharing(pipelines)) is not self:
            return own.shape(num_workers, num_microbatches, pipelines)
        rates = self._rates(num_workers, pipelines)
        if rates is None:
            raise PlanInfeasible(self.why_not(num_workers // pipelines))
        ends: list[tuple[int, ...]] = []
        for length, _, count in rates:
            split = self.split(length)
            ends += [split] * count if split else []
        share = num_microbatches / pipelines
        paces = [(self._last_done(length, share, pipelines), count) for length, _, count in rates]
        each = [rate for rate, count in paces for _ in range(count)]
        return Shape(
            ends=tuple(ends),
            shares=min_max_shares(num_microbatches, each),
            estimate_s=self._estimate_s(rates, num_microbatches, pipelines),
        )

    def lengths(self, found: Partition, num_workers: int) -> str:
        """Stages of each pipeline: ``8+8+7``; ``125x8+3x7`` where there are many."""
        counts = [*Counter(stages for stages, _ in found.shares).items()] or self.even(
            num_workers, found.number
        )
        if found.number > 16:
            return "+".join(f"{count}x{length}" for length, count in counts)
        return "+".join(str(length) for length, count in counts for _ in range(count))

    def why_not(self, stages: int) -> str:
        """What keeps a pipeline of ``stages`` from fitting, and the nearest memory that would do."""
        stages = min(stages, self.most_stages)
        ends = Search(self.costs).split(stages) or ()
        need = max(
            self._spans.kept_bytes(a, b) + self._spans.activation_bytes(a, b) for a, b in pairwise((0, *ends))
        )
        return f"a pipeline of {stages} stage(s) needs {need} bytes a worker, {self.budget} are there"

    def _rates(self, num_workers: int, pipelines: int) -> list[tuple[int, Rate, int]] | None:
        """(stages, rate, how many pipelines): the longer ones first. None if one does not fit."""
        found = []
        for length, count in self.even(num_workers, pipelines):
            rate = self.rate(length)
            if rate is None:
                return None
            found.append((length, rate, count))
        return found

    def even(self, num_workers: int, pipelines: int) -> list[tuple[int, int]]:
        """(stages, how many pipelines): the longer ones first."""
        short, longer = divmod(num_workers, pipelines)
        both = ((short + 1, longer), (short, pipelines - longer))
        return [(min(length, self.most_stages), count) for length, count in both if count]

    def _estimate_s(self, rates: list[tuple[int, Rate, int]], microbatches: int, pipelines: int) -> float:
        """The least time in which all pipelines can end.

        Three bounds as in :mod:`odyssey_megatron.plan.bound`: all the work of a stage and then its reduction; the
        forwards and input gradients of a stage, and then the way up; and one microbatch's way down and up.
        """
        work, drain, path_s = [], [], 0.0
        for length, _, count in rates:
            work.append((self._last_done(length, microbatches / pipelines, pipelines), count))
            drain.append((self._drain(length), count))
            path_s = max(path_s, self._path_s(length))
        return max(finish_s(microbatches, work), finish_s(microbatches, drain), path_s)

    def _last_done(self, stages: int, share: float, pipelines: int) -> Rate:
        """Work and reduction of the stage that is done last if its pipeline gets ``share`` microbatches."""
        if stages not in self._paces:
            ends = self.split(stages) or ()
            self._paces[stages] = [
                (self._spans.forward_s(0, a) + stage * self.costs.message_s(), self._stage_s[a][b], a, b)
                for stage, (a, b) in enumerate(pairwise((0, *ends)))
            ]
        latest = (-inf, 0.0, 0.0)
        for head_s, each_s, a, b in self._paces[stages]:
            around_s = head_s + reduce_s(self.costs, a, b, pipelines)
            latest = max(latest, (around_s + share * each_s, around_s, each_s))
        return Rate(head_s=latest[1], each_s=latest[2])

    def _drain(self, stages: int) -> Rate:
        """Forwards and input gradients of the stage with most of them; before and after it, the way to the first."""
        ends = self.split(stages) or ()
        spans = enumerate(pairwise((0, *ends)))
        each, stage, first = max((self._spans.down_and_up_s(a, b), stage, a) for stage, (a, b) in spans)
        way_s = self._spans.down_and_up_s(0, first) + 2 * stage * self.costs.message_s()
        return Rate(head_s=way_s + self._spans.weight_grad_s(0, ends[0]), each_s=each)

    def _path_s(self, stages: int) -> float:
        """One microbatch alone, to the end of its last weight gradient on the first stage."""
        ends = self.split(stages) or ()
        way_s = self._spans.down_and_up_s(0, self.last) + 2 * (stages - 1) * self.costs.message_s()
        return way_s + self._spans.weight_grad_s(0, ends[0])

    def split(self, stages: int) -> tuple[int, ...] | None:
        """Stage ends such that the slowest stage is as fast as possible, then the others as equal as possible.

        The slowest stage is one of all spans of layers, so their sorted times are bisected; whether a limit is
        enough is seen by filling stages greedily, which is exact because a longer span is never faster. Few
        stages at the limit leave the scheduler slack. None if nothing fits the memory.
        """
        if stages not in self._splits:
            at = bisect_left(self._limits, True, key=lambda limit: self._fits(stages, limit))
            fits = at < len(self._limits)
            self._splits[stages] = self._even(stages, self._limits[at] * SLACK) if fits else None
        return self._splits[stages]

    def _fits(self, stages: int, limit: float) -> bool:
        start, limit = 0, limit * SLACK
        for stage in range(stages):
            low, high = window(stage, stages, self.last)
            times = self._stage_s[start]
            if times[low] > limit:
                return False
            start = low
            while start < high and times[start + 1] <= limit:
                start += 1
        return True

    def _even(self, stages: int, limit: float) -> tuple[int, ...]:
        """Least sum of squares among the splits within ``limit``; later stages the longer ones.

        First stages keep the most microbatches in flight, so what is uneven should not burden them.
        """
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for stage in range(stages):
            low, high = window(stage, stages, self.last)
            reached: dict[int, tuple[float, tuple[int, ...]]] = {}
            for start, (squares, ends) in best.items():
                times = self._stage_s[start]
                for end in range(max(low, start + 1), high + 1):
                    load = times[end]
                    if load > limit:
                        break
                    option = (squares + load * load, (*ends, end))
                    if end not in reached or option < reached[end]:
                        reached[end] = option
            best = reached
        return best[self.last][1]

    def rate(self, stages: int) -> Rate | None:
        """Warm-up and pace of a pipeline of ``stages``; None if it does not fit.

        With the backward split and 1F1B's memory the generator has no bubble but the warm-up: the slowest stage
        starts when the first activation reaches it and then has all its work to do. (Chameleon's Eq. 9,
        papers.md §1.3, counts the drain as well.) The last of equally slow stages starts latest.
        """
        if self.split(stages) is None:
            return None
        first, last, stage = self._slowest(stages)
        head_s = self._spans.forward_s(0, first) + stage * self.costs.message_s()
        return Rate(head_s=head_s, each_s=self._stage_s[first][last])

    def _slowest(self, stages: int) -> tuple[int, int, int]:
        """(first layer, last, stage) of the slowest stage of a split that fits; the last one if several are."""
        spans = enumerate(pairwise((0, *(self.split(stages) or ()))))
        _, stage, first, last = max((self._stage_s[a][b], stage, a, b) for stage, (a, b) in spans)
        return first, last, stage


def finish_s(count: int, rates: Sequence[tuple[Rate, int]]) -> float:
    """The least time in which pipelines, given as (rate, how many), can do ``count`` microbatches.

    The time is that of some pipeline's last microbatch. With fractions allowed it would be ``fluid``, and rounding
    down loses each pipeline less than one, so the answer is within one microbatch of the slowest above it.
    """
    paced = [(rate, n) for rate, n in rates if rate.each_s > 0]
    if not paced:
        return max(rate.head_s for rate, _ in rates)
    fluid = (count + sum(n * rate.head_s / rate.each_s for rate, n in paced)) / sum(
        n / rate.each_s for rate, n in paced
    )
    least = max(rate.finish_s(1) for rate, _ in rates)
    high = max(fluid + max(rate.each_s for rate, _ in paced), least)
    times = {least}
    for rate, _ in paced:
        first = max(1, int((fluid - rate.head_s) / rate.each_s))
        times |= {rate.finish_s(k) for k in range(first, int((high - rate.head_s) / rate.each_s) + 2)}
    ascending = sorted(time for time in times if time >= least)
    at = bisect_left(
        ascending, True, key=lambda t: sum(n * max(1, _done_by(t, r)) for r, n in rates) >= count
    )
    return ascending[min(at, len(ascending) - 1)]


def _done_by(time_s: float, rate: Rate) -> int:
    return int((time_s * SLACK - rate.head_s) / rate.each_s) if rate.each_s else 10**9


def min_max_shares(count: int, rates: Sequence[Rate]) -> tuple[int, ...]:
    """Splits ``count`` microbatches so that the slowest pipeline finishes earliest; each gets at least one.

    Min-max with integer shares is exact when each pipeline gets what it can finish in the least time that
    suffices, and surplus is taken from whoever finishes last (papers.md §8.3).
    """
    least = finish_s(count, [(rate, 1) for rate in rates])
    shares = [max(1, min(count, _done_by(least, rate))) for rate in rates]
    for _ in range(sum(shares) - count):
        last = max(
            (i for i in range(len(rates)) if shares[i] > 1), key=lambda i: rates[i].finish_s(shares[i])
        )
        shares[last] -= 1
    return tuple(shares)


def place(
    shape: Shape,
    workers: Collection[int],
    previous: Layout,
    costs: Costs,
    speeds: Mapping[int, float] | None = None,
) -> Layout:
    """``shape`` on actual workers, so that the fewest bytes move; microbatches dealt out evenly in order.

    Pipelines that got a slow worker are cut and loaded again, to what it can do.

    Raises:
        PlanInfeasible: fewer workers than stages.
    """
    seats = [
        previous.with_tied(range(first, last)) for ends in shape.ends for first, last in pairwise((0, *ends))
    ]
    if len(seats) > len(workers):
        raise PlanInfeasible(f"{len(seats)} stages need as many workers, {len(workers)} are alive")
    held: dict[int, list[int]] = {worker: [] for worker in workers}
    for layer, holders in enumerate(previous.all_holders):
        for worker in holders:
            if worker in held:
                held[worker].append(layer)
    seated = iter(assign_seats(seats, sorted(workers), held, costs))
    pipelines = [tuple(next(seated) for _ in ends) for ends in shape.ends]
    if speeds:
        shape = _at_speed(shape, pipelines, costs, speeds)
    routes = tuple(
        pipeline_route(pipeline, ends, microbatches)
        for pipeline, ends, microbatches in zip(pipelines, shape.ends, deal(shape.shares), strict=True)
    )
    return layout_from_routes(len(costs.layers), routes, tied=previous.tied)


def _at_speed(
    shape: Shape, pipelines: Sequence[tuple[int, ...]], costs: Costs, speeds: Mapping[int, float]
) -> Shape:
    """``shape`` with boundaries and shares for the speeds of the workers that have its seats."""
    work = [layer.compute_s for layer in costs.layers]
    cuts, rates = [], []
    for pipeline, ends in zip(pipelines, shape.ends, strict=True):
        capacity = [speeds.get(worker, 1.0) for worker in pipeline]
        cut = recut(work, capacity, ends) if min(capacity) < 1.0 else ends
        spans = [*pairwise((0, *cut))]
        times = [costs.spans.compute_s(a, b) / p for (a, b), p in zip(spans, capacity, strict=True)]
        at = times.index(max(times))
        before = zip(spans[:at], capacity, strict=False)
        head = sum(costs.spans.forward_s(a, b) / p for (a, b), p in before)
        cuts.append(cut)
        rates.append(Rate(head_s=head, each_s=times[at]))
    return Shape(
        ends=tuple(cuts),
        shares=min_max_shares(sum(shape.shares), rates),
        estimate_s=shape.estimate_s,
    )


def deal(shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Microbatch ids 0..sum-1 for each pipeline, spread evenly: round-robin where shares are equal."""
    order = sorted(
        ((2 * i + 1) / (2 * share), pipeline) for pipeline, share in enumerate(shares) for i in range(share)
    )
    ids: list[list[int]] = [[] for _ in shares]
    for microbatch, (_, pipeline) in enumerate(order):
        ids[pipeline].append(microbatch)
    return tuple(tuple(one) for one in ids)
