"""The search for the number of pipelines, their lengths, and the number of microbatches for each.

The pipelines of a replan share nothing but the reductions at the step's end, so each is scheduled on its own, once for
all partitions that contain it. In a given time a pipeline of each length can do a certain number of microbatches.
Whether pipelines that do all of them fit into the workers is a knapsack, and the least such time is bisected. At first
lower bounds say how much each length can do. Then the pipelines of the best partition are scheduled, the knapsack is
solved with their true times, and so on, until all of the best partition has been scheduled, or as much as is allowed.
Other numbers of microbatches through as many stages, and lengths nearby, are guessed from what is known: bounds alone
are loose where memory binds.

Chameleon's Algorithm 1 (arXiv 2508.21613) enumerates integer partitions of the workers, remainders of the microbatches
and remainders of the layers, and simulates each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from odyssey_megatron.plan.checking.simulate import reduce_s
from odyssey_megatron.policy.shapes.balanced import even
from odyssey_megatron.policy.shapes.pipelines import (
    ALIKE,
    MANY_WORKERS,
    WORTH,
    WORTH_TWICE,
    Pipelines,
    Shares,
)
from odyssey_megatron.policy.shapes.shares import SLACK
from odyssey_megatron.policy.shapes.splits import Splits
from odyssey_megatron.policy.shapes.ways import ONCE, Way

if TYPE_CHECKING:
    from odyssey_megatron.policy.shapes.search import Search

_RUNTIME_S = 0.01
"""Seconds of a step that the runtime itself takes, about (``tests/benchmarks/model_error.py``). Leaving workers idle
must save more than this: with steps of microseconds most workers would idle otherwise.
"""

_VISITS = 8192
"""The most visits of microbatches to stages that one search schedules. It is a count and not a time, so that the same
arguments give the same plan on every machine.
"""

_VISITS_OF_MANY = 1024
"""The same for many workers while somebody waits; no knapsack is solved then either."""

_LOOK = 64
"""Number of visits that could be scheduled while the knapsack is solved once more."""

_PROMISING = 8
"""Where routes visit workers more than once, this many numbers of pipelines are looked at, the most promising ones."""

_BEHIND = 1.2
"""Estimates are of lengths that differ by at most one. With few workers, numbers of pipelines are looked at up to this
multiple of the limit, since other lengths may be better.
"""

_TRUST = (1.0, 0.5, 0.0)
"""In each round, how far what is learned of one length is believed of another. Where memory binds, bounds are loose: a
search that relied on them alone from the beginning would not come to an end.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Numbers of stages and microbatches of pipelines, without workers and cuts."""

    number: int
    estimate_s: float
    """Its step without the optimizer; a bound, if not all of it was scheduled."""
    least_s: float
    """A lower bound for any schedule of its pipelines, whatever memory their workers have, however sums are cut."""
    shares: Shares = ()
    """Empty if they were not worked out, as the partition cannot be better than others."""
    way: Way = ONCE
    """How routes go through the workers of a pipeline."""


def ranked(
    search: Search, workers: int, microbatches: int, *, thorough: bool = False
) -> tuple[Partition, ...]:
    """Return the best partition into each number of pipelines, fastest first.

    A single pipeline is worked out last: its next loss ends the job, so that it is only wanted if it is faster than all
    others. Then follow partitions whose routes visit workers more than once. Of these only the most promising numbers
    of pipelines are looked at. The first such way that is taken must be better by ``WORTH``, and the next ones by
    ``WORTH_TWICE``.
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
    return tuple(sorted(partitions, key=lambda one: (one.estimate_s, not one.shares, one.way, one.number)))


def _without_sums_s(splits: Splits, estimate_s: float, pipelines: int) -> float:
    """Return what is at least left of ``estimate_s`` without reductions."""
    return max(0.0, estimate_s - reduce_s(splits.costs, 0, splits.last, pipelines))


def ranked_with_slow(
    search: Search, workers: int, slow: tuple[int, ...], microbatches: int
) -> tuple[Partition, ...]:
    """Return the same as :func:`ranked`, with slow workers of these sorts besides.

    Each of them is in a pipeline that is cut for it and gets its share of microbatches, if that is better than to leave
    the worker out.
    """
    without = search.partitions(workers, microbatches)
    look = _Look(search, workers, slow, microbatches)
    # So many may only fit with the slow workers: where memory binds, or as one of them is a pipeline by itself.
    numbers = search.ranked(workers, microbatches)
    if workers <= MANY_WORKERS or not numbers:
        known = {number for _, number in numbers}
        with_them = search.ranked(workers + len(slow), microbatches)
        numbers += tuple(one for one in with_them if one[1] not in known)
    numbers = tuple(sorted(numbers, key=lambda one: (one[1] == 1, one)))
    least_s = min((one.estimate_s for one in without if one.shares and one.way == ONCE), default=inf)
    better = [one for one in look.over({}, numbers, least_s, without) if one.shares]
    return tuple(
        sorted((*better, *without), key=lambda one: (one.estimate_s, not one.shares, one.way, one.number))
    )


class _Look:
    """A look at the possible numbers of pipelines."""

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
        """Number of visits that may still be scheduled, for many workers."""
        self.search, self.workers, self.slow, self.microbatches = search, workers, slow, microbatches
        self._trusts = _TRUST if workers <= MANY_WORKERS else _TRUST[:1]

    def over(
        self,
        found: dict[int, Partition],
        numbers: Sequence[tuple[float, int]],
        least_s: float,
        known: Sequence[Partition] = (),
    ) -> list[Partition]:
        """Return ``found``, with what is better than ``least_s``, and better ways with more legs.

        ``known``: partitions that have to be beaten.
        """
        least_s = self._at(found, self.search, numbers, self._trusts, least_s)
        partitions = [*found.values()]
        behind = 1.0 if self.workers > MANY_WORKERS else _BEHIND
        worth = WORTH
        for other in self.search.revisiting:
            of_these = (one.estimate_s for one in known if one.shares and one.way == other.splits.way)
            limit_s = min([least_s * worth, *of_these])
            # A pipeline of one worker has nowhere to turn, and workers beyond the longest pipelines would idle.
            numbers = [
                (estimate_s, number)
                for estimate_s, number in other.ranked(self.workers, self.microbatches)
                if (estimate_s < limit_s * behind or self.slow)
                and 1 < self.workers // number <= other.splits.most_stages
            ]
            better: dict[int, Partition] = {}
            limit_s = self._at(better, other, numbers[:_PROMISING], self._trusts, limit_s)
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
        """Work out the best partition into each of ``numbers``, which are (estimate, number of pipelines).

        Those that are better than ``least_s``, or replace a bound, are put into ``found``. Returns the least time
        found.
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
        """Do as :meth:`_at` for many workers, only for the few numbers of pipelines that are best by all that is known.

        What is known includes how late pipelines of about their lengths were, and the wait for weights where optimizer
        state is cut.
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
            own.reach(number)
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
    """Return the best partition, and whether all of it was scheduled; without shares if it is not better than
    ``limit_s``.

    ``lengths``: (stages, number of pipelines) if lengths differ by at most one, which is preferred to what is hardly
    better. ``ragged``: look at other lengths, too.
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
        way=own.splits.way,
    )
    return one, true is not None
