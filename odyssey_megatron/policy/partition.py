"""The search for how many pipelines there are, how long each is, and how many microbatches it gets.

The pipelines of a replan share nothing but the reductions at the step's end, so each is scheduled on its own, once
for all partitions that it is part of. In a given time each length can do so many microbatches; whether pipelines that
do all of them fit into the workers is a knapsack, and the least such time is bisected. At first that goes by lower
bounds. Then the pipelines of the best partition are scheduled, the knapsack knows their true times, and so on until
all of what is best has been scheduled, or as much as may be. Of other numbers of microbatches through as many stages,
and of lengths nearby, what is not known is guessed by those that are: bounds alone are loose where memory binds.

Chameleon's Algorithm 1 (arXiv 2508.21613) enumerates integer partitions of the workers, remainders of the microbatches
and remainders of the layers, and simulates each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from odyssey_megatron.plan.simulate import reduce_s
from odyssey_megatron.policy.balanced import even
from odyssey_megatron.policy.pipelines import ALIKE, MANY_WORKERS, WORTH, WORTH_TWICE, Pipelines, Shares
from odyssey_megatron.policy.shares import SLACK
from odyssey_megatron.policy.splits import Splits

if TYPE_CHECKING:
    from odyssey_megatron.policy.search import Search

_RUNTIME_S = 0.01
"""Of a step, about what the runtime itself takes (``tests/benchmarks/model_error.py``). A worker that is
left idle takes part in nothing, so that less than this is not worth it; steps of microseconds would idle most."""

_VISITS = 8192
"""Of microbatches to stages, that one search schedules at most: a count and not a clock, so that the same arguments
give the same plan on every machine."""

_VISITS_OF_MANY = 1024
"""The same of many workers, as long as somebody waits: then no knapsack is solved either."""

_LOOK = 64
"""Visits that could be scheduled while the knapsack is solved once more."""

_PROMISING = 4
"""Numbers of pipelines, of many workers; twice as many of few, where routes visit workers more than once."""

_BEHIND = 1.2
"""Estimates are of lengths that differ by one at most: up to here others may be better, where there are few workers."""

_TRUST = (1.0, 0.5, 0.0)
"""How far what is learned of one length is believed of another. Where memory binds bounds are loose, so that nothing
would come to an end that went by them from the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Pipelines without workers and cuts."""

    number: int
    estimate_s: float
    """Its step but for the optimizer's; a bound, where not all of it was scheduled."""
    least_s: float
    """No schedule of its pipelines is shorter, whatever memory those have that compute, and however sums are cut."""
    shares: Shares = ()
    """Empty: not worked out, as it cannot be better than others."""
    legs: int = 1
    """How often routes go through the workers of a pipeline (:mod:`odyssey_megatron.policy.ways`)."""


def ranked(
    search: Search, workers: int, microbatches: int, *, thorough: bool = False
) -> tuple[Partition, ...]:
    """The best partition into each number of pipelines, fastest first.

    A single pipeline comes last: its next loss ends the job, so that it is only wanted if it is faster than all others,
    and others may be wanted if it is. Then those whose routes visit workers more than once, of which only the most
    promising numbers are looked at, and which must be better by ``WORTH``, and by ``WORTH_TWICE`` the next ones.
    """
    look = _Look(search, workers, (), microbatches, thorough)
    numbers = sorted(search.ranked(workers, microbatches), key=lambda one: (one[1] == 1, one))
    found = {
        number: Partition(
            number=number, estimate_s=estimate_s, least_s=_without_sums_s(search.splits, estimate_s, number)
        )
        for estimate_s, number in numbers
    }
    partitions = look.over(found, numbers, inf)
    return tuple(sorted(partitions, key=lambda one: (one.estimate_s, not one.shares, one.legs, one.number)))


def _without_sums_s(splits: Splits, estimate_s: float, pipelines: int) -> float:
    """What is left of it at the least."""
    return max(0.0, estimate_s - reduce_s(splits.costs, 0, splits.last, pipelines))


def ranked_with_slow(
    search: Search, workers: int, slow: tuple[int, ...], microbatches: int
) -> tuple[Partition, ...]:
    """The same with slow workers of these sorts besides: each is one of the workers of a pipeline that is cut for it
    and has its share of microbatches, where that is better than to leave it out.
    """
    without = search.partitions(workers, microbatches)
    look = _Look(search, workers, slow, microbatches)
    # Where memory binds it may take the slow ones, too.
    numbers = search.ranked(workers, microbatches) or search.ranked(workers + len(slow), microbatches)
    if workers <= MANY_WORKERS:  # a slow one by itself is a pipeline, too, where that may be of one stage
        with_them = search.ranked(workers + len(slow), microbatches)
        numbers += tuple(one for one in with_them if one[1] > workers and one not in numbers)
    numbers = tuple(sorted(numbers, key=lambda one: (one[1] == 1, one)))
    least_s = min((one.estimate_s for one in without if one.shares and one.legs == 1), default=inf)
    better = [one for one in look.over({}, numbers, least_s, without) if one.shares]
    return tuple(
        sorted((*better, *without), key=lambda one: (one.estimate_s, not one.shares, one.legs, one.number))
    )


class _Look:
    """Over the numbers of pipelines that there may be."""

    def __init__(
        self,
        search: Search,
        workers: int,
        slow: tuple[int, ...],
        microbatches: int,
        thorough: bool = False,
    ) -> None:
        self.thorough = thorough
        self.visits = _VISITS if thorough else _VISITS_OF_MANY
        """That may still be scheduled, of many workers."""
        self.search, self.workers, self.slow, self.microbatches = search, workers, slow, microbatches
        self._trusts = _TRUST if workers <= MANY_WORKERS else _TRUST[:1]

    def over(
        self,
        found: dict[int, Partition],
        numbers: Sequence[tuple[float, int]],
        least_s: float,
        known: Sequence[Partition] = (),
    ) -> list[Partition]:
        """``found`` with what is better than ``least_s``, and better ways through the workers; ``known``: partitions
        that have to be beaten.
        """
        least_s = self._at(found, self.search, numbers, self._trusts, least_s)
        partitions = [*found.values()]
        behind = 1.0 if self.workers > MANY_WORKERS else _BEHIND
        worth = WORTH
        for turned in self.search.turned:
            of_these = (one.estimate_s for one in known if one.shares and one.legs == turned.splits.legs)
            limit_s = min([least_s * worth, *of_these])
            # Of one worker there is nothing to turn at, and those that have no part in any pipeline would idle.
            numbers = [
                (estimate_s, number)
                for estimate_s, number in turned.ranked(self.workers, self.microbatches)
                if (estimate_s < limit_s * behind or self.slow)
                and 1 < self.workers // number <= turned.splits.most_stages
            ]
            better: dict[int, Partition] = {}
            limit_s = self._at(better, turned, numbers[: 2 * _PROMISING], self._trusts, limit_s)
            if better:
                least_s, worth = limit_s, WORTH_TWICE
            partitions += better.values()
        return partitions

    def _at(
        self,
        found: dict[int, Partition],
        search: Search,
        numbers: Sequence[tuple[float, int]],
        trusts: Sequence[float],
        least_s: float,
    ) -> float:
        """Works out the best partition into each of ``numbers``, (estimate, number of pipelines), and puts those into
        ``found`` that are better than ``least_s``, or that were not there; the least that is found then.
        """
        if self.workers > MANY_WORKERS:
            return self._promising(found, search, numbers, least_s)
        visits = _VISITS
        for trust in trusts:
            for estimate_s, number in numbers:
                own = search.sharing(number).pipelines(self.workers, self.slow, self.microbatches)
                own.count(number, visits, trust)
                one, whole = _best(own, self._even(search, number), estimate_s, least_s)
                visits = own.visits
                if whole:
                    least_s = one.estimate_s
                if one.shares or (number in found and not found[number].shares):
                    found[number] = one
        return least_s

    def _promising(
        self,
        found: dict[int, Partition],
        search: Search,
        numbers: Sequence[tuple[float, int]],
        least_s: float,
    ) -> float:
        """As :meth:`_at`, of the few numbers that are best by all that is known when they are looked at: what others
        of about their lengths have taken, and what waits for weights where optimizer state is cut.
        """
        queue = [(estimate_s, number) for estimate_s, number in numbers]
        estimates_s = {number: estimate_s for estimate_s, number in numbers}
        heapify(queue)
        if self.thorough:
            self.visits = _VISITS
        while queue and self.visits > 0 and queue[0][0] < least_s * (1 - ALIKE):
            expected_s, number = heappop(queue)
            lengths, estimate_s = self._even(search, number), estimates_s[number]
            own = search.sharing(number).pipelines(self.workers, self.slow, self.microbatches)
            waits_s = search.weights_late_s(number, self.workers)
            now_s = estimate_s + waits_s + own.late_s(length for length, _ in lengths)
            if now_s > expected_s * SLACK:
                heappush(queue, (now_s, number))
                if number in found:
                    found[number] = replace(found[number], estimate_s=now_s - waits_s)
                continue
            own.count(number, self.visits - _LOOK, _TRUST[0])
            one, whole = _best(own, lengths, estimate_s, least_s - waits_s, ragged=self.thorough)
            self.visits = own.visits
            if whole:
                least_s = min(
                    least_s, one.estimate_s + search.weights_late_s(number, self.workers, one.shares)
                )
            if one.shares or (number in found and not found[number].shares):
                found[number] = one
        return least_s

    def _even(self, search: Search, number: int) -> list[tuple[int, int]]:
        return even(self.workers, number, search.splits.most_stages)


def _best(
    own: Pipelines,
    lengths: Sequence[tuple[int, int]],
    estimate_s: float,
    limit_s: float,
    *,
    ragged: bool = True,
) -> tuple[Partition, bool]:
    """The best partition, and whether all of it was scheduled; without shares if it is not better than ``limit_s``.

    ``lengths``: (stages, how many) if lengths differ by one at most, which is preferred to what is hardly better.
    ``ragged``: others are looked at.
    """
    true: tuple[float, Shares] | None = None
    while True:
        below_s = min(limit_s, true[0] if true else inf) * (1 - ALIKE)
        best = own.least(lambda time_s: own.these(lengths, time_s), estimate_s, below_s)
        if ragged:
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
        no_better_s = max(estimate_s, min(limit_s, 1e30))
        least_s = _without_sums_s(own.splits, estimate_s, own.number)
        return Partition(number=own.number, estimate_s=no_better_s, least_s=least_s), False
    best_s, shares = found
    one = Partition(
        number=own.number,
        estimate_s=best_s,
        least_s=max(own.least_s(*each) for each in dict.fromkeys(shares)),
        shares=shares,
        legs=own.splits.legs,
    )
    return one, true is not None
