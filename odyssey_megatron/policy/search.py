"""The search for ragged pipelines over the workers that are left."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.costs import Costs, Spans
from odyssey_megatron.plan.list_schedule import Solved
from odyssey_megatron.plan.reductions import cut
from odyssey_megatron.plan.simulate import reduce_s
from odyssey_megatron.policy import partition, ways
from odyssey_megatron.policy.bounds import Rows
from odyssey_megatron.policy.cuts import place_within
from odyssey_megatron.policy.kinds import Slow, Sorts, sort_of, stages_of
from odyssey_megatron.policy.partition import MANY_WORKERS, Partition, Pipelines
from odyssey_megatron.policy.seating import Shape
from odyssey_megatron.policy.shares import SLACK, Rate, finish_s, min_max_shares
from odyssey_megatron.policy.stages import Stage

_HEALTHY = Slow(1.0)

_LEGS = {2: " in a V", 4: " in a W"}
"""Of routes that visit workers more than once, and how they look in tables."""


@lru_cache(maxsize=8)
def search_for(
    costs: Costs, budget_bytes: int | None, optimizer_copies: int = 0, *, revisits: bool = False
) -> Search:
    """The search of these costs, with what it has worked out so far: the next decision reuses it.

    ``revisits``: routes may visit a worker more than once.
    """
    return Search(costs, budget_bytes, optimizer_copies, revisits=revisits)


def _line(head_s: float, each_s: float, share: float) -> tuple[float, float, float]:
    return head_s + share * each_s, head_s, each_s


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
        sorts: Sorts | None = None,
        sums: int | None = None,
    ) -> None:
        """``legs``: how often a route goes through its pipeline's workers; ``revisits``: more are looked at, too;
        ``sums``: the copies of optimizer state to whose owners gradients go, if ``costs`` know of them already;
        ``ample``: the search of the same times with all the memory there could be, if there is one; ``sorts``: of slow
        workers, which all searches of a job have in common.
        """
        self.sorts = sorts or Sorts()
        self.costs, self.budget, self.copies, self.legs = costs, budget_bytes, optimizer_copies, legs
        self.sums = optimizer_copies if sums is None else sums
        self.last = len(costs.layers)
        self.most_stages = max(1, (self.last - 2) // legs)
        self.turned = tuple(
            Search(costs, budget_bytes, optimizer_copies, legs=more, sorts=self.sorts)
            for more in _LEGS
            if revisits
        )
        """The same with more legs."""
        self._spans = costs.spans
        self._cut = costs.spans
        if legs > 1:
            self._cut = Spans([costs.layers[layer] for layer in ways.turns(self.last, legs)])
        self._stays = self._byte_seconds()
        times_s = self._stages_s()
        self._stage_s: list[list[float]] = times_s.tolist()
        """Of a stage with layers ``[first, last)``; 0.0 where that is none."""
        self._limits: list[float] = np.unique(times_s[(times_s > 0.0) & (times_s < inf)]).tolist()
        self._slow_stage_s: dict[int, list[list[float]]] = {}
        """Of each sort of slow workers, as ``_stage_s``."""
        self._slow_at: dict[int, int] = {}
        """Kind -> the place of its slow worker."""
        self._ample = ample or (
            Search(costs, legs=legs, sums=self.sums) if budget_bytes is not None else None
        )
        self._splits: dict[int, tuple[int, ...] | None] = {}
        self._stages: dict[int, tuple[Stage, ...]] = {}
        self._shared: dict[int, Search] = {}
        self._ranked: dict[tuple[int, int], tuple[tuple[float, int], ...]] = {}
        self.rows: dict[int, Rows] = {}
        """Of each kind that was asked for."""
        self._pipelines: dict[tuple[int, tuple[int, ...], int], Pipelines] = {}
        self._partitions: dict[tuple[int, int, tuple[int, ...]], tuple[Partition, ...]] = {}

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
            self._shared[pipelines] = Search(
                costs, self.budget, legs=self.legs, ample=self._ample, sorts=self.sorts, sums=self.sums
            )
        return self._shared[pipelines]

    def _stages_s(self, slow: Slow = _HEALTHY) -> NDArray[np.float64]:
        """[first, last] -> seconds a microbatch that such a stage can sustain, cut as :func:`ways.turns` are; infinite
        if it does not fit.

        Its work, or, with room for k microbatches, a k-th of the time that one stays: down to the head, up
        again, and through its own weight gradient (Little's law). With several legs each layer's stay is its own.
        """
        cut = self._cut
        work = cut.compute_s.table() / slow.speed
        found = work
        if self.budget is not None:
            room = int(self.budget * slow.share) - cut.kept_bytes_table()
            if self.legs > 1 and self.costs.tied:
                room[0] -= self.costs.tied.kept_bytes
            each = cut.activation_bytes.table()
            fits, keeps = room >= each, each > 0
            if self.legs > 1:
                stays = np.array(self._stays)
                stay_s = (stays - stays[:, np.newaxis]) / np.where(keeps & fits, room, 1)
            else:
                way_s = self._spans.down_and_up_s.table()
                stay_s = (way_s[:, -1:] + work - way_s) / np.where(
                    keeps & fits, room // np.maximum(each, 1), 1
                )
            found = np.where(fits, np.where(keeps, np.maximum(work, stay_s), work), inf)
        found = found[:-1]
        found[np.tril_indices_from(found)] = 0.0
        return found

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

    def stages(self, kind: int) -> tuple[Stage, ...]:
        """Of a pipeline of this kind that fits."""
        if kind not in self._stages:
            ends, spans = self.split(kind) or (), self._spans
            slow, place = self._slow(kind), self.slow_place(kind)
            of = [
                (slow, self._slow_rows(kind)) if at == place else (_HEALTHY, self._stage_s)
                for at in range(len(ends))
            ]
            own: list[list[tuple[int, int, int]]] = [[] for _ in ends]
            for hop, (place, first, last) in enumerate(ways.visits(ends, self.legs)):
                own[place].append((hop, first, last))
            found = [
                Stage(
                    spans=tuple((first, last) for _, first, last in visits),
                    hop=visits[0][0],
                    down_and_up_s=sum(spans.down_and_up_s(first, last) for _, first, last in visits)
                    / one.speed,
                    each_s=rows[a][b],
                    speed=one.speed,
                    share=one.share,
                )
                for visits, (a, b), (one, rows) in zip(own, pairwise((0, *ends)), of, strict=True)
            ]
            self._stages[kind] = tuple(found)
        return self._stages[kind]

    def _slow(self, kind: int) -> Slow:
        return self.sorts[sort_of(kind)] if sort_of(kind) >= 0 else _HEALTHY

    def _slow_rows(self, kind: int) -> list[list[float]]:
        """As ``_stage_s``, of the slow worker."""
        sort, slow = sort_of(kind), self._slow(kind)
        if sort >= 0 and sort not in self._slow_stage_s:
            self._slow_stage_s[sort] = self._stages_s(slow).tolist()
        return self._slow_stage_s.get(sort, self._stage_s)

    def slow_place(self, kind: int) -> int:
        """Which stage of a pipeline of this kind, which fits, has the slow worker; -1: there is none."""
        self.split(kind)
        return self._slow_at.get(kind, -1)

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

    def partitions(
        self, num_workers: int, num_microbatches: int, slow: Sequence[Slow] = ()
    ) -> tuple[Partition, ...]:
        """The best for each number of pipelines, of any lengths, fastest first. ``slow``: besides ``num_workers``."""
        key = num_workers, num_microbatches, self.sorts.numbers(sorted(slow, reverse=True))
        if key not in self._partitions:
            workers, microbatches, sorts = key
            self._partitions[key] = (
                partition.ranked_with_slow(self, workers, sorts, microbatches)
                if sorts
                else partition.ranked(self, workers, microbatches)
            )
        return self._partitions[key]

    def pipelines(self, num_workers: int, slow: tuple[int, ...], num_microbatches: int) -> Pipelines:
        """What is known of pipelines of these workers."""
        key = num_workers, slow, num_microbatches
        if key not in self._pipelines:
            known = self.pipelines(num_workers, (), num_microbatches) if slow else None
            self._pipelines[key] = Pipelines(self, *key, known)
        return self._pipelines[key]

    def solved(self, found: Partition, num_workers: int, num_microbatches: int) -> list[Solved]:
        """The orders of the pipelines of ``found``, as far as they are known, each once."""
        (own,) = (one for one in (self, *self.turned) if one.legs == found.legs)
        known = own.sharing(found.number).pipelines(num_workers, (), num_microbatches).solved
        return [order for one in dict.fromkeys(found.shares) if (order := known.get(one)) is not None]

    def shape_of(self, found: Partition, num_workers: int, num_microbatches: int) -> Shape:
        """``found`` with its stages. Raises PlanInfeasible."""
        if found.legs != self.legs:
            (turned,) = (one for one in self.turned if one.legs == found.legs)
            return turned.shape_of(found, num_workers, num_microbatches)
        if not found.shares:
            return self.shape(num_workers, num_microbatches, found.number)
        own = self.sharing(found.number)
        splits = [own.split(kind) or () for kind, _ in found.shares]
        starts = [0, *accumulate(map(len, splits))]
        slow = (
            (start + own.slow_place(kind), own._slow(kind))
            for start, (kind, _) in zip(starts, found.shares, strict=False)
            if sort_of(kind) >= 0
        )
        return Shape(
            ends=tuple(splits),
            slow=tuple(slow),
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
        paces = [(self._last_done(length, share, pipelines)[0], count) for length, _, count in rates]
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
        counts = [*Counter(stages_of(kind) for kind, _ in found.shares).items()] or self.even(
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

        Bounds as in :mod:`odyssey_megatron.plan.bound`: all the work of a stage and then the bucket that it sums last;
        the forwards and input gradients of a stage, and then all its sums, or the way up; and one microbatch's way down
        and up.
        """
        work, sums, drain, path_s = [], [], [], 0.0
        for length, _, count in rates:
            last, whole = self._last_done(length, microbatches / pipelines, pipelines)
            work.append((last, count))
            sums.append((whole, count))
            drain.append((self._drain(length), count))
            path_s = max(path_s, self.path_s(length))
        return max(*(finish_s(microbatches, each) for each in (work, sums, drain)), path_s)

    def _last_done(self, stages: int, share: float, pipelines: int) -> tuple[Rate, Rate]:
        """Of the stage that is done last if its pipeline gets ``share`` microbatches: all its work and its last bucket;
        its forwards and input gradients, of which the last one may run on beside, and all its sums.
        """
        last, whole = (-inf, 0.0, 0.0), (-inf, 0.0, 0.0)
        for one in self.stages(stages):
            head_s = self._spans.forward_s(0, one.first) + one.hop * self.costs.message_s()
            buckets = self._buckets(one, pipelines)
            sums_s = [reduce_s(self.costs, *bucket, pipelines, self.sums) for bucket in buckets]
            last = max(last, _line(head_s + sums_s[0], one.each_s, share))
            whole = max(
                whole, _line(head_s - one.beside_s(self.costs) + sum(sums_s), one.down_and_up_s, share)
            )
        return Rate(head_s=last[1], each_s=last[2]), Rate(head_s=whole[1], each_s=whole[2])

    def _buckets(self, one: Stage, holders: int) -> list[tuple[int, int]]:
        """What a stage sums, the last of them first."""
        return [bucket for a, b in one.spans for bucket in cut(a, b, holders, self.costs)]

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

    def split(self, kind: int) -> tuple[int, ...] | None:
        """Stage ends such that the slowest stage is as fast as possible, then the others as equal as possible.

        The slowest stage is one of all spans of layers, so their sorted times are bisected; whether a limit is
        enough is seen by filling stages greedily, which is exact because a longer span is never faster. Few
        stages at the limit leave the scheduler slack. None if nothing fits the memory.

        Memory only ever makes a stage slower, so that what is best without it, and as fast with it, is best.

        A slow worker is put where that allows for the fastest of all, and of these places as far back as can be: there
        the fewest microbatches are in flight.
        """
        if sort_of(kind) >= 0 and kind not in self._splits:
            self._splits[kind] = self._split_with_slow(kind)
        stages = kind
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

    def _split_with_slow(self, kind: int) -> tuple[int, ...] | None:
        stages, rows = stages_of(kind), self._slow_rows(kind)
        windows = [ways.window(stage, stages, self.last, self.legs) for stage in range(stages)]
        limits = sorted({*self._limits, *(s for row in rows for s in row if 0.0 < s < inf)})

        def place(limit: float) -> int:
            return place_within(self._stage_s, rows, windows, limit * SLACK)

        at = bisect_left(limits, True, key=lambda limit: place(limit) >= 0)
        if at == len(limits):
            return None
        self._slow_at[kind] = place(limits[at])
        return self._even(stages, limits[at] * SLACK, self._slow_at[kind], rows)

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

    def _even(
        self, stages: int, limit: float, place: int = -1, slow_s: list[list[float]] | None = None
    ) -> tuple[int, ...]:
        """Least sum of squares among the splits within ``limit``; later stages the longer ones.

        First stages keep the most microbatches in flight, so what is uneven should not burden them. ``slow_s``: as
        ``_stage_s``, of the worker in ``place``.
        """
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for stage in range(stages):
            low, high = ways.window(stage, stages, self.last, self.legs)
            reached: dict[int, tuple[float, tuple[int, ...]]] = {}
            for start, (squares, ends) in best.items():
                times = slow_s[start] if slow_s and stage == place else self._stage_s[start]
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
