"""Balanced shapes: pipelines whose lengths differ by at most one. They are estimated, without scheduling anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from odyssey_megatron.plan.checking.simulate import reduce_hops
from odyssey_megatron.plan.scheduling.reductions import bucket_bytes, cut_in
from odyssey_megatron.policy.shapes.seating import PipelineShapes
from odyssey_megatron.policy.shapes.shares import Rate, finish_s, min_max_shares
from odyssey_megatron.policy.shapes.splits import Splits
from odyssey_megatron.policy.shapes.stages import Waiting, path_s, reached_s, up_s


def even(num_workers: int, pipelines: int, most_stages: int) -> list[tuple[int, int]]:
    """Return (stages, number of pipelines) of each length, the longer one first."""
    short, longer = divmod(num_workers, pipelines)
    both = ((short + 1, longer), (short, pipelines - longer))
    return [(min(length, most_stages), count) for length, count in both if count]


class _Summing(NamedTuple):
    """When a stage begins to sum gradients, and what it sums."""

    waits: Waiting
    """What its memory keeps it from."""
    up_s: float
    """The time down to it, and from there up through the first stage."""
    begins_s: float
    """When the first microbatch reaches it, and the time for which its memory keeps it waiting then."""
    whole_s: float
    """When the first microbatch reaches it, less the input gradient beside which it may sum, for the bound with all its
    sums.
    """
    each_s: float
    down_and_up_s: float
    last_bytes: int
    """Bytes of the bucket that is summed last."""
    bytes: int
    buckets: int


@dataclass(frozen=True, slots=True)
class Balanced:
    """Estimates of balanced shapes with these splits."""

    splits: Splits
    sums: int
    """Number of copies of optimizer state to whose owners gradients go; 0: every holder."""
    _known: dict[tuple[int, int], list[_Summing]] = field(default_factory=dict, compare=False)

    def estimate_s(self, num_workers: int, num_microbatches: int, pipelines: int) -> float | None:
        """Return the estimated step of the balanced shape with this number of pipelines; None if it does not fit."""
        lengths = self.lengths(num_workers, pipelines)
        return None if lengths is None else self._estimate_s(lengths, num_microbatches, pipelines)

    def shape(self, num_workers: int, num_microbatches: int, pipelines: int) -> PipelineShapes | None:
        """Return the balanced shape with this number of pipelines; None if it does not fit."""
        lengths = self.lengths(num_workers, pipelines)
        if lengths is None:
            return None
        ends: list[tuple[int, ...]] = []
        for length, count in lengths:
            split = self.splits.split(length)
            ends += [split] * count if split else []
        share = num_microbatches / pipelines
        paces = [(self._last_done(length, share, pipelines)[0], count) for length, count in lengths]
        each = [rate for rate, count in paces for _ in range(count)]
        return PipelineShapes(
            ends=tuple(ends),
            shares=min_max_shares(num_microbatches, each),
            estimate_s=self._estimate_s(lengths, num_microbatches, pipelines),
            way=self.splits.way,
        )

    def sums_s(self, stages: int, pipelines: int) -> tuple[float, float]:
        """Return (the longest last sum, all sums of the worker that has most of them) for pipelines of ``stages``
        stages.
        """
        lag_s, byte_s = self._sum_s(pipelines)
        found = self._summing(stages, bucket_bytes(self.splits.costs, pipelines))
        return (
            lag_s + byte_s * max(one.last_bytes for one in found),
            max(one.buckets * lag_s + byte_s * one.bytes for one in found),
        )

    def lengths(self, num_workers: int, pipelines: int) -> list[tuple[int, int]] | None:
        """See :func:`even`; None if a pipeline does not fit."""
        lengths = even(num_workers, pipelines, self.splits.most_stages)
        return lengths if all(self.splits.split(length) is not None for length, _ in lengths) else None

    def _estimate_s(self, lengths: Sequence[tuple[int, int]], microbatches: int, pipelines: int) -> float:
        """Return the least time in which all pipelines can end.

        The bounds are those of :mod:`odyssey_megatron.plan.checking.bound`: all the work of a stage, and then the
        bucket that it sums last; the forwards and input gradients of a stage, and then all its sums, or the way up to
        the first stage; all but the work that its memory allows it to have left by then, and the same way; and the way
        of one microbatch down and up.
        """
        work, sums, drain, longest_s = [], [], [], 0.0
        for length, count in lengths:
            last, whole = self._last_done(length, microbatches / pipelines, pipelines)
            work.append((last, count))
            sums.append((whole, count))
            drain.append((self._drained(length, microbatches / pipelines, pipelines), count))
            longest_s = max(longest_s, path_s(self.splits.costs, self.splits.stages(length)))
        return max(*(finish_s(microbatches, each) for each in (work, sums, drain)), longest_s)

    def _last_done(self, stages: int, share: float, pipelines: int) -> tuple[Rate, Rate]:
        """Return two rates, each of the stage that is done last by it if its pipeline gets ``share`` microbatches.

        The first is of all its work and its last bucket. The second is of its forwards and input gradients, the last of
        which may run beside sums, and all its sums.
        """
        last, whole, costs = (-inf, 0.0, 0.0), (-inf, 0.0, 0.0), self.splits.costs
        lag_s, byte_s = self._sum_s(pipelines)
        for one in self._summing(stages, bucket_bytes(costs, pipelines)):
            last_s = one.begins_s + lag_s + one.last_bytes * byte_s
            all_s = one.whole_s + one.buckets * lag_s + one.bytes * byte_s
            last = max(last, _line(last_s, one.each_s, share))
            whole = max(whole, _line(all_s, one.down_and_up_s, share))
        return Rate(head_s=last[1], each_s=last[2]), Rate(head_s=whole[1], each_s=whole[2])

    def _sum_s(self, pipelines: int) -> tuple[float, float]:
        """Return (fixed seconds of a sum over so many pipelines, seconds for each of its bytes)."""
        costs, hops = self.splits.costs, reduce_hops(pipelines, self.sums)
        return hops * costs.link_latency_s, hops / pipelines / costs.link_bytes_per_s

    def _summing(self, stages: int, least_bytes: int) -> list[_Summing]:
        """Return what each stage sums, in buckets of at least ``least_bytes``."""
        if (stages, least_bytes) not in self._known:
            costs, found, of_all = self.splits.costs, list[_Summing](), self.splits.stages(stages)
            for one in of_all:
                begins_s = reached_s(costs, one)
                buckets = [bucket for a, b in one.spans for bucket in cut_in(a, b, least_bytes, costs)]
                sizes = [costs.spans.gradient_bytes(*bucket) for bucket in buckets]
                waits, whole_s = self.splits.waiting(of_all, one), begins_s - one.beside_s(costs)
                found.append(
                    _Summing(
                        waits,
                        up_s(costs, of_all, one),
                        begins_s + waits.before_s,
                        whole_s,
                        one.each_s,
                        one.down_and_up_s,
                        sizes[0],
                        sum(sizes),
                        len(sizes),
                    )
                )
            self._known[stages, least_bytes] = found
        return self._known[stages, least_bytes]

    def _drained(self, stages: int, share: float, pipelines: int) -> Rate:
        """Return the rate of the stage whose last gradient is the last one to be through with the first stage, which
        then sums its last bucket, if its pipeline gets ``share`` microbatches.
        """
        found, lines = self._summing(stages, bucket_bytes(self.splits.costs, pipelines)), []
        lag_s, byte_s = self._sum_s(pipelines)
        sum_s = lag_s + byte_s * found[0].last_bytes
        for one in found:
            lines.append(_line(one.waits.head_s + sum_s, one.waits.each_s, share))
            lines.append(_line(one.up_s + sum_s, one.down_and_up_s, share))
        _, head_s, each_s = max(lines)
        return Rate(head_s=head_s, each_s=each_s)


def _line(head_s: float, each_s: float, share: float) -> tuple[float, float, float]:
    return head_s + share * each_s, head_s, each_s
