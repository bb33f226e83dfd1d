"""Odyssey itself on a failure trace: the planner of a job, free or held to one policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState, initial_state, with_expert_loads, without
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.redundancy import with_keepers, with_shadows
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide, scheduled
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.replacing import away_s
from odyssey_megatron.studies.baselines import (
    Running,
    System,
    World,
    from_checkpoint,
    healthy_layout,
    stopped,
)
from odyssey_megatron.studies.cells import CellsChange, Rule, broken_cells
from odyssey_megatron.studies.smaller import sizes_of, with_sizes
from odyssey_megatron.studies.trace import FailureTrace


class Odyssey(System):
    """This planner, free or held to one policy, with ``--odyssey-layout``, ``-respawn`` and ``-shrink``.

    Broken cells go on as in a job. A lost GPU is given up once its rank has been started in vain as often as
    ``--odyssey-respawn`` says, each time at most for as long as a start takes. Then the ranks of the smaller cell
    start. Where a repaired GPU completes it, it leaves between two steps, and its ranks start once more. If the others
    cannot do without it, they first take over what it alone has: it trains on for that time.
    """

    def __init__(
        self,
        policy: str = "auto",
        layout: str = "megatron",
        respawn: int = 0,
        shrink: str = "auto",
        name: str = "",
    ) -> None:
        super().__init__(ours=True)
        self.name = name or ("odyssey" if policy == "auto" else f"only {policy}")
        if layout != "megatron":
            self.name += f", layout {layout}"
        self.config = OdysseyConfig(policy=policy, layout=layout, respawn=respawn, shrink=shrink)
        self.plan: Plan | None = None
        self.home: Layout | None = None
        self.left_behind = frozenset[int]()
        """The smaller cells that a restart has left behind: a job starts on whole ones."""

    def start(self, world: World) -> Running:
        job = replace(world.job, best_layout=self.config.layout == "auto")
        self.plan = _first_plan(job, world.profile, len(world.workers))
        if world.is_in_cells:
            self.home = self.plan.layout
        return Running(layout=self.plan.layout, step_s=self.plan.step_s, downtime_s=0.0)

    def cells(self, world: World, trace: FailureTrace) -> Iterable[CellsChange]:
        comes_back = self.config.respawn or self.config.shrink != "off"
        if not (comes_back and self.plan and world.is_in_cells and world.cells_fill_nodes):
            return super().cells(world, trace)
        starts, step_s = 1 + self.config.respawn, self.plan.step_s
        rule = Rule(
            sizes=sizes_of(world.job, self.config),
            gpus_per_node=world.gpus_per_node,
            lost_s=away_s(starts * world.start_s, step_s),
            again_s=away_s(world.start_s, step_s),
        )
        return broken_cells(trace.changes, world.workers, rule)

    def go_on(self, world: World, running: Running, now: CellsChange) -> Running:
        self.left_behind &= now.shapes.keys()
        if self.plan is None or running.layout is None:
            return self._restart(world, now)
        config = replace(self.config, mtbf_s=world.mtbf_s, horizon_s=world.mtbf_s * 4)
        try:
            decision = decide(
                job=world.job,
                state=without(cluster(world, now), self.left_behind),
                previous=replace(self.plan, layout=running.layout),
                profile=world.profile,
                config=config,
                now_s=0.0,
                home=self.home,
            )
        except (LayersLost, PlanInfeasible):
            if now.lost or set(running.layout.workers) <= set(now.alive):
                return self._restart(world, now)
            return running.going_on  # it cannot do without a cell that was to leave
        self.plan = decision.plan
        return Running(
            layout=self.plan.layout,
            step_s=self.plan.step_s,
            downtime_s=self.plan.transition_s,
            note=decision.candidates[0].name,
        )

    def _restart(self, world: World, now: CellsChange) -> Running:
        """Restart as other systems do, in the launch line's layout on whole cells, but in our order."""
        self.left_behind = frozenset(now.shapes)
        whole = tuple(worker for worker in now.alive if worker not in now.shapes)
        layout = healthy_layout(world, whole)
        if layout is None:
            return stopped("restart: too few workers")
        state = without(cluster(world, now), self.left_behind)
        nodes = dict.fromkeys(whole, 0)
        layout = with_shadows(layout, None, nodes, world.job.least_holders, world.profile.costs)
        layout = with_keepers(layout, None, nodes, world.job.optimizer_copies)
        try:
            self.plan = scheduled("restart", layout, (), state, world.profile)
        except PlanInfeasible:
            return stopped("out of memory")
        return from_checkpoint(world, layout, self.plan.step_s, "restart")


def cluster(world: World, now: CellsChange | None = None) -> ClusterState:
    """Return the cluster with the cells that are there ``now``; without it, with all. All are on one node."""
    state = with_expert_loads(_whole_cluster(world.job, len(world.workers)), dict(world.expert_loads))
    if now is None:
        return state
    there = set(now.alive)
    dead = (one.worker for one in state.workers if one.worker not in there)
    return with_sizes(without(state, set(dead)), now.shapes)


@lru_cache(maxsize=8)
def _first_plan(job: JobSpec, profile: Profile, workers: int) -> Plan:
    """Return the healthy job's plan, which is the same on all traces."""
    return initial_plan(job, _whole_cluster(job, workers), profile)


@lru_cache(maxsize=4)
def _whole_cluster(job: JobSpec, workers: int) -> ClusterState:
    return initial_state(nodes=(0,) * (workers * job.cell_size), **job.cells)
