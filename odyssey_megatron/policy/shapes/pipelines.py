"""Pipelines of each kind beside each other: how much they do in a given time, by bounds or as they were scheduled.

In a given time a pipeline of each kind can do a certain number of microbatches. Whether pipelines that do all of them
fit into the workers is a knapsack, and the least such time is bisected.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import accumulate, chain, compress
from math import ceil, inf

from odyssey_megatron.cluster.state import WHOLE_CELL
from odyssey_megatron.plan.checking.simulate import reduce_hops, step_end_s
from odyssey_megatron.plan.layout import Hop, Layout, Route, layout_from_routes
from odyssey_megatron.plan.scheduling.gathers import least_late_s, weights_late_s
from odyssey_megatron.plan.scheduling.list_schedule import Solved
from odyssey_megatron.plan.scheduling.order import solve, usable_bytes
from odyssey_megatron.plan.scheduling.reductions import NO_TAIL, Tail, bucket_bytes, buckets, cut
from odyssey_megatron.plan.scheduling.tasks import Shape as Group
from odyssey_megatron.policy.shapes import ways
from odyssey_megatron.policy.shapes.bounds import Bounds, Rows
from odyssey_megatron.policy.shapes.kinds import healthy_of, mixed
from odyssey_megatron.policy.shapes.knapsack import packed
from odyssey_megatron.policy.shapes.shares import SLACK
from odyssey_megatron.policy.shapes.splits import Splits
from odyssey_megatron.policy.shapes.turns import TURNS

ALIKE = 0.001
"""A shape that could at best be better than another one by this share is not worth scheduling."""

WORTH = 0.99
"""Fraction of the best partition's step that routes which visit workers more than once must stay below to be worth it.
They have more messages and launches, and the runtime's share of these is not in the costs.
"""

WORTH_TWICE = 0.995
"""The same for routes that visit workers twice as often, compared with those."""

_EXACT = 1e-5
"""Fraction of a step to which the bisection goes."""

MANY_WORKERS = 128
"""Above this number of workers not every number of pipelines is looked at, and of those only the most promising in
full.
"""

_NEAR = 1
"""With many workers there are pipelines of many lengths, of which few are scheduled. What is known of one is believed
of lengths that differ by up to this number of stages.
"""

Done = tuple[float, Tail]
"""When a worker has computed, and the weight gradients that it ends with, beside which it sums."""

End = tuple[float, "array[float]"]
"""When a worker has computed all but the weight gradients that it ends with, and three numbers for each of its buckets,
in the order in which it sums them: the time of the weight gradients in it, how much of the worker's last input gradient
is still running beside it, and its bytes.
"""

Shares = tuple[tuple[int, int], ...]
"""(kind, microbatches) of each pipeline (:mod:`odyssey_megatron.policy.shapes.kinds`), those with a slow worker first,
and the longest first.
"""


class Pipelines:
    """What pipelines of each kind can do: by bounds, and truly for those that were scheduled."""

    def __init__(
        self,
        splits: Splits,
        workers: int,
        slow: tuple[int, ...],
        microbatches: int,
        known: Pipelines | None = None,
        rows: dict[int, Rows] | None = None,
        sums: int = 0,
    ) -> None:
        """
        Args:
            known: the same without slow workers, with what has been scheduled of it.
            rows: see ``Bounds``.
            sums: number of copies of optimizer state to whose owners gradients go; 0: every holder.
        """
        self._sums, self._rows = sums, {} if rows is None else rows
        self.splits, self.workers, self.slow, self.microbatches = splits, workers, slow, microbatches
        self.number, self.visits, self._trust = 1, 0, 1.0
        self.lengths: list[int] = []
        """Numbers of stages of pipelines without a slow worker, up to the longest that has been needed."""
        self._longest = 0
        self._done: dict[tuple[int, int], tuple[Done, ...]] = dict(known._done) if known else {}
        """For each that was scheduled, by stage: when it has computed, and the weight gradients that it ends with."""
        self.solved: dict[tuple[int, int], Solved | None] = dict(known.solved) if known else {}
        """The orders of those that were scheduled."""
        self._known_ends: dict[tuple[int, int, int], Sequence[End]] = {}
        self._alone_s: dict[tuple[int, int], float] = {}
        """Time until a scheduled pipeline has computed and reduced, if its reductions wait for no other pipeline's."""
        self._true_s: dict[tuple[int, int], float] = {}
        """The same beside other pipelines, as far as known: reductions wait for each other."""
        self._look_up_to(known._longest if known else 1)

    def reach(self, number: int) -> None:
        """Look at all lengths that pipelines can have beside ``number`` - 1 others."""
        if (longest := self._longest_of(number)) > self._longest:
            self._look_up_to(longest)

    def _longest_of(self, number: int) -> int:
        """Return the most healthy workers that a pipeline can have beside ``number`` - 1 others, which need some, too.

        Where memory binds, these lengths are few of all, and the long ones take most of the time.
        """
        healthy = max(0, number - 1 - len(self.slow))
        return max(self.workers - healthy * self._shortest, ceil(self.workers / number))

    @cached_property
    def _shortest(self) -> int:
        """The least number of stages of a pipeline without a slow worker that fits; 0: none does."""
        lengths = range(1, min(self.workers, self.splits.most_stages) + 1)
        return next((one for one in lengths if self.splits.split(one) is not None), 0)

    def _look_up_to(self, longest: int) -> None:
        """Look at all lengths up to ``longest``, and a slow worker more."""
        splits, self._longest = self.splits, longest
        stages = range(1, min(self.workers, splits.most_stages, longest) + 1)
        self.lengths = [one for one in stages if splits.split(one) is not None]
        stages = range(1, min(self.workers + 1, splits.most_stages, longest + 1) + 1)
        slower = (mixed(one, sort) for sort in sorted({*self.slow}) for one in stages)
        self.kinds = [*self.lengths, *(kind for kind in slower if splits.split(kind) is not None)]
        self._bounds = Bounds(splits, self.kinds, self._rows)
        if self._alone_s:
            self._bounds.reduce_among(self.number, self._sums)
            self._learn()

    def count(self, number: int, visits: int, trust: float) -> None:
        """Go on for ``number`` pipelines, with ``visits`` left to schedule, and ``trust`` as in ``Bounds.learn``."""
        self.reach(number)
        self.number, self.visits, self._trust = number, visits, trust
        self._bounds.reduce_among(number, self._sums)
        self._alone_s = {one: self._with_reductions_s(*one) for one in self._done}
        self._true_s = dict(self._alone_s)
        self._learn()

    def time_s(self, kind: int, microbatches: int) -> float:
        """Return the time until such a pipeline has computed and reduced."""
        true_s = self._true_s.get((kind, microbatches))
        return self._bounds.estimate_s(kind, microbatches) if true_s is None else true_s

    def least_s(self, kind: int, microbatches: int) -> float:
        """Return a lower bound of the time until it has computed."""
        return self._bounds.least_s(kind, microbatches, sums=False)

    def late_s(self, lengths: Iterable[int]) -> float:
        """Return by how much pipelines of all these lengths are later than their bounds, as far as known."""
        return min(self._bounds.late_of(length) for length in lengths)

    def most(self, time_s: float) -> dict[int, int]:
        """Return kind -> number of microbatches that such a pipeline can do in ``time_s``, for those that can do at
        least one.
        """
        most = {}
        for kind, count in zip(self.kinds, self._bounds.most(time_s, self.microbatches), strict=True):
            while self._true_s.get((kind, count), 0.0) > time_s * SLACK:
                count -= 1
            if count > 0:
                most[kind] = count
        return most

    def these(self, lengths: Sequence[tuple[int, int]], time_s: float) -> list[tuple[int, int]] | None:
        """Return (stages, microbatches) of the pipelines in ``lengths`` if they do all microbatches in ``time_s``, else
        None.

        ``lengths``: (stages, number of pipelines).
        """
        most = self.most(time_s)
        if sum(most.get(stages, -inf) * count for stages, count in lengths) < self.microbatches:
            return None
        return [(stages, most[stages]) for stages, count in lengths for _ in range(count)]

    def alike(self, below_s: float) -> tuple[float, Shares] | None:
        """Schedule pipelines of one length, the longest for which there are workers; None if they take ``below_s`` or
        more.

        Workers that are left over idle, so that a cluster with a few workers more is hardly ever slower. The reductions
        of such pipelines do not wait for each other, so each counts as if it were alone: :meth:`join` charges the waits
        of others to a length, which may be theirs.
        """
        if self.workers > MANY_WORKERS or not self.lengths:  # of so many, a few idle ones do not matter
            return None
        stages = min(self.workers // self.number, self.lengths[-1])
        few, more = divmod(self.microbatches, self.number)
        shares = ((stages, few + 1),) * more + ((stages, few),) * (self.number - more)
        if stages not in self.lengths or not few or self._bounds.least_s(*shares[0]) >= below_s:
            return None
        for one in dict.fromkeys(shares):
            self.schedule(*one)
        time_s = max(self._alone_s[one] for one in shares)
        if time_s < below_s:
            time_s += self._waits_s(shares)
        return (time_s, shares) if time_s < below_s else None

    def any(self, time_s: float) -> list[tuple[int, int]] | None:
        """Return (kind, microbatches) of any pipelines that do all in ``time_s``, or None: a knapsack."""
        longest = self._longest_of(
            self.number
        )  # others would count in the best rate, as if there were such pipelines
        most = {kind: count for kind, count in self.most(time_s).items() if healthy_of(kind) <= longest}
        found = packed(most, self.number, self.workers, self.slow, self.microbatches)
        return None if found is None else [(kind, most[kind]) for kind in found]

    def least(
        self, done: Callable[[float], list[tuple[int, int]] | None], from_s: float, below_s: float
    ) -> tuple[float, Shares] | None:
        """Return (time, pipelines) for the least time for which ``done`` finds pipelines; None if that is not below
        ``below_s``.

        Raises Preempted.
        """
        TURNS.check()
        if from_s >= below_s:
            return None
        high_s = below_s
        if high_s == inf:
            high_s = max(from_s, self._bounds.scale_s) * (1 + ALIKE)
            while done(high_s) is None:
                high_s *= 2
                if high_s > 1e6 * self._bounds.scale_s * self.microbatches:
                    return None
        best = None
        exact = _EXACT if self.workers <= MANY_WORKERS else ALIKE / 4
        while best is None or high_s - from_s > exact * high_s:
            at_s = high_s if best is None else (from_s + high_s) / 2
            found = done(at_s)
            if found is None and best is None:
                return None
            if found is None:
                from_s = at_s
                continue
            one = self._shared_out(found)
            if best is None or one[0] < best[0]:
                best = one
            high_s = min(at_s, best[0])
        return best if best[0] < below_s else None

    def _shared_out(self, most: list[tuple[int, int]]) -> tuple[float, Shares]:
        """Take the microbatches that are too many from the pipelines that are done last."""
        heap = [(-self.time_s(*one), *one) for one in most]
        heapify(heap)
        over = sum(count for _, count in most) - self.microbatches
        kept = []
        while over > 0 and heap:
            _, kind, count = heap[0]
            if count == 1:
                kept.append(heap[0])
                heap[0] = heap[-1]
                heap.pop()
                heapify(heap)
                continue
            over -= 1
            heapreplace(heap, (-self.time_s(kind, count - 1), kind, count - 1))
        heap += kept
        step_s = -min(heap)[0]
        return step_s, tuple(sorted(((kind, count) for _, kind, count in heap), reverse=True))

    def _learn(self) -> None:
        """Learn by how much each kind was later than its bound, whatever its number of microbatches."""
        late_s: dict[int, float] = {}
        for (kind, microbatches), true_s in self._alone_s.items():
            if true_s < inf:
                one_s = true_s - self._bounds.least_s(kind, microbatches)
                late_s[kind] = min(one_s, late_s.get(kind, inf))
        if late_s:
            self._bounds.learn(late_s, self._trust, inf if self.workers <= MANY_WORKERS else _NEAR)

    def schedule(self, kind: int, microbatches: int) -> float:
        """Return the true time; infinite if it does not fit. Raises Preempted."""
        if (kind, microbatches) in self._true_s:
            return self._true_s[kind, microbatches]
        TURNS.check()
        splits, costs = self.splits, self.splits.costs
        hops = self._hops(kind)
        state, needs, usual = [], [], []
        for one in splits.stages(kind):
            sent = sum((a > 0) + (b < splits.last) for a, b in one.spans) if costs.keeps_messages else 0
            each = [costs.spans.activation_bytes(a, b) for a, b in one.spans]
            grown = max(costs.spans.grown_bytes(a, b) for a, b in one.spans)
            state.append(splits.kept_bytes(one) + sent * microbatches * costs.message_bytes)
            needs.append(sum(each) + grown)
            usual.append(state[-1] + min(microbatches, len(hops) - one.hop) * each[0] + grown)
        # If memory is not known, take what 1F1B needs on its fullest worker.
        alike = [one.share == WHOLE_CELL for one in splits.stages(kind)]
        budget = max(compress(usual, alike), default=0) if splits.budget is None else splits.budget
        rooms = [int(budget * one.share.ranks) for one in splits.stages(kind)]
        if splits.budget is None:
            rooms = [budget if whole else own for whole, own in zip(alike, usual, strict=True)]
        caps = tuple(room - one for room, one in zip(rooms, state, strict=True))
        self.visits -= len(hops) * microbatches
        done: tuple[Done, ...] = ((inf, NO_TAIL),) * len(caps)
        if all(cap >= need for cap, need in zip(caps, needs, strict=True)):
            speeds = tuple(one.speed for one in splits.stages(kind))
            caps = tuple(
                usable_bytes(cap, one.spans, costs)
                for cap, one in zip(caps, splits.stages(kind), strict=True)
            )
            group = Group(routes=((tuple(range(microbatches)), hops),), caps=caps, speeds=speeds)
            found = self.solved[kind, microbatches] = solve(group, costs, None, thorough=True)
            if found is not None:
                done = tuple(zip(found.done_s, found.tails(), strict=True))
        self._done[kind, microbatches] = done
        alone_s = self._with_reductions_s(kind, microbatches)
        self._alone_s[kind, microbatches] = self._true_s[kind, microbatches] = alone_s
        self._learn()
        return self._true_s[kind, microbatches]

    def join(self, shares: Shares) -> float:
        """Return the time of these scheduled pipelines beside each other.

        It includes how long their first forwards wait for weights, less the least that any must wait. What reductions
        add is charged to the shortest pipelines from here on, as they have the largest blocks.
        """
        alone_s = max(self.time_s(*one) for one in shares)
        if self.workers > MANY_WORKERS:
            return alone_s
        layout, done_s, tails = self._beside_each_other(shares)
        costs = self.splits.costs
        joint_s = step_end_s(layout, costs, done_s, tails) - self._least_late_s
        self._true_s[shares[-1]] = max(joint_s, self._true_s[shares[-1]])
        return joint_s

    @property
    def _least_late_s(self) -> float:
        return least_late_s(self.splits.costs, self.number, self._sums)

    def _waits_s(self, shares: Shares) -> float:
        """Return by how much first forwards wait longer for weights than the least that any must wait."""
        if not self._least_late_s:
            return 0.0
        layout, costs = self._beside_each_other(shares)[0], self.splits.costs
        return weights_late_s(layout, buckets(layout, costs), costs) - self._least_late_s

    def _beside_each_other(self, shares: Shares) -> tuple[Layout, dict[int, float], dict[int, Tail]]:
        """Return the layout of these scheduled pipelines, and for each worker when it has computed, and its tail."""
        routes, done_s, tails = [], dict[int, float](), dict[int, Tail]()
        for at, (kind, microbatches) in enumerate(shares):
            first = len(done_s)
            hops = (Hop(worker=first + place, first=a, last=b) for place, a, b in self._hops(kind))
            routes.append(Route(microbatches=(at,), hops=tuple(hops)))
            done = self._done[kind, microbatches]
            done_s |= {first + place: end_s for place, (end_s, _) in enumerate(done)}
            tails |= {first + place: tail for place, (_, tail) in enumerate(done)}
        layout = layout_from_routes(self.splits.last, tuple(routes), tied=self.splits.costs.tied is not None)
        if 0 < self._sums < self.number:
            layout = replace(layout, copies=self._sums)
        return layout, done_s, tails

    def _with_reductions_s(self, kind: int, microbatches: int) -> float:
        """Return the time until its workers have computed and summed, each as soon as it can."""
        costs, longest_s = self.splits.costs, 0.0
        hops = reduce_hops(self.number, self._sums)
        lag_s, byte_s = hops * costs.link_latency_s, hops / self.number / costs.link_bytes_per_s
        for now_s, sums in self._ends(kind, microbatches):
            free_s = 0.0
            numbers = iter(sums)
            for within_s, left_s, size in zip(numbers, numbers, numbers, strict=True):
                now_s += within_s
                come_s = now_s - left_s
                free_s = (come_s if come_s > free_s else free_s) + lag_s + size * byte_s
            longest_s = max(longest_s, free_s)
        return longest_s

    def _ends(self, kind: int, microbatches: int) -> Sequence[End]:
        """Return the end of each worker of a scheduled pipeline."""
        key = kind, microbatches, bucket_bytes(self.splits.costs, self.number)
        if key not in self._known_ends:
            costs, found = self.splits.costs, list[End]()
            for (end_s, tail), one in zip(
                self._done[kind, microbatches], self.splits.stages(kind), strict=True
            ):
                own = [bucket for a, b in one.spans for bucket in cut(a, b, self.number, costs)]
                within = [tail.within_s(costs, *bucket) for bucket in reversed(own)]
                left = accumulate((tail.left_s(costs, first) for first, _ in reversed(own)), min)
                sizes = (costs.spans.gradient_bytes(*bucket) for bucket in reversed(own))
                found.append((end_s - sum(within), array("d", chain(*zip(within, left, sizes, strict=True)))))
            self._known_ends[key] = found
        return self._known_ends[key]

    def _hops(self, kind: int) -> tuple[ways.Visit, ...]:
        return ways.visits(self.splits.split(kind) or (), self.splits.way)
