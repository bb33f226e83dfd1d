"""The knapsack of pipelines: whether a number of them can do all microbatches with the workers that there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from odyssey_megatron.policy.shapes.kinds import healthy_of, sort_of
from odyssey_megatron.policy.shapes.shares import SLACK

_NONE = -(2**40)

Counts = NDArray[np.int64]
Option = tuple[int, int, int]
"""(healthy workers, microbatches, kind) of a pipeline."""


def packed(
    most: Mapping[int, int], number: int, workers: int, slow: Sequence[int], microbatches: int
) -> list[int] | None:
    """Return the kinds of ``number`` pipelines that do at least all microbatches with these workers; None if there are
    none.

    Each slow worker (``slow``: its sort) has a place in one pipeline, or idles. Healthy workers may idle as well, but
    fewer than there are pipelines, as so many could lengthen each pipeline. Where steps are very short, estimates would
    leave out most workers; then each loss would cost more than that saves, as fewer workers hold each layer.

    Args:
        most: kind -> the most microbatches that such a pipeline does.
    """
    rate = max((count / kind for kind, count in most.items() if sort_of(kind) < 0), default=0.0)
    by_sort = {sort: _of_sort(most, sort, rate) for sort in {*slow}}
    gain = sum(max((one[1] - one[0] * rate for one in by_sort[sort]), default=0.0) for sort in slow)
    spare = (workers * rate + gain) * SLACK - microbatches
    # Each length does less than it could at the best rate. This is the most that all pipelines together may waste.
    useful, last = list[Option](), 0
    for kind, count in most.items():
        if sort_of(kind) < 0 and count > last and kind * rate - count <= spare:
            useful.append((kind, count, kind))
            last = count
    if spare < 0 or not (useful or gain):
        return None
    done, choices = [_nothing(workers)], list[Counts]()
    for _ in range(number):
        then, choice = _with_one_more(done[-1], useful)
        done.append(then)
        choices.append(choice)
    with_slow, taken = _slow_ones(by_sort, slow, workers, number)
    best = _best(done, with_slow, workers)
    if best.microbatches < microbatches or workers - best.with_slow - best.rest >= number:
        return None
    found, with_one, left = list[int](), best.pipelines, best.with_slow
    for kinds in reversed(taken):
        if kind := int(kinds[with_one, left]):
            found.append(kind)
            with_one, left = with_one - 1, left - healthy_of(kind)
    left = best.rest
    for choice in reversed(choices[: number - len(found)]):
        found.append(int(choice[left]))
        left -= found[-1]
    return found


class _Best(NamedTuple):
    microbatches: int
    pipelines: int
    """Number of pipelines with a slow worker."""
    with_slow: int
    """Number of healthy workers in those."""
    rest: int
    """Number of workers in the others."""


def _best(done: Sequence[Counts], with_slow: Sequence[Counts], workers: int) -> _Best:
    """Return what does the most; among equals, what has the fewest pipelines with slow workers, and the fewest other
    workers.
    """
    best = _Best(_NONE, 0, 0, 0)
    for count, mixed in enumerate(with_slow):
        plain = done[len(done) - 1 - count]
        for first in np.flatnonzero(mixed >= 0).tolist():
            rest = int(plain[: workers - first + 1].argmax())
            if (whole := int(mixed[first] + plain[rest])) > best.microbatches:
                best = _Best(whole, count, first, rest)
    return best


def _nothing(workers: int) -> Counts:
    done = np.full(workers + 1, _NONE, dtype=np.int64)
    done[0] = 0
    return done


def _with_one_more(done: Counts, options: Sequence[Option]) -> tuple[Counts, Counts]:
    """Return ``done`` with one pipeline more, and the kind of that pipeline.

    ``done[n]`` is the most that is done with n workers.
    """
    then, choice = np.full_like(done, _NONE), np.zeros_like(done)
    for healthy, count, kind in options:
        more = done[: len(done) - healthy] + count
        better = more > then[healthy:]
        then[healthy:][better] = more[better]
        choice[healthy:][better] = kind
    return then, choice


def _of_sort(most: Mapping[int, int], sort: int, rate: float) -> list[Option]:
    """Return pipelines with a slow worker of this sort, as far as they are better than to leave it idle."""
    found, last = list[Option](), 0
    for kind, count in most.items():
        healthy = healthy_of(kind)
        if sort_of(kind) == sort and count > last and count > healthy * rate:
            found.append((healthy, count, kind))
            last = count
    return found


def _slow_ones(
    by_sort: Mapping[int, list[Option]], slow: Sequence[int], workers: int, number: int
) -> tuple[list[Counts], list[Counts]]:
    """Return two lists for the pipelines with slow workers.

    The first is by the number of such pipelines: as ``done`` in :func:`_with_one_more`. The second has for each slow
    worker, by the number of such pipelines and of healthy workers, the kind of its pipeline; 0: it idles.
    """
    most = min(number, len(slow))
    done = [_nothing(workers), *(np.full(workers + 1, _NONE, dtype=np.int64) for _ in range(most))]
    taken = []
    for sort in slow:
        kinds = np.zeros((most + 1, workers + 1), dtype=np.int64)
        for count in range(most, 0, -1):
            then, choice = _with_one_more(done[count - 1], by_sort[sort])
            better = then > done[count]
            done[count] = np.where(better, then, done[count])
            kinds[count] = np.where(better, choice, 0)
        taken.append(kinds)
    return done, taken
