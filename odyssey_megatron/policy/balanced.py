"""Balanced shapes: pipelines whose lengths differ by one at most. Estimated, with nothing scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from odyssey_megatron.plan.reductions import bucket_bytes, cut_in
from odyssey_megatron.plan.simulate import reduce_hops
from odyssey_megatron.policy.seating import Shape
from odyssey_megatron.policy.shares import Rate, finish_s, min_max_shares
from odyssey_megatron.policy.splits import Splits
from odyssey_megatron.policy.stages import path_s, reached_s, up_s


def even(num_workers: int, pipelines: int, most_stages: int) -> list[tuple[int, int]]:
    """(stages, how many pipelines): the longer ones first."""
    short, longer = divmod(num_workers, pipelines)
    both = ((short + 1, longer), (short, pipelines - longer))
    return [(min(length, most_stages), count) for length, count in both if count]


class _Summing(NamedTuple):
    """Of a stage."""

    begins_s: float
    whole_s: float
    """The same, from where it sums all that it has."""
    each_s: float
    down_and_up_s: float
    last_bytes: int
    """That are summed last."""
    bytes: int
    buckets: int


@dataclass(frozen=True, slots=True)
class Balanced:
    """What balanced shapes of these splits come to."""

    splits: Splits
    sums: int
    """The copies of optimizer state to whose owners gradients go; 0: every holder."""
    _known: dict[tuple[int, int], list[_Summing]] = field(default_factory=dict, compare=False)

    def estimate_s(self, num_workers: int, num_microbatches: int, pipelines: int) -> float | None:
        """Estimated step of the balanced shape of so many pipelines; None if it does not fit."""
        lengths = self.lengths(num_workers, pipelines)
        return None if lengths is None else self._estimate_s(lengths, num_microbatches, pipelines)

    def shape(self, num_workers: int, num_microbatches: int, pipelines: int) -> Shape | None:
        """The balanced shape of so many pipelines; None if it does not fit."""
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
        return Shape(
            ends=tuple(ends),
            shares=min_max_shares(num_microbatches, each),
            estimate_s=self._estimate_s(lengths, num_microbatches, pipelines),
            legs=self.splits.legs,
        )

    def sums_s(self, stages: int, pipelines: int) -> tuple[float, float]:
        """Of pipelines of so many stages: (the longest last sum, all sums of the worker that has most of them)."""
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
        """The least time in which all pipelines can end.

        Bounds as in :mod:`odyssey_megatron.plan.bound`: all the work of a stage and then the bucket that it sums last;
        the forwards and input gradients of a stage, and then all its sums, or the way up; and one microbatch's way down
        and up.
        """
        work, sums, drain, longest_s = [], [], [], 0.0
        for length, count in lengths:
            last, whole = self._last_done(length, microbatches / pipelines, pipelines)
            work.append((last, count))
            sums.append((whole, count))
            drain.append((self._drain(length), count))
            longest_s = max(longest_s, path_s(self.splits.costs, self.splits.stages(length)))
        return max(*(finish_s(microbatches, each) for each in (work, sums, drain)), longest_s)

    def _last_done(self, stages: int, share: float, pipelines: int) -> tuple[Rate, Rate]:
        """Of the stage that is done last if its pipeline gets ``share`` microbatches: all its work and its last bucket;
        its forwards and input gradients, of which the last one may run on beside, and all its sums.
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
        """(what a sum over so many pipelines takes however small it is, what each of its bytes takes)."""
        costs, hops = self.splits.costs, reduce_hops(pipelines, self.sums)
        return hops * costs.link_latency_s, hops / pipelines / costs.link_bytes_per_s

    def _summing(self, stages: int, least_bytes: int) -> list[_Summing]:
        """Of each stage what it sums, in buckets of that size."""
        if (stages, least_bytes) not in self._known:
            costs, found = self.splits.costs, list[_Summing]()
            for one in self.splits.stages(stages):
                begins_s = reached_s(costs, one)
                buckets = [bucket for a, b in one.spans for bucket in cut_in(a, b, least_bytes, costs)]
                sizes = [costs.spans.gradient_bytes(*bucket) for bucket in buckets]
                whole_s = begins_s - one.beside_s(costs)
                found.append(
                    _Summing(
                        begins_s, whole_s, one.each_s, one.down_and_up_s, sizes[0], sum(sizes), len(sizes)
                    )
                )
            self._known[stages, least_bytes] = found
        return self._known[stages, least_bytes]

    def _drain(self, stages: int) -> Rate:
        """Forwards and input gradients of the stage with most of them; before and after it, the way to the first."""
        of_all = self.splits.stages(stages)
        _, _, longest = max((one.down_and_up_s, one.hop, one) for one in of_all)
        return Rate(head_s=up_s(self.splits.costs, of_all, longest), each_s=longest.down_and_up_s)


def _line(head_s: float, each_s: float, share: float) -> tuple[float, float, float]:
    return head_s + share * each_s, head_s, each_s
