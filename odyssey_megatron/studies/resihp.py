"""ResiHP (arXiv 2605.06374), which goes on with what is left of a tensor-parallel group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from odyssey_megatron.cluster.state import ClusterState, without
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.plan.checking.simulate import step_end_s
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.memory import caps_for
from odyssey_megatron.plan.placing.transfer import plan_transfers, transfer_s
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.policy.case import worker_shares, worker_speeds
from odyssey_megatron.policy.policies.shift import shift_layers
from odyssey_megatron.policy.routes.rerouting import reroute
from odyssey_megatron.studies.baselines import (
    Running,
    System,
    World,
    healthy_layout,
    one_f_one_b_step_s,
    sliced,
)
from odyssey_megatron.studies.cells import CellsChange, Rule, broken_cells
from odyssey_megatron.studies.odyssey import cluster
from odyssey_megatron.studies.trace import FailureTrace


class ResiHP(System):
    """Fewer tensor-parallel ranks, then layers moved off a slow stage in all pipelines alike, then microbatches.

    A broken group goes on at once with the largest power of two of its GPUs (Eq. 3 and 4, where all GPUs are alike).
    GPUs that are left over stand by for others of their node. The launch line's pipelines stay. Which way of moving
    layers is best is found by simulating all, and so is whether smaller groups are worth their place.

    In its favour: our order, of forwards and both halves of backwards in all of the memory, also in a healthy job; no
    time for planning (1.44 s there), nor for sending shards within a stage, even where no other pipeline has them (it
    keeps the state of the last step elsewhere); any model, with context parallelism, too.
    Experts that are spread over ranks are not in the paper: such gangs leave as one.
    """

    name = "resihp"

    def start(self, world: World) -> Running:
        found = self._best(world, cluster(world))
        return found or super().start(world)

    def cells(self, world: World, trace: FailureTrace) -> Iterable[CellsChange]:
        size = world.job.cell_size
        if not world.cells_fill_nodes or world.job.expert_model_parallel_size > 1:
            return super().cells(world, trace)
        powers = (2**exponent for exponent in reversed(range(size.bit_length())))
        sizes = tuple(dict.fromkeys((size, *powers)))
        return broken_cells(
            trace.changes, world.workers, Rule(sizes=sizes, gpus_per_node=world.gpus_per_node)
        )

    def go_on(self, world: World, running: Running, now: CellsChange) -> Running:
        whole = tuple(worker for worker in now.alive if worker not in now.shapes)
        if running.layout is None:
            return self.restarted(world, whole, "restart")
        state, costs = cluster(world, now), world.profile.costs
        options = (self._best(world, one) for one in (state, without(state, now.shapes)))
        found = min(filter(None, options), key=lambda one: one.step_s, default=None)
        if found is None or found.layout is None:
            return self.restarted(world, whole, "a stage lost all its GPUs")
        try:
            moved_s = transfer_s(plan_transfers(running.layout, found.layout, now.alive, costs), costs)
        except LayersLost:
            return self.restarted(world, whole, "layers lost")
        return replace(found, downtime_s=world.profile.group_build_s + moved_s)

    def _best(self, world: World, state: ClusterState) -> Running | None:
        """Return the fastest way to go on with the living cells of ``state``; None: some stage has none, or too little
        memory.
        """
        steps = (
            (self._adapted_s(world, layout, state), at, layout)
            for at, layout in enumerate(_layouts(world, state))
        )
        step_s, _, layout = min(steps, default=(math.inf, 0, None))
        return (
            None
            if math.isinf(step_s)
            else Running(layout=layout, step_s=step_s, downtime_s=0.0, note="adapted")
        )

    def step_s(self, world: World, layout: Layout) -> float:
        """Return the step of whole cells."""
        return self._adapted_s(world, layout, cluster(world))

    def _adapted_s(self, world: World, layout: Layout, state: ClusterState) -> float:
        """Return the step with the cells of ``state``; infinite if it does not fit."""
        layout, costs, speeds = sliced(world.job, layout), world.profile.costs, worker_speeds(state)
        try:
            caps = caps_for(layout, costs, worker_shares(state))
            order = order_routes(layout, costs, in_flight_cap=caps, speeds=speeds)
        except PlanInfeasible:
            return math.inf
        step_s = step_end_s(layout, costs, order.done_s)
        return step_s if speeds else min(step_s, one_f_one_b_step_s(layout, costs))


def _layouts(world: World, state: ClusterState) -> Iterator[Layout]:
    """Yield the healthy layout with microbatches moved off dead and smaller cells, and then with layers moved, too."""
    healthy, costs, speeds = healthy_layout(world, world.workers), world.profile.costs, worker_speeds(state)
    assert healthy is not None
    try:
        rerouted = reroute(healthy, state.alive, costs, speeds)
    except PlanInfeasible:
        return
    yield rerouted
    for in_whole in (False, True):
        try:
            yield shift_layers(rerouted, costs, speeds, in_whole=in_whole)
        except PlanInfeasible:
            continue
