"""Chameleon (arXiv 2508.21613), which chooses between two ways to go on."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.placing.transfer import plan_transfers, transfer_s
from odyssey_megatron.policy.routes.rerouting import reroute
from odyssey_megatron.policy.shapes.search import search_for
from odyssey_megatron.policy.shapes.seating import PipelineShapes, place
from odyssey_megatron.policy.shapes.shares import min_max_shares
from odyssey_megatron.studies.baselines import (
    Running,
    System,
    World,
    expected_rate,
    healthy_layout,
    pipelines_fit,
)


class Chameleon(System):
    """Dynamic parallelism or rerouting, whichever its estimates prefer; fused backward (arXiv 2508.21613)."""

    name = "chameleon"

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        if running.layout is None:
            return self.restarted(world, alive, "restart")
        options = []
        for estimate, option in (self._rerouted(world, alive), self._dynamic(world, running, alive)):
            if option is not None and math.isfinite(option.step_s) and option.downtime_s < world.mtbf_s:
                # Eq. 8, with the true mean for its D.
                score = (world.mtbf_s - option.downtime_s) / world.mtbf_s / estimate
                options.append((score, option.note, option))
        if not options:
            return self.restarted(world, alive, "restart")
        return max(options, key=lambda one: one[:2])[2]

    def _rerouted(self, world: World, alive: tuple[int, ...]) -> tuple[float, Running | None]:
        """Return the estimate of rerouting by Eq. 13, and what really happens by the simulator."""
        healthy = healthy_layout(world, world.workers)
        assert healthy is not None
        costs = world.profile.costs
        try:
            layout = reroute(healthy, alive, costs)
            step_s = self.step_s(world, layout)
        except PlanInfeasible:
            return math.inf, None
        pp = world.job.pipeline_model_parallel_size
        replicas = len(world.workers) // pp
        each = world.job.num_microbatches / replicas
        failed = [replicas - len(layout.holders[hop.first]) for hop in healthy.routes[0].hops]
        slots = pp + each - 1 + sum(each * f / (replicas - f) for f in failed)
        slowest = max(costs.spans.compute_s(hop.first, hop.last) for hop in healthy.routes[0].hops)
        return slots * slowest, Running(
            layout=layout, step_s=step_s, downtime_s=world.profile.group_build_s, note="rerouted"
        )

    def _dynamic(
        self, world: World, running: Running, alive: tuple[int, ...]
    ) -> tuple[float, Running | None]:
        """Return the estimate of the best partition (:func:`partitioned`) and the change to it, if it can be
        reached.
        """
        costs = world.profile.costs
        best = partitioned(costs, len(alive), world.job.num_microbatches, ours=self.ours)
        if best is None or running.layout is None:
            return math.inf, None
        try:
            layout = place(best[1], alive, running.layout, costs)
            moved = transfer_s(plan_transfers(running.layout, layout, alive, costs), costs)
        except LayersLost:
            return math.inf, None
        return best[0], Running(
            layout=layout,
            step_s=self.step_s(world, layout),
            downtime_s=world.profile.group_build_s + moved,
            note="dynamic",
        )


@lru_cache(maxsize=256)
def partitioned(
    costs: Costs, workers: int, microbatches: int, *, ours: bool
) -> tuple[float, PipelineShapes] | None:
    """Return (estimated step, shape) of the best of Algorithm 1's balanced partitions; None if none fits.

    They are estimated by Eq. 10 and filtered by Eq. 14, and cached for each number of workers, as they are precomputed
    there.
    """
    best: tuple[float, PipelineShapes] | None = None
    search = search_for(costs, None)
    for _, pipelines in search.ranked(workers, microbatches):
        shape = search.shape(workers, microbatches, pipelines)
        rates = [expected_rate(ends, costs, ours=ours) for ends in shape.ends]
        shape = replace(shape, shares=min_max_shares(microbatches, rates))
        estimate = max(rate.finish_s(m) for rate, m in zip(rates, shape.shares, strict=True))
        if (best is None or estimate < best[0]) and pipelines_fit(shape.ends, costs):
            best = (estimate, shape)
    return best
