"""The number of microbatches that each pipeline gets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

SLACK = 1 + 1e-9
"""Relative tolerance: sums of floats that are equal on paper must compare equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast a pipeline is: it does a microbatch every ``each_s``, after a warm-up of ``head_s``."""

    head_s: float
    each_s: float

    def finish_s(self, microbatches: int) -> float:
        return self.head_s + microbatches * self.each_s


def finish_s(count: int, rates: Sequence[tuple[Rate, int]]) -> float:
    """Return the least time in which pipelines, given as (rate, number of pipelines), can do ``count`` microbatches.

    The time is that of some pipeline's last microbatch. If fractions were allowed it would be ``fluid``. Rounding down
    loses each pipeline less than one microbatch, so the answer is at most one microbatch of the slowest above that.
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
    """Split ``count`` microbatches so that the slowest pipeline finishes earliest; each gets at least one.

    Min-max with integer shares is exact if each pipeline gets what it can finish in the least time that suffices, and
    surplus is taken from the pipelines that finish last.
    """
    least = finish_s(count, [(rate, 1) for rate in rates])
    shares = [max(1, min(count, _done_by(least, rate))) for rate in rates]
    for _ in range(sum(shares) - count):
        last = max(
            (i for i in range(len(rates)) if shares[i] > 1), key=lambda i: rates[i].finish_s(shares[i])
        )
        shares[last] -= 1
    return tuple(shares)


def deal(shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the microbatch ids 0..sum-1 of each pipeline, spread evenly: round-robin if shares are equal."""
    order = sorted(
        ((2 * i + 1) / (2 * share), pipeline) for pipeline, share in enumerate(shares) for i in range(share)
    )
    ids: list[list[int]] = [[] for _ in shares]
    for microbatch, (_, pipeline) in enumerate(order):
        ids[pipeline].append(microbatch)
    return tuple(tuple(one) for one in ids)
