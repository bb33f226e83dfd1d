"""Other systems, on the same costs and the same simulator, so that comparisons are honest.

Each answers one question: the cluster changed, what do you run now and how long do you stand still? Rules and
constants are those of the papers (papers.md §1, §2, §3, §5), read in the system's favour where they leave a choice: all
get Odyssey's min-max layer splits and microbatch shares, its assignment of seats, and no profiling errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout, layout_from_routes, megatron_layout, pipeline_route
from odyssey_megatron.plan.memory import activation_caps, one_f_one_b_bytes, state_bytes
from odyssey_megatron.plan.order import order_routes
from odyssey_megatron.plan.simulate import step_end_s
from odyssey_megatron.plan.transfer import plan_transfers, transfer_s
from odyssey_megatron.policy.profile import Profile
from odyssey_megatron.policy.rerouting import reroute
from odyssey_megatron.policy.search import Rate, Shape, deal, min_max_shares, place, search_for
from odyssey_megatron.studies.stagger import staggered_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The job that all systems are asked to run."""

    job: JobSpec
    profile: Profile
    workers: tuple[int, ...]
    mtbf_s: float
    """True mean time between changes; Chameleon and the checkpoint interval are told it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What a system runs from now on. ``layout`` is None while it cannot run at all."""

    layout: Layout | None
    step_s: float
    downtime_s: float
    """Standing still before the first step."""
    note: str = ""


def fused(costs: Costs) -> Costs:
    """The same layers with input and weight gradient in one."""
    layers = tuple(
        replace(layer, input_grad_s=layer.input_grad_s + layer.weight_grad_s, weight_grad_s=0.0)
        for layer in costs.layers
    )
    return replace(costs, layers=layers)


def one_f_one_b_step_s(layout: Layout, costs: Costs) -> float:
    """A flushed step with fused backward in 1F1B's order and memory."""
    whole = fused(costs)
    order = order_routes(layout, whole, in_flight_cap=activation_caps(layout, whole))
    return step_end_s(layout, whole, order.done_s)


def fits(layout: Layout, costs: Costs) -> bool:
    """Eq. 14 (papers.md §8.3): state and 1F1B's activations, on every worker."""
    if costs.memory_bytes is None:
        return True
    state, activations = state_bytes(layout, costs), one_f_one_b_bytes(layout, costs)
    return all(state[worker] + activations[worker] <= costs.memory_bytes for worker in state)


def healthy_layout(world: World, workers: Sequence[int]) -> Layout | None:
    """Megatron's layout on as many whole replicas as ``workers`` make; None if not even one."""
    pp = world.job.pipeline_model_parallel_size
    replicas = min(len(workers) // pp, world.job.num_microbatches)
    if replicas == 0:
        return None
    layout = megatron_layout(
        num_layers=world.job.num_layers,
        tied=world.job.is_tied,
        pipeline_size=pp,
        num_workers=replicas * pp,
        num_microbatches=world.job.num_microbatches,
    )
    seat = sorted(workers)
    routes = tuple(
        replace(route, hops=tuple(replace(hop, worker=seat[hop.worker]) for hop in route.hops))
        for route in layout.routes
    )
    return layout_from_routes(world.job.num_layers, routes, tied=world.job.is_tied)


def restarted(world: World, alive: Sequence[int], note: str) -> Running:
    """A restart from a checkpoint on what is left, as plain Megatron."""
    layout = healthy_layout(world, alive)
    if layout is None:
        return Running(layout=None, step_s=math.inf, downtime_s=0.0, note=note + ": too few workers")
    step_s = one_f_one_b_step_s(layout, world.profile.costs)
    return Running(layout=layout, step_s=step_s, downtime_s=world.profile.restart_s, note=note)


class System:
    """A baseline. Stateless: everything it needs is in its arguments."""

    name = ""

    def start(self, world: World) -> Running:
        """The healthy job."""
        return replace(restarted(world, world.workers, ""), downtime_s=0.0)

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        """What to run after the set of living workers changed."""
        raise NotImplementedError


class Restart(System):
    """Varuna's way, with plain Megatron layouts: checkpoint, stop, restart on what is left (papers.md §5)."""

    name = "restart"
    checkpoint_s = 15.0

    def start(self, world: World) -> Running:
        return self._slowed(world, super().start(world))

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        layout = running.layout
        if (
            layout is not None
            and set(layout.workers) <= set(alive)
            and len(layout.workers) + len(layout.routes[0].hops) > len(alive)
        ):
            return replace(running, downtime_s=0.0)
        after = restarted(world, alive, "restart")
        lost = self._interval_s(world) / 2
        return self._slowed(world, replace(after, downtime_s=after.downtime_s + lost))

    def _interval_s(self, world: World) -> float:
        """Young/Daly (papers.md §8.7)."""
        return math.sqrt(2 * self.checkpoint_s * world.mtbf_s)

    def _slowed(self, world: World, running: Running) -> Running:
        return replace(running, step_s=running.step_s * (1 + self.checkpoint_s / self._interval_s(world)))


class Bamboo(System):
    """Every worker also holds its successor's layers and runs their forward in each step (papers.md §5)."""

    name = "bamboo"

    def start(self, world: World) -> Running:
        return self._redundant(world, super().start(world))

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        return self._redundant(
            world, replace(restarted(world, alive, ""), downtime_s=2 * world.profile.group_build_s)
        )

    def _redundant(self, world: World, running: Running) -> Running:
        """Half of the redundant forwards fit into bubbles; twice the state must fit into memory."""
        costs = world.profile.costs
        if running.layout is None:
            return running
        most = 2 * max(state_bytes(running.layout, costs).values())
        if costs.memory_bytes is not None and most > costs.memory_bytes:
            return Running(layout=None, step_s=math.inf, downtime_s=0.0, note="out of memory")
        last = len(costs.layers)
        share = costs.spans.forward_s(0, last) / costs.spans.compute_s(0, last)
        return replace(running, step_s=running.step_s * (1 + share / 2))


class ReCycle(System):
    """Rerouting only: layout kept, decoupled backward, staggered optimizer (papers.md §2)."""

    name = "recycle"

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        healthy = healthy_layout(world, world.workers)
        assert healthy is not None  # the job has started
        costs = world.profile.costs
        if len(alive) == len(world.workers):
            return replace(self.start(world), downtime_s=world.profile.group_build_s)
        try:
            # From the healthy layout again: its failure normalisation moves work to wherever it fits best.
            layout = reroute(healthy, alive, costs)
            caps = activation_caps(layout, costs, extra=2, budget_bytes=costs.memory_bytes)
            order = order_routes(layout, costs, in_flight_cap=caps)
        except PlanInfeasible:
            return restarted(world, alive, "a stage lost all its workers")
        step_s = staggered_step_s(layout, costs, order.done_s)
        return Running(layout=layout, step_s=step_s, downtime_s=world.profile.group_build_s, note="rerouted")


class Oobleck(System):
    """Pipelines from templates, 1F1B; re-instantiate, borrow or merge on a loss (papers.md §3)."""

    name = "oobleck"
    reconfigure_s = 10.0
    """Its own simulator's constant for its largest model; 57 s were measured by others (papers.md §3.5)."""

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        if running.layout is None:
            return restarted(world, alive, "restart")
        smallest = self._smallest(world)
        there = set(alive)
        groups = [
            [hop.worker for hop in route.hops if hop.worker in there] for route in running.layout.routes
        ]
        groups = self._regroup(groups, sorted(there - {w for group in groups for w in group}), smallest)
        if not groups:
            return restarted(world, alive, "ranks are insufficient")
        costs = world.profile.costs
        search = search_for(costs, None)
        shape, rates = [], []
        for group in groups:
            ends = search.split(min(len(group), search.most_stages))
            assert ends is not None  # without a budget every split fits
            shape.append(ends)
            rates.append(_fused_rate(ends, costs))
        shares = min_max_shares(world.job.num_microbatches, rates)
        routes = tuple(
            pipeline_route(tuple(group[: len(ends)]), ends, ids)
            for group, ends, ids in zip(groups, shape, deal(shares), strict=True)
        )
        layout = layout_from_routes(world.job.num_layers, routes, tied=world.job.is_tied)
        lost = set(range(world.job.num_layers)) - {
            layer for w in there for layer in running.layout.held_by(w)
        }
        if lost:
            return restarted(world, alive, "layers lost")
        moved = transfer_s(plan_transfers(running.layout, layout, alive, costs), costs)
        return Running(
            layout=layout,
            step_s=one_f_one_b_step_s(layout, costs),
            downtime_s=self.reconfigure_s + moved,
            note="+".join(str(len(group)) for group in groups),
        )

    def _smallest(self, world: World) -> int:
        """n_0: the shortest pipeline whose stages fit the memory."""
        costs = world.profile.costs
        search = search_for(costs, None)
        for stages in range(1, search.most_stages + 1):
            ends = search.split(stages)
            assert ends is not None
            route = pipeline_route(tuple(range(stages)), ends, tuple(range(stages)))
            if fits(layout_from_routes(world.job.num_layers, (route,), tied=world.job.is_tied), costs):
                return stages
        return search.most_stages

    def _regroup(self, groups: list[list[int]], spare: list[int], smallest: int) -> list[list[int]]:
        """New workers join the shortest pipeline; short ones borrow from the longest, else merge."""
        groups = [group for group in groups if group]
        for worker in spare:
            if groups:
                min(groups, key=len).append(worker)
        while True:
            short = [group for group in groups if len(group) < smallest]
            if not short:
                break
            longest = max(groups, key=len)
            if len(longest) > smallest:
                short[0].append(longest.pop())
            elif len(groups) > 1:
                groups.remove(short[0])
                other = min(groups, key=len)
                other += short[0]
            else:
                return []
        while (
            groups and len(max(groups, key=len)) >= 2 * smallest + 2
        ):  # a join may fill a whole new pipeline
            longest = max(groups, key=len)
            groups.append([longest.pop() for _ in range(smallest)])
        return groups


class Chameleon(System):
    """Dynamic parallelism or rerouting, whichever its estimates prefer; fused backward (papers.md §1)."""

    name = "chameleon"

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        options = []
        for estimate, option in (self._rerouted(world, alive), self._dynamic(world, running, alive)):
            if option is not None and option.downtime_s < world.mtbf_s:
                # Eq. 8, with the true mean for its D.
                score = (world.mtbf_s - option.downtime_s) / world.mtbf_s / estimate
                options.append((score, option.note, option))
        if not options:
            return restarted(world, alive, "restart")
        return max(options, key=lambda one: one[:2])[2]

    def _rerouted(self, world: World, alive: tuple[int, ...]) -> tuple[float, Running | None]:
        """Eq. 13 for the estimate; the simulator for what really happens."""
        healthy = healthy_layout(world, world.workers)
        assert healthy is not None
        costs = world.profile.costs
        try:
            layout = reroute(healthy, alive, costs)
            step_s = one_f_one_b_step_s(layout, costs)
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
        """Algorithm 1's balanced partitions, estimated by Eq. 10 and filtered by Eq. 14."""
        costs = world.profile.costs
        best: tuple[float, Shape] | None = None
        search = search_for(costs, None)
        for _, pipelines in search.ranked(len(alive), world.job.num_microbatches):
            shape = search.shape(len(alive), world.job.num_microbatches, pipelines)
            rates = [_fused_rate(ends, costs) for ends in shape.ends]
            shape = replace(shape, shares=min_max_shares(world.job.num_microbatches, rates))
            estimate = max(rate.finish_s(m) for rate, m in zip(rates, shape.shares, strict=True))
            if (best is None or estimate < best[0]) and self._fits(shape, costs):
                best = (estimate, shape)
        if best is None or running.layout is None:
            return math.inf, None
        try:
            layout = place(best[1], alive, running.layout, costs)
            moved = transfer_s(plan_transfers(running.layout, layout, alive, costs), costs)
        except LayersLost:
            return math.inf, None
        return best[0], Running(
            layout=layout,
            step_s=one_f_one_b_step_s(layout, costs),
            downtime_s=world.profile.group_build_s + moved,
            note="dynamic",
        )

    def _fits(self, shape: Shape, costs: Costs) -> bool:
        for ends in set(shape.ends):
            route = pipeline_route(tuple(range(len(ends))), ends, tuple(range(len(ends))))
            if not fits(layout_from_routes(len(costs.layers), (route,), tied=costs.tied is not None), costs):
                return False
        return True


def _fused_rate(ends: tuple[int, ...], costs: Costs) -> Rate:
    """Eq. 9 for uneven stages: every microbatch at the slowest stage, and each other stage once."""
    times = [costs.spans.compute_s(a, b) for a, b in pairwise((0, *ends))]
    return Rate(head_s=sum(times) - max(times), each_s=max(times))
