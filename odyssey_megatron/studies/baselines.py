"""Other systems, modelled with the same costs and the same simulator, so that comparisons are fair.

Each model answers one question: when the cluster changes, what does the system run next, and how long does it stand
still? Rules and constants are those of the papers (named where they are used). Where the papers leave a choice, they
are read in the system's favour: all systems get Odyssey's min-max layer splits and microbatch shares, its assignment of
seats, and no profiling errors. Each system can also be combined with our scheduler (``ours``): its own rule for
layouts, and our order of the work in them. That shows what the rules alone are worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.simulate import step_end_s
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout, layout_from_routes, megatron_layout, pipeline_route
from odyssey_megatron.plan.placing.memory import activation_caps, caps_for, one_f_one_b_bytes, state_bytes
from odyssey_megatron.plan.placing.redundancy import with_keepers
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.score import START_S
from odyssey_megatron.policy.shapes.shares import Rate
from odyssey_megatron.studies.cells import CellsChange, whole_cells
from odyssey_megatron.studies.trace import FailureTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The job that all systems are asked to run."""

    job: JobSpec
    profile: Profile
    """Without messages that are kept: other systems keep none, and ours decides about them."""
    workers: tuple[int, ...]
    mtbf_s: float
    """The true mean time between failures, which Chameleon and our planner are told."""
    gpus_per_node: int = 0
    """0: not known."""
    start_s: float = START_S
    """Time that the processes of a cell take to start, until they can join the job."""
    expert_loads: tuple[tuple[int, float], ...] = ()
    """``WorkerState.expert_loads``."""

    @property
    def is_in_cells(self) -> bool:
        """Whether workers are cells of several GPUs."""
        return self.job.cell_size > 1

    @property
    def cells_fill_nodes(self) -> bool:
        """Whether every cell is on one node, or else what is left of it does not go on."""
        return self.gpus_per_node > 0 and self.gpus_per_node % self.job.cell_size == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What a system runs from now on. ``layout`` is None while it cannot run at all."""

    layout: Layout | None
    step_s: float
    downtime_s: float
    """Time that it stands still before the first step."""
    note: str = ""
    restarted: bool = False
    """Whether it was restarted from a checkpoint."""

    @property
    def going_on(self) -> Running:
        """The same after a change that does not concern it."""
        return replace(self, downtime_s=0.0, restarted=False)


def stopped(note: str) -> Running:
    """Return what a system runs that cannot run at all."""
    return Running(layout=None, step_s=math.inf, downtime_s=0.0, note=note)


def from_checkpoint(world: World, layout: Layout, step_s: float, note: str) -> Running:
    """Return a restart in ``layout``; an infinite ``step_s`` says that it does not fit.

    It costs the same for all systems, ours among them: the profile's ``restart_s``, in which the steps are that are
    done again. Nobody's steps are longer by the time that saves take.
    """
    if math.isinf(step_s):
        return stopped("out of memory")
    downtime_s = world.profile.restart_s
    return Running(layout=layout, step_s=step_s, downtime_s=downtime_s, note=note, restarted=True)


def fused(costs: Costs) -> Costs:
    """Return the same layers with weight gradients as part of input gradients, in one backward."""
    layers = tuple(
        replace(layer, input_grad_s=layer.input_grad_s + layer.weight_grad_s, weight_grad_s=0.0)
        for layer in costs.layers
    )
    return replace(costs, layers=layers)


@lru_cache(maxsize=4096)
def one_f_one_b_step_s(layout: Layout, costs: Costs) -> float:
    """Return the time of a flushed step with fused backward, in 1F1B's order; infinite if its memory is too small."""
    if not fits(layout, costs):
        return math.inf
    whole = fused(costs)
    order = order_routes(layout, whole, in_flight_cap=activation_caps(layout, whole))
    return step_end_s(layout, whole, order.done_s)


@lru_cache(maxsize=4096)
def our_step_s(layout: Layout, profile: Profile) -> float:
    """Return the step of the same layout in our order, with all memory; infinite if it does not fit."""
    try:
        order = order_routes(layout, profile.costs, in_flight_cap=caps_for(layout, profile.costs))
    except PlanInfeasible:
        return math.inf
    return step_end_s(layout, profile.costs, order.done_s)


def fits(layout: Layout, costs: Costs) -> bool:
    """Return whether state and 1F1B's activations fit on every worker: Chameleon's Eq. 14 (arXiv 2508.21613)."""
    if costs.memory_bytes is None:
        return True
    state, activations = state_bytes(layout, costs), one_f_one_b_bytes(layout, costs)
    return all(state[worker] + activations[worker] <= costs.memory_bytes for worker in state)


def pipelines_fit(lengths: Sequence[tuple[int, ...]], costs: Costs) -> bool:
    """Return whether pipelines with these stage ends fit, each alone: see :func:`fits`."""
    for ends in set(lengths):
        seats = tuple(range(len(ends)))
        route = pipeline_route(seats, ends, seats)
        if not fits(layout_from_routes(len(costs.layers), (route,), tied=costs.tied is not None), costs):
            return False
    return True


def healthy_layout(world: World, workers: Sequence[int]) -> Layout | None:
    """Return Megatron's layout on as many whole replicas as ``workers`` make; None if there is none."""
    pp = world.job.pipeline_model_parallel_size
    replicas = min(len(workers) // pp, world.job.num_microbatches)
    return megatron_on(world.job, sorted(workers)[: replicas * pp]) if replicas else None


def sliced(job: JobSpec, layout: Layout) -> Layout:
    """Return ``layout`` with optimizer state as plain Megatron has it: with a distributed optimizer in one copy, cut
    over the holders of each layer.

    It is for steps and memory alone. That such a slice is lost with its only holder is not held against other systems.
    """
    return with_keepers(layout, None, dict.fromkeys(layout.workers, 0), min(1, job.optimizer_copies))


def megatron_on(job: JobSpec, workers: Sequence[int]) -> Layout:
    """Return Megatron's layout, with the launch line's stages, on ``workers``, which make whole replicas."""
    layout = megatron_layout(
        num_layers=job.num_layers,
        tied=job.is_tied,
        pipeline_size=job.pipeline_model_parallel_size,
        num_workers=len(workers),
        num_microbatches=job.num_microbatches,
        stage_layers=job.stage_layers,
    )
    routes = tuple(
        replace(route, hops=tuple(replace(hop, worker=workers[hop.worker]) for hop in route.hops))
        for route in layout.routes
    )
    return layout_from_routes(job.num_layers, routes, tied=job.is_tied)


def expected_rate(ends: tuple[int, ...], costs: Costs, *, ours: bool) -> Rate:
    """Return the rate that is expected of a pipeline by Eq. 9 for uneven stages.

    Every microbatch takes the time of the slowest stage, and each other stage counts once. With our scheduler only the
    way to the slowest stage is added.
    """
    spans = [*pairwise((0, *ends))]
    times = [costs.spans.compute_s(a, b) for a, b in spans]
    slowest = max(range(len(times)), key=times.__getitem__)
    head_s = costs.spans.forward_s(0, spans[slowest][0]) if ours else sum(times) - max(times)
    return Rate(head_s=head_s, each_s=max(times))


class System:
    """A baseline. It is stateless: everything that it needs is in the arguments."""

    name = ""

    def __init__(self, *, ours: bool = False) -> None:
        self.ours = ours
        if ours:
            self.name = f"{self.name}, our order"

    def start(self, world: World) -> Running:
        """Return how the healthy job runs."""
        return replace(self.restarted(world, world.workers, ""), downtime_s=0.0, restarted=False)

    def cells(self, world: World, trace: FailureTrace) -> Iterable[CellsChange]:
        """Return the changes of ``trace`` as this system sees them: its cells leave as one, if it says nothing else."""
        return whole_cells(trace.changes, world.workers, world.job.cell_size)

    def go_on(self, world: World, running: Running, now: CellsChange) -> Running:
        """Return what runs after the cells changed to ``now``, one of :meth:`cells`."""
        return self.change(world, running, now.alive)

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        """Return what runs after the set of living workers, all of them whole cells, changed."""
        raise NotImplementedError

    def step_s(self, world: World, layout: Layout) -> float:
        """Return the step in 1F1B's order; with our scheduler the faster of that and our order. It is infinite if
        nothing fits.
        """
        layout = sliced(world.job, layout)
        theirs = one_f_one_b_step_s(layout, world.profile.costs)
        return min(theirs, our_step_s(layout, world.profile)) if self.ours else theirs

    def restarted(self, world: World, alive: Sequence[int], note: str) -> Running:
        """Return a restart from a checkpoint on the workers that are left, in plain Megatron's layout."""
        layout = healthy_layout(world, alive)
        if layout is None:
            return stopped(f"{note}: too few workers")
        return from_checkpoint(world, layout, self.step_s(world, layout), note)


class Restart(System):
    """Varuna's way, with plain Megatron layouts: checkpoint, stop, restart on what is left (arXiv 2111.04007)."""

    name = "restart"

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        layout = running.layout
        if (
            layout is not None
            and set(layout.workers) <= set(alive)
            and len(layout.workers) + len(layout.routes[0].hops) > len(alive)
        ):
            return running.going_on
        return self.restarted(world, alive, "restart")


class Bamboo(System):
    """Every worker also holds its successor's layers and runs their forward in each step (arXiv 2204.12013)."""

    name = "bamboo"

    def start(self, world: World) -> Running:
        return self._redundant(world, super().start(world))

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        after = self.restarted(world, alive, "")
        if running.layout is not None and self._has_all(running.layout, alive):
            after = replace(after, downtime_s=2 * world.profile.group_build_s, restarted=False)
        return self._redundant(world, after)

    def _has_all(self, layout: Layout, alive: Sequence[int]) -> bool:
        """Whether each stage has a living worker, or one before it (before the first, the last), in some pipeline."""
        there, held = set(alive), set[int]()
        for route in layout.routes:
            for before, hop in zip((route.hops[-1], *route.hops), route.hops, strict=False):
                if {before.worker, hop.worker} & there:
                    held.update(range(hop.first, hop.last))
        return len(held) == layout.num_layers

    def _redundant(self, world: World, running: Running) -> Running:
        """Return ``running`` with redundant forwards, half of which fit into bubbles; twice the state must fit into
        memory.
        """
        costs = world.profile.costs
        if running.layout is None:
            return running
        most = 2 * max(state_bytes(sliced(world.job, running.layout), costs).values())
        if costs.memory_bytes is not None and most > costs.memory_bytes:
            return stopped("out of memory")
        last = len(costs.layers)
        share = costs.spans.forward_s(0, last) / costs.spans.compute_s(0, last)
        return replace(running, step_s=running.step_s * (1 + share / 2))
