"""The search for how many pipelines there are, how long each is, and how many microbatches it gets.

The pipelines of a replan share nothing but the reductions at the step's end, so each is scheduled on its own, once
for all partitions that it is part of. In a given time each length can do so many microbatches; whether pipelines that
do all of them fit into the workers is a knapsack, and the least such time is bisected. At first that goes by lower
bounds. Then the pipelines of the best partition are scheduled, the knapsack knows their true times, and so on until
all of what is best has been scheduled, or as much as may be. Of other numbers of microbatches through as many stages,
and of lengths nearby, what is not known is guessed by those that are: bounds alone are loose where memory binds.

Chameleon's Algorithm 1 (papers.md §1.4) enumerates integer partitions of the workers, remainders of the microbatches
and remainders of the layers, and simulates each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from odyssey_megatron.plan.layout import Hop, Route, layout_from_routes
from odyssey_megatron.plan.list_schedule import Shape as Group
from odyssey_megatron.plan.order import solve
from odyssey_megatron.plan.simulate import reduce_s, step_end_s
from odyssey_megatron.policy import ways

if TYPE_CHECKING:
    from odyssey_megatron.policy.search import Search

ALIKE = 0.001
"""A shape that could at best be this share better than another one is not worth scheduling."""

_SLACK = 1 + 1e-9
"""Sums of floats that are equal on paper must compare equal."""

_EXACT = 1e-5
"""Of a step, how far the bisection goes."""

_RUNTIME_S = 0.01
"""Of a step, about what the runtime itself takes (``tests/benchmarks/model_error.py``: below 8 ms). A worker that is
left idle takes part in nothing, so that less than this is not worth it; steps of microseconds would idle most."""

_VISITS = 8192
"""Of microbatches to stages, that one search schedules at most: a count and not a clock, so that the same arguments
give the same plan on every machine."""

_LOOK = 64
"""Visits that could be scheduled while the knapsack is solved once more."""

MANY_WORKERS = 128
"""From here on not every number of pipelines is looked at, and of those only the most promising in full."""

_PROMISING = 4
"""Numbers of pipelines, of many workers."""

WORTH = 0.99
"""Of the step of the best partition: above that routes that visit workers more than once are not worth it. They have
more messages and launches, and the runtime's share of these is not in the costs."""

_TRUST = (1.0, 0.5, 0.0)
"""How far what is learned of one length is believed of another. Where memory binds bounds are loose, so that nothing
would come to an end that went by them from the beginning."""

Shares = tuple[tuple[int, int], ...]
"""(stages, microbatches) of each pipeline, the longest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Pipelines without workers and cuts."""

    number: int
    estimate_s: float
    """Its step but for the optimizer's; a bound, where not all of it was scheduled."""
    shares: Shares = ()
    """Empty: not worked out, as it cannot be better than others."""
    legs: int = 1
    """How often routes go through the workers of a pipeline (:mod:`odyssey_megatron.policy.ways`)."""


def ranked(search: Search, workers: int, microbatches: int) -> tuple[Partition, ...]:
    """The best partition into each number of pipelines, fastest first.

    A single pipeline comes last: its next loss ends the job, so that it is only wanted if it is faster than all others,
    and others may be wanted if it is. Then those whose routes visit workers more than once, of which only the most
    promising numbers are looked at, and which must be better by ``WORTH``.
    """
    many = workers > MANY_WORKERS
    numbers = sorted(search.ranked(workers, microbatches), key=lambda one: (one[1] == 1, one))
    found = {number: Partition(number=number, estimate_s=estimate_s) for estimate_s, number in numbers}
    looked_at = numbers[:_PROMISING] if many else numbers
    least_s = _look(found, search, workers, microbatches, looked_at, _TRUST[:1] if many else _TRUST, inf)
    partitions = [*found.values()]
    for turned in search.turned:
        # Of one worker there is nothing to turn at, and those that have no part in any pipeline would idle.
        numbers = [
            (estimate_s, number)
            for estimate_s, number in turned.ranked(workers, microbatches)
            if estimate_s < least_s * WORTH and 1 < workers // number <= turned.most_stages
        ]
        better: dict[int, Partition] = {}
        limit_s = least_s * WORTH
        limit_s = _look(better, turned, workers, microbatches, numbers[:_PROMISING], _TRUST[:1], limit_s)
        if better:
            least_s = limit_s
        partitions += better.values()
    return tuple(sorted(partitions, key=lambda one: (one.estimate_s, not one.shares, one.legs, one.number)))


def _look(
    found: dict[int, Partition],
    search: Search,
    workers: int,
    microbatches: int,
    numbers: Sequence[tuple[float, int]],
    trusts: Sequence[float],
    least_s: float,
) -> float:
    """Works out the best partition into each of ``numbers``, (estimate, number of pipelines), and puts those into
    ``found`` that are better than ``least_s``, or that were not there; the least that is found then.
    """
    visits = _VISITS
    pipelines: dict[int, _Pipelines] = {}
    for trust in trusts:
        for estimate_s, number in numbers:
            sharing = search.sharing(number)
            own = pipelines.get(id(sharing)) or _Pipelines(sharing, workers, microbatches)
            pipelines[id(sharing)] = own
            own.count(number, visits, trust)
            one, whole = _best(own, [*search.even(workers, number)], estimate_s, least_s)
            visits = own.visits
            if whole:
                least_s = one.estimate_s
            if one.shares or (number in found and not found[number].shares):
                found[number] = one
    return least_s


def _best(
    own: _Pipelines, even: Sequence[tuple[int, int]], estimate_s: float, limit_s: float
) -> tuple[Partition, bool]:
    """The best partition, and whether all of it was scheduled; without shares if it is not better than ``limit_s``.

    ``even``: (stages, how many) if lengths differ by one at most, which is preferred to what is hardly better.
    """
    true: tuple[float, Shares] | None = None
    while True:
        below_s = min(limit_s, true[0] if true else inf) * (1 - ALIKE)
        best = own.least(lambda time_s: own.these(even, time_s), estimate_s, below_s)
        best = own.least(own.any, 0.0, best[0] * (1 - ALIKE) if best else below_s) or best
        if best is None or own.visits <= 0:
            break
        own.visits -= _LOOK
        times = (own.schedule(*one) for one in dict.fromkeys(best[1]))
        if all(time_s < below_s for time_s in times) and (joint_s := own.join(best[1])) < below_s:
            true = joint_s, best[1]
    if alike := own.alike(min(limit_s, true[0] if true else inf) * (1 - ALIKE) - _RUNTIME_S):
        true = alike
    found = true or (best if limit_s == inf else None)
    if found is None:
        return Partition(number=own.number, estimate_s=max(estimate_s, min(limit_s, 1e30))), False
    legs = own.search.legs
    return Partition(number=own.number, estimate_s=found[0], shares=found[1], legs=legs), true is not None


class _Pipelines:
    """What pipelines of each length can do: by bounds, and where they were scheduled, truly."""

    def __init__(self, search: Search, workers: int, microbatches: int) -> None:
        self.search, self.workers, self.microbatches = search, workers, microbatches
        self.number, self.visits, self._trust = 1, 0, 1.0
        self.lengths = [
            stages
            for stages in range(1, min(workers, search.most_stages) + 1)
            if search.split(stages) is not None
        ]
        self._bounds = _Bounds(search, self.lengths)
        self._done_s: dict[tuple[int, int], tuple[float, ...]] = {}
        """Of those that were scheduled: per stage, when it has computed."""
        self._alone_s: dict[tuple[int, int], float] = {}
        """The same with its own reductions, which begin at once."""
        self._true_s: dict[tuple[int, int], float] = {}
        """Beside others, as far as that is known: reductions wait for each other."""

    def count(self, number: int, visits: int, trust: float) -> None:
        """From here on for so many pipelines, and with so many visits left to schedule."""
        self.number, self.visits, self._trust = number, visits, trust
        self._bounds.reduce_among(number)
        self._alone_s = {one: self._with_reductions_s(one[0], done) for one, done in self._done_s.items()}
        self._true_s = dict(self._alone_s)
        self._learn()

    def time_s(self, stages: int, microbatches: int) -> float:
        """Until such a pipeline has computed and reduced."""
        true_s = self._true_s.get((stages, microbatches))
        return self._bounds.estimate_s(stages, microbatches) if true_s is None else true_s

    def most(self, time_s: float) -> dict[int, int]:
        """Stages -> microbatches that such a pipeline can do in ``time_s``; only where that is one at the least."""
        most = {}
        for stages, count in zip(self.lengths, self._bounds.most(time_s, self.microbatches), strict=True):
            while self._true_s.get((stages, count), 0.0) > time_s * _SLACK:
                count -= 1
            if count > 0:
                most[stages] = count
        return most

    def these(self, lengths: Sequence[tuple[int, int]], time_s: float) -> list[tuple[int, int]] | None:
        """(stages, microbatches) of pipelines, given as (stages, how many), if they do all in ``time_s``."""
        most = self.most(time_s)
        if sum(most.get(stages, -inf) * count for stages, count in lengths) < self.microbatches:
            return None
        return [(stages, most[stages]) for stages, count in lengths for _ in range(count)]

    def alike(self, below_s: float) -> tuple[float, Shares] | None:
        """Pipelines of one length, as long as there are workers, scheduled; None if they take ``below_s`` or more.

        What is left over idles, so that a cluster that has a few workers more is hardly ever slower. Such pipelines'
        reductions do not wait for each other, which :meth:`join` counts to a length, and so to these, too.
        """
        if self.workers > MANY_WORKERS or not self.lengths:  # of so many, a few idle ones make no difference
            return None
        stages = min(self.workers // self.number, self.lengths[-1])
        few, more = divmod(self.microbatches, self.number)
        shares = ((stages, few + 1),) * more + ((stages, few),) * (self.number - more)
        if stages not in self.lengths or not few or self._bounds.least_s(*shares[0]) >= below_s:
            return None
        for one in dict.fromkeys(shares):
            self.schedule(*one)
        time_s = max(self._alone_s[one] for one in shares)
        return (time_s, shares) if time_s < below_s else None

    def any(self, time_s: float) -> list[tuple[int, int]] | None:
        """(stages, microbatches) of any pipelines that do all in ``time_s``.

        The knapsack: ``done[n]`` is the most that so many pipelines do with n workers. Workers that could lengthen
        every pipeline do not idle: where steps are so short that estimates would leave out most of them, each loss
        would cost more than they save, as fewer workers hold each layer.
        """
        most = self.most(time_s)
        rate = max((count / stages for stages, count in most.items()), default=0.0)
        spare = self.workers * rate * _SLACK - self.microbatches
        # Each length does less than it could at the best rate; together they may waste so much, and no more.
        useful, last = list[tuple[int, int]](), 0
        for stages, count in most.items():
            if count > last and stages * rate - count <= spare:
                useful.append((stages, count))
                last = count
        if not useful or spare < 0:
            return None
        done = np.full(self.workers + 1, -(2**40), dtype=np.int64)
        done[0] = 0
        choices = []
        for _ in range(self.number):
            then, choice = np.full_like(done, -(2**40)), np.zeros_like(done)
            for stages, count in useful:
                more = done[:-stages] + count
                better = more > then[stages:]
                then[stages:][better] = more[better]
                choice[stages:][better] = stages
            done = then
            choices.append(choice)
        left = int(done.argmax())
        if done[left] < self.microbatches or self.workers - left >= self.number:
            return None
        found = []
        for choice in reversed(choices):
            found.append((int(choice[left]), most[int(choice[left])]))
            left -= found[-1][0]
        return found

    def least(
        self, done: Callable[[float], list[tuple[int, int]] | None], from_s: float, below_s: float
    ) -> tuple[float, Shares] | None:
        """(time, pipelines) of the least time for which ``done`` has some; None if there is none below ``below_s``."""
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
        while best is None or high_s - from_s > _EXACT * high_s:
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
        """What is too much is taken from those that are done last."""
        heap = [(-self.time_s(*one), *one) for one in most]
        heapify(heap)
        over = sum(count for _, count in most) - self.microbatches
        kept = []
        while over > 0 and heap:
            _, stages, count = heap[0]
            if count == 1:
                kept.append(heap[0])
                heap[0] = heap[-1]
                heap.pop()
                heapify(heap)
                continue
            over -= 1
            heapreplace(heap, (-self.time_s(stages, count - 1), stages, count - 1))
        heap += kept
        step_s = -min(heap)[0]
        return step_s, tuple(sorted(((stages, count) for _, stages, count in heap), reverse=True))

    def _learn(self) -> None:
        """How much later than its bound a length was, whatever it had to do; lengths between two known ones alike."""
        late_s: dict[int, float] = {}
        for (stages, microbatches), true_s in self._alone_s.items():
            if true_s < inf:
                one_s = true_s - self._bounds.least_s(stages, microbatches)
                late_s[stages] = min(one_s, late_s.get(stages, inf))
        if late_s:
            known, each_s = zip(*sorted(late_s.items()), strict=True)
            guess_s = self._trust * np.interp(self.lengths, known, each_s)
            guess_s[np.searchsorted(self.lengths, known)] = np.array(each_s) * (1 + self._trust) / 2
            self._bounds.late_s = guess_s

    def schedule(self, stages: int, microbatches: int) -> float:
        """The true time; infinite if it does not fit."""
        if (stages, microbatches) in self._true_s:
            return self._true_s[stages, microbatches]
        search, costs = self.search, self.search.costs
        hops = self._hops(stages)
        state, needs, usual = [], [], []
        for one in search.stages(stages):
            sent = sum((a > 0) + (b < search.last) for a, b in one.spans) if costs.keeps_messages else 0
            each = [costs.spans.activation_bytes(a, b) for a, b in one.spans]
            state.append(search.kept_bytes(one) + sent * microbatches * costs.message_bytes)
            needs.append(sum(each))
            usual.append(state[-1] + min(microbatches, len(hops) - one.hop) * each[0])
        # Where memory is not known, what 1F1B needs on its fullest worker.
        budget = max(usual) if search.budget is None else search.budget
        caps = tuple(budget - one for one in state)
        self.visits -= len(hops) * microbatches
        done_s: tuple[float, ...] = (inf,) * stages
        if all(cap >= need for cap, need in zip(caps, needs, strict=True)):
            group = Group(routes=((tuple(range(microbatches)), hops),), caps=caps, speeds=(1.0,) * stages)
            found = solve(group, costs, None, thorough=True)
            if found is not None:
                done_s = found.done_s
        self._done_s[stages, microbatches] = done_s
        alone_s = self._with_reductions_s(stages, done_s)
        self._alone_s[stages, microbatches] = self._true_s[stages, microbatches] = alone_s
        self._learn()
        return self._true_s[stages, microbatches]

    def join(self, shares: Shares) -> float:
        """The time of these, which are scheduled, together.

        What the reductions add is counted to the shortest pipelines from here on: they have the largest blocks.
        """
        alone_s = max(self.time_s(*one) for one in shares)
        if self.workers > MANY_WORKERS:
            return alone_s
        routes, done_s = [], dict[int, float]()
        for at, (stages, microbatches) in enumerate(shares):
            first = len(done_s)
            hops = (Hop(worker=first + place, first=a, last=b) for place, a, b in self._hops(stages))
            routes.append(Route(microbatches=(at,), hops=tuple(hops)))
            done_s.update(enumerate(self._done_s[stages, microbatches], first))
        costs = self.search.costs
        layout = layout_from_routes(self.search.last, tuple(routes), tied=costs.tied is not None)
        joint_s = max(alone_s, step_end_s(layout, costs, done_s) - costs.optimizer_s)
        self._true_s[shares[-1]] = max(joint_s, self._true_s[shares[-1]])
        return joint_s

    def _with_reductions_s(self, stages: int, done_s: Sequence[float]) -> float:
        return max(
            end_s + sum(reduce_s(self.search.costs, a, b, self.number) for a, b in one.spans)
            for end_s, one in zip(done_s, self.search.stages(stages), strict=True)
        )

    def _hops(self, stages: int) -> tuple[ways.Visit, ...]:
        return ways.visits(self.search.split(stages) or (), self.search.legs)


class _Bounds:
    """Lower bounds as in :mod:`odyssey_megatron.plan.bound`, of pipelines of all lengths at once.

    Each row is a line: ``head_s + microbatches * each_s``, and the reduction of ``size`` bytes after it. Of each stage
    there is one for all its work, which memory may stretch, and one for its forwards and input gradients, behind which
    the last gradient goes up to the first stage.
    """

    def __init__(self, search: Search, lengths: Sequence[int]) -> None:
        costs, spans = search.costs, search.costs.spans
        self._costs, self._at = costs, {stages: i for i, stages in enumerate(lengths)}
        head, each, size, path = list[float](), list[float](), list[int](), list[float]()
        starts, fewest = list[int](), list[int]()
        lag = costs.message_s()
        for stages in lengths:
            starts.append(len(head))
            first = search.stages(stages)[0].spans[0]
            most = 2**40
            for one in search.stages(stages):
                head += [spans.forward_s(0, one.first) + one.hop * lag, search.up_s(stages, one)]
                each += [one.each_s, one.down_and_up_s]
                size += [sum(spans.gradient_bytes(a, b) for a, b in one.spans), spans.gradient_bytes(*first)]
                if costs.keeps_messages and search.budget is not None:
                    sent = sum((a > 0) + (b < search.last) for a, b in one.spans) * costs.message_bytes
                    needs = sum(spans.activation_bytes(a, b) for a, b in one.spans)
                    room = search.budget - search.kept_bytes(one) - needs
                    most = min(most, room // sent if sent else most)
            fewest.append(most)
            path.append(search.path_s(stages))
        self._head, self._each = np.array(head), np.maximum(np.array(each), 1e-15)
        self._size, self._starts = np.array(size, dtype=float), np.array(starts, dtype=int)
        self._fit, self._path = np.array(fewest, dtype=float), np.array(path)
        self._around = self._head
        self._rows = np.diff(np.append(self._starts, len(head)))
        self.late_s = np.zeros(len(lengths))
        """Of each length: what comes on top of the bound, as far as that is known."""
        self.scale_s = spans.compute_s(0, search.last)
        """Of one microbatch."""

    def reduce_among(self, number: int) -> None:
        """With reductions among so many pipelines: :func:`odyssey_megatron.plan.simulate.reduce_s`."""
        hops = 2 * (number - 1)
        bytes_s = hops / number * self._size / self._costs.link_bytes_per_s
        self._around = self._head + bytes_s + hops * self._costs.link_latency_s

    def most(self, time_s: float, most: int) -> list[int]:
        """Microbatches that a pipeline of each length can do in ``time_s``, up to ``most``."""
        within_s = time_s * _SLACK - self.late_s
        rows: NDArray[np.float64] = (np.repeat(within_s, self._rows) - self._around) / self._each
        counts = np.minimum(np.minimum.reduceat(rows, self._starts), np.minimum(self._fit, most))
        counts[self._path > within_s] = 0
        return [int(one) for one in np.maximum(counts, 0).astype(np.int64)]

    def estimate_s(self, stages: int, microbatches: int) -> float:
        return self.least_s(stages, microbatches) + float(self.late_s[self._at[stages]])

    def least_s(self, stages: int, microbatches: int) -> float:
        at = self._at[stages]
        if microbatches > self._fit[at]:
            return inf
        rows = slice(self._starts[at], self._starts[at + 1] if at + 1 < len(self._starts) else None)
        lines = self._around[rows] + microbatches * self._each[rows]
        return max(float(lines.max()), float(self._path[at]))
