"""Oobleck (arXiv 2309.08125): pipelines from templates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

from odyssey_megatron.errors import LayersLost
from odyssey_megatron.plan.checking.simulate import reduce_s
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout, layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.transfer import plan_transfers, transfer_s
from odyssey_megatron.policy.shapes.search import search_for
from odyssey_megatron.policy.shapes.seating import PipelineShapes, place
from odyssey_megatron.policy.shapes.shares import deal, finish_s, min_max_shares
from odyssey_megatron.studies.baselines import Running, System, World, expected_rate, pipelines_fit

_ALL_SETS_UP_TO = 48
"""Up to this number of workers all sets of templates are looked at; above it only those whose lengths differ by one."""


class Oobleck(System):
    """1F1B on pipelines of any lengths.

    It starts with the best set of templates, and takes the best set again after a join. After a loss a pipeline goes on
    shorter as it is; if it is too short it takes workers from the longest, or merges with the shortest.
    """

    name = "oobleck"
    reconfigure_s = 10.0
    """The constant of its own simulator for its largest model; others have measured 57 s (arXiv 2309.08125)."""

    def start(self, world: World) -> Running:
        lengths = self._instantiated(world, len(world.workers))
        if not lengths:
            return super().start(world)
        groups, at = [], 0
        for length in lengths:
            groups.append(list(world.workers[at : at + length]))
            at += length
        layout = self._laid_out(world, groups)
        step_s = self.step_s(world, layout)
        if math.isinf(step_s):
            return super().start(world)
        return Running(layout=layout, step_s=step_s, downtime_s=0.0)

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        if running.layout is None:
            return self.restarted(world, alive, "restart")
        costs, there = world.profile.costs, set(alive)
        groups = [
            [hop.worker for hop in route.hops if hop.worker in there] for route in running.layout.routes
        ]
        if there <= {hop.worker for route in running.layout.routes for hop in route.hops}:
            groups = self._regroup(groups, self._smallest(world))
            layout = self._laid_out(world, groups) if groups else None
        else:  # a worker has joined
            lengths = self._instantiated(world, len(alive))
            layout = self._placed(world, lengths, alive, running.layout) if lengths else None
            groups = [[0] * length for length in lengths]
        if layout is None:
            return self.restarted(world, alive, "ranks are insufficient")
        try:
            moved_s = transfer_s(plan_transfers(running.layout, layout, alive, costs), costs)
        except LayersLost:
            return self.restarted(world, alive, "layers lost")
        step_s = self.step_s(world, layout)
        if math.isinf(step_s):
            return self.restarted(world, alive, "out of memory")
        return Running(
            layout=layout,
            step_s=step_s,
            downtime_s=self.reconfigure_s + moved_s,
            note="+".join(str(len(group)) for group in groups),
        )

    def _shape(self, world: World, lengths: Sequence[int]) -> PipelineShapes:
        costs = world.profile.costs
        search = search_for(costs, None)
        splits = [search.splits.split(min(length, search.splits.most_stages)) or () for length in lengths]
        shares = min_max_shares(
            world.job.num_microbatches, [expected_rate(e, costs, ours=self.ours) for e in splits]
        )
        return PipelineShapes(ends=tuple(splits), shares=shares, estimate_s=0.0)

    def _laid_out(self, world: World, groups: Sequence[Sequence[int]]) -> Layout:
        """Return a layout in which each group is a pipeline, in its order."""
        shape = self._shape(world, [len(group) for group in groups])
        routes = tuple(
            pipeline_route(tuple(group[: len(ends)]), ends, ids)
            for group, ends, ids in zip(groups, shape.ends, deal(shape.shares), strict=True)
        )
        return layout_from_routes(world.job.num_layers, routes, tied=world.job.is_tied)

    def _placed(
        self, world: World, lengths: Sequence[int], alive: Sequence[int], previous: Layout
    ) -> Layout | None:
        try:
            return place(self._shape(world, lengths), alive, previous, world.profile.costs)
        except LayersLost:
            return None

    def _instantiated(self, world: World, workers: int) -> tuple[int, ...]:
        return instantiated(world.profile.costs, world.job.num_microbatches, workers, ours=self.ours)

    def _smallest(self, world: World) -> int:
        return smallest(world.profile.costs)

    def _regroup(self, groups: list[list[int]], smallest: int) -> list[list[int]]:
        """Return groups of at least ``smallest`` workers: short ones take workers from the longest, or are merged.

        Empty if there are too few workers for one pipeline.
        """
        groups = [group for group in groups if group]
        while short := [group for group in groups if len(group) < smallest]:
            longest = max(groups, key=len)
            if len(longest) > smallest:
                short[0].append(longest.pop())
            elif len(groups) > 1:
                groups.remove(short[0])
                other = min(groups, key=len)
                other += short[0]
            else:
                return []
        return groups


@lru_cache(maxsize=64)
def smallest(costs: Costs) -> int:
    """Return n_0: the length of the shortest pipeline whose stages fit the memory."""
    search = search_for(costs, None)
    for stages in range(1, search.splits.most_stages + 1):
        if pipelines_fit([search.splits.split(stages) or ()], costs):
            return stages
    return search.splits.most_stages


@lru_cache(maxsize=256)
def instantiated(costs: Costs, microbatches: int, workers: int, *, ours: bool) -> tuple[int, ...]:
    """Return the lengths of the best set of templates that uses all workers, with at least two pipelines if possible.

    The step of a set is that of its slowest pipeline, and the first layer's reduction (arXiv 2309.08125). Empty if not
    one pipeline fits.
    """
    search, least = search_for(costs, None), smallest(costs)
    rates = {
        length: expected_rate(search.splits.split(length) or (), costs, ours=ours)
        for length in range(least, min(workers, search.splits.most_stages) + 1)
    }

    def step_s(lengths: tuple[int, ...]) -> float:
        paced = [(rates[length], count) for length, count in Counter(lengths).items()]
        return finish_s(microbatches, paced) + reduce_s(costs, 0, 1, len(lengths))

    found = [one for one in _sets(workers, least, search.splits.most_stages) if len(one) <= microbatches]
    several = [one for one in found if len(one) > 1] or found
    return min(several, key=lambda one: (step_s(one), one), default=())


def _sets(workers: int, least: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield sets of lengths from ``least`` to ``most`` whose sum is ``workers``, the longest first."""
    if workers > _ALL_SETS_UP_TO:
        for number in range(-(-workers // most), workers // least + 1):
            short, longer = divmod(workers, number)
            yield (short + 1,) * longer + (short,) * (number - longer)
        return
    for length in range(min(most, workers), least - 1, -1):
        if length == workers:
            yield (length,)
        elif workers - length >= least:
            for others in _sets(workers - length, least, length):
                yield (length, *others)
