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
from odyssey_megatron.plan.costs import Costs, Spans
from odyssey_megatron.plan.layout import Layout, layout_from_routes
from odyssey_megatron.plan.simulate import reduce_s
from odyssey_megatron.plan.transfer import assign_seats
from odyssey_megatron.policy import partition, ways
from odyssey_megatron.policy.cuts import recut
from odyssey_megatron.policy.partition import MANY_WORKERS, Partition
from odyssey_megatron.policy.shares import SLACK, Rate, deal, finish_s, min_max_shares

_LEGS = {2: " in a V", 4: " in a W"}
"""Of routes that visit workers more than once, and how they look in tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Pipelines without workers: what a replan chooses among."""

    ends: tuple[tuple[int, ...], ...]
    """Per pipeline, where each stage ends: as :mod:`odyssey_megatron.policy.ways` counts, with so many ``legs``."""
    shares: tuple[int, ...]
    """Per pipeline, its number of microbatches."""
    estimate_s: float
    legs: int = 1


@lru_cache(maxsize=8)
def search_for(
    costs: Costs, budget_bytes: int | None, optimizer_copies: int = 0, *, revisits: bool = False
) -> Search:
    """The search of these costs, with what it has worked out so far: the next decision reuses it.

    ``revisits``: routes may visit a worker more than once.
    """
    return Search(costs, budget_bytes, optimizer_copies, revisits=revisits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A worker of a pipeline."""

    spans: tuple[tuple[int, int], ...]
    """The layers of each of its visits."""
    hop: int
    """The number of the first of them on the route."""
    down_and_up_s: float
    each_s: float
    """Seconds a microbatch that it can sustain."""

    @property
    def first(self) -> int:
        return self.spans[0][0]


class Search:
    """Layer splits and rates for one job, kept for all the shapes that share them.

    Chameleon's Algorithm 1 (papers.md §1.4) enumerates integer partitions of the workers, remainders of the
    microbatches and remainders of the layers, and simulates each. Here the splits are min-max by construction,
    the shares exact for the rates, and only lengths that differ by one are looked at: on layers of like
    cost a more uneven partition has a slower slowest stage.
    """

    def __init__(
        self,
        costs: Costs,
        budget_bytes: int | None = None,
        optimizer_copies: int = 0,
        *,
        revisits: bool = False,
        legs: int = 1,
        ample: Search | None = None,
    ) -> None:
        """``legs``: how often a route goes through its pipeline's workers; ``revisits``: more are looked at, too;
        ``ample``: the search of the same times with all the memory there could be, if there is one.
        """
        self.costs, self.budget, self.copies, self.legs = costs, budget_bytes, optimizer_copies, legs
        self.last = len(costs.layers)
        self.most_stages = max(1, (self.last - 2) // legs)
        self.turned = tuple(
            Search(costs, budget_bytes, optimizer_copies, legs=more) for more in _LEGS if revisits
        )
        """The same with more legs."""
        self._spans = costs.spans
        self._cut = costs.spans
        if legs > 1:
            self._cut = Spans([costs.layers[layer] for layer in ways.turns(self.last, legs)])
        self._stays = self._byte_seconds()
        self._stage_s = [
            [self._one_stage_s(a, b) if a < b else 0.0 for b in range(self.last + 1)]
            for a in range(self.last)
        ]
        self._limits = sorted({s for row in self._stage_s for s in row if 0.0 < s < inf})
        self._ample = ample or (Search(costs, legs=legs) if budget_bytes is not None else None)
        self._splits: dict[int, tuple[int, ...] | None] = {}
        self._stages: dict[int, tuple[Stage, ...]] = {}
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
            costs = self.costs.with_layers(layers)
            self._shared[pipelines] = Search(costs, self.budget, legs=self.legs, ample=self._ample)
        return self._shared[pipelines]

    def _one_stage_s(self, first: int, last: int) -> float:
        """Seconds a microbatch that a stage can sustain, cut as :func:`ways.turns` are; infinite if it does not fit.

        Its work, or, with room for k microbatches, a k-th of the time that one stays: down to the head, up
        again, and through its own weight gradient (Little's law). With several legs each layer's stay is its own.
        """
        work = self._cut.compute_s(first, last)
        if self.budget is None:
            return work
        room = self.budget - self._cut.kept_bytes(first, last)
        if self.legs > 1 and first == 0 and self.costs.tied:
            room -= self.costs.tied.kept_bytes
        each = self._cut.activation_bytes(first, last)
        if room < each:
            return inf
        if self.legs > 1:
            return max(work, (self._stays[last] - self._stays[first]) / room) if each else work
        down_and_up_s = self._spans.down_and_up_s
        stay = down_and_up_s(first, self.last) + work - down_and_up_s(first, last)
        return max(work, stay / (room // each)) if each else work

    def kept_bytes(self, one: Stage) -> int:
        """Of a worker of a pipeline: weights, gradients and optimizer state."""
        both_ends = len(one.spans) > 1 and one.first == 0 and one.spans[-1][1] == self.last
        twice = self.costs.tied.kept_bytes if self.costs.tied and both_ends else 0
        return sum(self._spans.kept_bytes(a, b) for a, b in one.spans) - twice

    def _byte_seconds(self) -> list[float]:
        """Of the layers before each place of the cut, what they keep times how long at the least."""
        spans, found = self._spans, [0.0]
        for layer in ways.turns(self.last, self.legs) if self.legs > 1 else ():
            stay_s = spans.down_and_up_s(layer, self.last) + self.costs.layers[layer].weight_grad_s
            found.append(found[-1] + self.costs.layers[layer].activation_bytes * stay_s)
        return found

    def stages(self, count: int) -> tuple[Stage, ...]:
        """Of a pipeline of so many that fits."""
        if count not in self._stages:
            ends, spans = self.split(count) or (), self._spans
            own: list[list[tuple[int, int, int]]] = [[] for _ in ends]
            for hop, (place, first, last) in enumerate(ways.visits(ends, self.legs)):
                own[place].append((hop, first, last))
            found = [
                Stage(
                    spans=tuple((first, last) for _, first, last in visits),
                    hop=visits[0][0],
                    down_and_up_s=sum(spans.down_and_up_s(first, last) for _, first, last in visits),
                    each_s=self._stage_s[a][b],
                )
                for visits, (a, b) in zip(own, pairwise((0, *ends)), strict=True)
            ]
            self._stages[count] = tuple(found)
        return self._stages[count]

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
        if found.legs != self.legs:
            (turned,) = (one for one in self.turned if one.legs == found.legs)
            return turned.shape_of(found, num_workers, num_microbatches)
        if not found.shares:
            return self.shape(num_workers, num_microbatches, found.number)
        splits = [self.sharing(found.number).split(stages) for stages, _ in found.shares]
        return Shape(
            ends=tuple(split or () for split in splits),
            shares=tuple(count for _, count in found.shares),
            estimate_s=found.estimate_s,
            legs=self.legs,
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
            legs=self.legs,
        )

    def lengths(self, found: Partition, num_workers: int) -> str:
        """Stages of each pipeline: ``8+8+7``; ``125x8+3x7`` where there are many; and how routes go through them."""
        way = _LEGS.get(found.legs, "")
        counts = [*Counter(stages for stages, _ in found.shares).items()] or self.even(
            num_workers, found.number
        )
        if found.number > 16:
            return "+".join(f"{count}x{length}" for length, count in counts) + way
        return "+".join(str(length) for length, count in counts for _ in range(count)) + way

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
            path_s = max(path_s, self.path_s(length))
        return max(finish_s(microbatches, work), finish_s(microbatches, drain), path_s)

    def _last_done(self, stages: int, share: float, pipelines: int) -> Rate:
        """Work and reduction of the stage that is done last if its pipeline gets ``share`` microbatches."""
        latest = (-inf, 0.0, 0.0)
        for one in self.stages(stages):
            around_s = self._spans.forward_s(0, one.first) + one.hop * self.costs.message_s()
            around_s += sum(reduce_s(self.costs, a, b, pipelines) for a, b in one.spans)
            latest = max(latest, (around_s + share * one.each_s, around_s, one.each_s))
        return Rate(head_s=latest[1], each_s=latest[2])

    def _drain(self, stages: int) -> Rate:
        """Forwards and input gradients of the stage with most of them; before and after it, the way to the first."""
        _, _, longest = max((one.down_and_up_s, one.hop, one) for one in self.stages(stages))
        return Rate(head_s=self.up_s(stages, longest), each_s=longest.down_and_up_s)

    def up_s(self, stages: int, one: Stage) -> float:
        """Down to a stage, and from it up again to the end of the first weight gradient."""
        way_s = self._spans.down_and_up_s(0, one.first) + 2 * one.hop * self.costs.message_s()
        return way_s + self._spans.weight_grad_s(*self.stages(stages)[0].spans[0])

    def path_s(self, stages: int) -> float:
        """One microbatch alone, to the end of its last weight gradient on the first stage."""
        hops = sum(len(one.spans) for one in self.stages(stages))
        way_s = self._spans.down_and_up_s(0, self.last) + 2 * (hops - 1) * self.costs.message_s()
        return way_s + self._spans.weight_grad_s(*self.stages(stages)[0].spans[0])

    def split(self, stages: int) -> tuple[int, ...] | None:
        """Stage ends such that the slowest stage is as fast as possible, then the others as equal as possible.

        The slowest stage is one of all spans of layers, so their sorted times are bisected; whether a limit is
        enough is seen by filling stages greedily, which is exact because a longer span is never faster. Few
        stages at the limit leave the scheduler slack. None if nothing fits the memory.

        Memory only ever makes a stage slower, so that what is best without it, and as fast with it, is best.
        """
        if stages not in self._splits and self._ample:
            ends = self._ample.split(stages)
            spans = pairwise((0, *(ends or ())))
            if all(self._stage_s[a][b] == self._cut.compute_s(a, b) for a, b in spans):
                self._splits[stages] = ends
        if stages not in self._splits:
            at = bisect_left(self._limits, True, key=lambda limit: self._fits(stages, limit))
            fits = at < len(self._limits)
            self._splits[stages] = self._even(stages, self._limits[at] * SLACK) if fits else None
        return self._splits[stages]

    def _fits(self, stages: int, limit: float) -> bool:
        start, limit = 0, limit * SLACK
        for stage in range(stages):
            low, high = ways.window(stage, stages, self.last, self.legs)
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
            low, high = ways.window(stage, stages, self.last, self.legs)
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
        _, _, slowest = max((one.each_s, one.hop, one) for one in self.stages(stages))
        head_s = self._spans.forward_s(0, slowest.first) + slowest.hop * self.costs.message_s()
        return Rate(head_s=head_s, each_s=slowest.each_s)


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
        previous.with_tied(layer for first, last in spans for layer in range(first, last))
        for ends in shape.ends
        for spans in ways.spans(ends, shape.legs)
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
        ways.route(pipeline, ends, shape.legs, microbatches)
        for pipeline, ends, microbatches in zip(pipelines, shape.ends, deal(shape.shares), strict=True)
    )
    return layout_from_routes(len(costs.layers), routes, tied=previous.tied)


def _at_speed(
    shape: Shape, pipelines: Sequence[tuple[int, ...]], costs: Costs, speeds: Mapping[int, float]
) -> Shape:
    """``shape`` with boundaries and shares for the speeds of the workers that have its seats."""
    work = [costs.layers[layer].compute_s for layer in ways.turns(len(costs.layers), shape.legs)]
    cuts, rates = [], []
    for pipeline, ends in zip(pipelines, shape.ends, strict=True):
        capacity = [speeds.get(worker, 1.0) for worker in pipeline]
        cut = recut(work, capacity, ends, shape.legs) if min(capacity) < 1.0 else ends
        visits = ways.visits(cut, shape.legs)
        times = [0.0] * len(pipeline)
        for place, a, b in visits:
            times[place] += costs.spans.compute_s(a, b) / capacity[place]
        at = times.index(max(times))
        before = visits[: [place for place, _, _ in visits].index(at)]
        head = sum(costs.spans.forward_s(a, b) / capacity[place] for place, a, b in before)
        cuts.append(cut)
        rates.append(Rate(head_s=head, each_s=times[at]))
    return Shape(
        ends=tuple(cuts),
        shares=min_max_shares(sum(shape.shares), rates),
        estimate_s=shape.estimate_s,
        legs=shape.legs,
    )
