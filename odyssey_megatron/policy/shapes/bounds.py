"""The most microbatches that pipelines can do in a given time, by lower bounds."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from odyssey_megatron.plan.checking.simulate import reduce_hops
from odyssey_megatron.plan.scheduling.reductions import bucket_bytes, cut
from odyssey_megatron.policy.shapes.kinds import sort_of, stages_of
from odyssey_megatron.policy.shapes.shares import SLACK
from odyssey_megatron.policy.shapes.splits import Splits
from odyssey_megatron.policy.shapes.stages import path_s, reached_s, up_s


class Rows(NamedTuple):
    """The rows of one kind of pipeline, whatever other pipelines there are: see :class:`Bounds`.

    They are arrays of numbers, not objects: there are thousands of kinds.
    """

    head_s: array[float]
    each_s: array[float]
    lowest: array[int]
    """The first and the last layer of each stage's first visit, from which the last bucket is summed."""
    sums: array[int]
    """Bytes of all gradients of each stage."""
    fits: float
    """The most microbatches that it has memory for."""
    path_s: float

    @classmethod
    def of(cls, splits: Splits, kind: int) -> Rows:
        costs, spans, stages = splits.costs, splits.costs.spans, splits.stages_once(kind)
        rows = cls(array("d"), array("d"), array("l"), array("q"), 2.0**40, path_s(costs, stages))
        for one in stages:
            begins_s = reached_s(costs, one)
            waiting = splits.waiting(stages, one)
            heads_s = begins_s + waiting.before_s, begins_s - one.beside_s(costs), up_s(costs, stages, one)
            rows.head_s.extend((*heads_s, waiting.head_s))
            rows.each_s.extend((one.each_s, one.down_and_up_s, one.down_and_up_s, waiting.each_s))
            rows.lowest.extend(one.spans[0])
            rows.sums.append(sum(spans.gradient_bytes(a, b) for a, b in one.spans))
            if costs.keeps_messages and splits.budget is not None:
                sent = sum((a > 0) + (b < splits.last) for a, b in one.spans) * costs.message_bytes
                needs = sum(spans.activation_bytes(a, b) for a, b in one.spans)
                needs += max(spans.grown_bytes(a, b) for a, b in one.spans)
                room = int(splits.budget * one.share.ranks) - splits.kept_bytes(one) - needs
                rows = rows._replace(fits=min(rows.fits, room // sent if sent else rows.fits))
        return rows


class Bounds:
    """Lower bounds as in :mod:`odyssey_megatron.plan.checking.bound`, for pipelines of all kinds at once.

    Each row is a line, ``head_s + microbatches * each_s``, with sums after it. Each stage has four rows:

    - all its work, which memory may stretch, and the bucket that is summed last;
    - its forwards and input gradients, the last of which may run beside sums on a first stage, and all its sums;
    - its forwards and input gradients, the way of the last gradient up to the first stage, and that stage's last
      bucket;
    - all its work but what it can have left by then, as its memory is full, and the same way and bucket.
    """

    def __init__(self, splits: Splits, kinds: Sequence[int], known: dict[int, Rows]) -> None:
        """``known``: rows by kind that earlier calls with these ``splits`` have made; missing ones are added to it."""
        costs, spans = splits.costs, splits.costs.spans
        self._costs, self._at = costs, {kind: i for i, kind in enumerate(kinds)}
        for kind in kinds:
            if kind not in known:
                known[kind] = Rows.of(splits, kind)
        self._kinds = [known[kind] for kind in kinds]
        head = np.array([s for one in self._kinds for s in one.head_s])
        each = np.array([s for one in self._kinds for s in one.each_s])
        self._head, self._each = head, np.maximum(each, 1e-15)
        counts = [len(one.head_s) for one in self._kinds]
        self._rows = np.array(counts, dtype=int)
        self._starts = np.cumsum(self._rows) - self._rows
        self._sizes: dict[int, NDArray[np.float64]] = {}
        self._fit = np.array([one.fits for one in self._kinds], dtype=float)
        self._path = np.array([one.path_s for one in self._kinds])
        self._around = self._head
        self.late_s = np.zeros(len(kinds))
        """By how much pipelines of each kind are later than their bound, as far as that is known."""
        self._stages = np.array([stages_of(kind) for kind in kinds])
        self._sort = np.array([sort_of(kind) for kind in kinds])
        self.scale_s = spans.compute_s(0, splits.last)
        """Compute time of one microbatch."""

    def reduce_among(self, number: int, copies: int) -> None:
        """Count reductions among ``number`` pipelines: see :func:`odyssey_megatron.plan.checking.simulate.reduce_s`."""
        hops, least = reduce_hops(number, copies), bucket_bytes(self._costs, number)
        if least not in self._sizes:
            self._sizes[least] = np.array(self._summed(number), dtype=float)
        bytes_s = hops / number * self._sizes[least] / self._costs.link_bytes_per_s
        self._around = self._head + bytes_s + hops * self._costs.link_latency_s

    def _summed(self, number: int) -> list[int]:
        """Return the bytes that are summed after each row."""
        known: dict[tuple[int, int], int] = {}
        found, size = list[int](), self._costs.spans.gradient_bytes
        for one in self._kinds:
            last = list[int]()
            for visit in zip(one.lowest[::2], one.lowest[1::2], strict=True):
                if visit not in known:
                    known[visit] = size(*cut(*visit, number, self._costs)[0])
                last.append(known[visit])
            for bucket, of_stage in zip(last, one.sums, strict=True):
                found += bucket, of_stage, last[0], last[0]
        return found

    def learn(self, known_s: Mapping[int, float], trust: float, near: float = inf) -> None:
        """Learn from ``known_s``: by how much a pipeline of some kinds was later than its bound.

        Other lengths are interpolated, and count by ``trust``. Kinds with a slow worker are as late as those without,
        if nothing else is known of them. Nothing is assumed of lengths that differ by more than ``near`` stages from
        all known ones.
        """
        late_s = np.zeros(len(self._stages))
        for sort in np.unique(self._sort).tolist():
            of_sort = sorted((stages_of(kind), s) for kind, s in known_s.items() if sort_of(kind) == sort)
            of_sort = of_sort or sorted(
                (stages_of(kind), s) for kind, s in known_s.items() if sort_of(kind) < 0
            )
            if of_sort:
                stages, each_s = zip(*of_sort, strict=True)
                here = self._sort == sort
                own = self._stages[here]
                far = np.abs(own[:, np.newaxis] - np.array(stages)).min(axis=1) > near
                late_s[here] = np.where(far, 0.0, trust * np.interp(own, stages, each_s))
        for kind, one_s in known_s.items():
            late_s[self._at[kind]] = one_s * (1 + trust) / 2
        self.late_s = late_s

    def late_of(self, kind: int) -> float:
        return float(self.late_s[self._at[kind]])

    def most(self, time_s: float, most: int) -> list[int]:
        """Return the number of microbatches, up to ``most``, that a pipeline of each kind can do in ``time_s``."""
        within_s = time_s * SLACK - self.late_s
        rows: NDArray[np.float64] = (np.repeat(within_s, self._rows) - self._around) / self._each
        counts = np.minimum(np.minimum.reduceat(rows, self._starts), np.minimum(self._fit, most))
        counts[self._path > within_s] = 0
        return [int(one) for one in np.maximum(counts, 0).astype(np.int64)]

    def estimate_s(self, kind: int, microbatches: int) -> float:
        return self.least_s(kind, microbatches) + self.late_of(kind)

    def least_s(self, kind: int, microbatches: int, *, sums: bool = True) -> float:
        """Return the bound. ``sums``: include sums, cut into buckets as if all pipelines were alike."""
        at = self._at[kind]
        if microbatches > self._fit[at]:
            return inf
        rows = slice(self._starts[at], self._starts[at + 1] if at + 1 < len(self._starts) else None)
        lines = (self._around if sums else self._head)[rows] + microbatches * self._each[rows]
        return max(float(lines.max()), float(self._path[at]))
