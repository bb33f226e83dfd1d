"""Odyssey itself on a failure trace: the planner of a job, free or held to one policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState, initial_state, with_expert_loads, without
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import ConfigError, LayersLost, PlanInfeasible
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.decided import Decided
from odyssey_megatron.policy.messages import decided_with_or_without
from odyssey_megatron.policy.planner import PolicyPlanner
from odyssey_megatron.policy.preparing import prepare_for
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

_DEFAULT = OdysseyConfig()


class Planned(NamedTuple):
    """What a job goes by."""

    job: JobSpec
    """With the layout and the redundancy that were chosen for it."""
    plan: Plan
    """Only its layout and times count: after a restart its programs have the numbers of other workers."""
    profile: Profile
    """With messages that are kept, or without (``policy/messages.py``)."""


_MOST_PREPARED = 1024
"""The largest number of workers for which is searched as thoroughly as a job does beside its steps, or for the layout
of a restart on fewer than all. It takes half a second, and half a minute for four times as many. A larger restart that
does not fit in Megatron's layout is searched for all the same.
"""


class Odyssey(System):
    """This planner, by a job's settings. It is told the true mean time between failures, and plans for four of them.

    Broken cells go on as in a job. A lost GPU is given up once its rank has been started in vain as often as
    ``--odyssey-respawn`` says, each time at most for as long as a start takes. Then the ranks of the smaller cell
    start. Where a repaired GPU completes it, it leaves between two steps, and its ranks start once more. If the others
    cannot do without it, they first take over what it alone has: it trains on for that time.
    """

    def __init__(self, config: OdysseyConfig = _DEFAULT, name: str = "odyssey") -> None:
        super().__init__(ours=True)
        self.name, self.config = name, config
        self.now: Planned | None = None
        """None: it has not started."""
        self.home: Layout | None = None
        self.left_behind = frozenset[int]()
        """The smaller cells that a restart has left behind: a job starts on whole ones."""

    def start(self, world: World) -> Running:
        self.now = self._begun(world, len(world.workers))
        plan = self.now.plan
        if world.is_in_cells:
            self.home = plan.layout
        return Running(layout=plan.layout, step_s=plan.step_s, downtime_s=0.0)

    def _begun(self, world: World, workers: int) -> Planned:
        """Return how the job begins on so many ``workers``. Raises PlanInfeasible: it does not fit."""
        # The first plan does not go by these, and so is the same for all that differ in them.
        config = replace(self._told(world), policy="auto", respawn=0, shrink="auto")
        quick = config
        if config.layout == "auto" and _MOST_PREPARED < workers < len(world.workers):
            quick = replace(config, layout=_DEFAULT.layout)
        found = _first_plan(world.job, world.profile, workers, quick)
        if isinstance(found, str) and quick != config:  # another layout may need less memory
            found = _first_plan(world.job, world.profile, workers, config)
        if isinstance(found, str):
            raise PlanInfeasible(found)
        return found

    def _told(self, world: World) -> OdysseyConfig:
        return replace(self.config, mtbf_s=world.mtbf_s, horizon_s=world.mtbf_s * 4)

    def cells(self, world: World, trace: FailureTrace) -> Iterable[CellsChange]:
        comes_back = self.config.respawn or self.config.shrink != "off"
        if not (comes_back and self.now and world.is_in_cells and world.cells_fill_nodes):
            return super().cells(world, trace)
        starts, step_s = 1 + self.config.respawn, self.now.plan.step_s
        rule = Rule(
            sizes=sizes_of(world.job, self.config),
            gpus_per_node=world.gpus_per_node,
            lost_s=away_s(starts * world.start_s, step_s),
            again_s=away_s(world.start_s, step_s),
        )
        return broken_cells(trace.changes, world.workers, rule)

    def go_on(self, world: World, running: Running, now: CellsChange) -> Running:
        self.left_behind &= now.shapes.keys()
        assert self.now is not None, "it has started"
        if running.layout is None:
            return self._restart(world, now)
        job, previous = self.now.job, replace(self.now.plan, layout=running.layout)
        state, config = without(cluster(world, now), self.left_behind), self._told(world)
        if len(state.alive) <= _MOST_PREPARED:
            prepare_for(len(state.alive), job, self.now.profile)

        def decided(profile: Profile) -> Decided:
            found = decide(
                job=job,
                state=state,
                previous=previous,
                profile=profile,
                config=config,
                now_s=0.0,
                home=self.home,
            )
            return Decided(plan=found.plan, rows=found.candidates)

        try:
            found, profile = decided_with_or_without(decided, self.now.profile, job, state)
        except (LayersLost, PlanInfeasible):
            if now.lost or set(running.layout.workers) <= set(now.alive):
                return self._restart(world, now)
            return running.going_on  # it cannot do without a cell that was to leave
        plan, note = found.plan, found.rows[0].name
        self.now = Planned(job, plan, profile)
        return Running(layout=plan.layout, step_s=plan.step_s, downtime_s=plan.transition_s, note=note)

    def _restart(self, world: World, now: CellsChange) -> Running:
        """Restart as the job would: on whole replicas of whole cells, with the plan that it begins with there."""
        self.left_behind = frozenset(now.shapes)
        whole = tuple(worker for worker in now.alive if worker not in now.shapes)
        replicas = healthy_layout(world, whole)
        if replicas is None:
            return stopped("restart: too few workers")
        try:
            begun = self._begun(world, len(replicas.workers))
        except PlanInfeasible:
            return stopped("out of memory")
        except ConfigError:  # too few for --odyssey-redundancy-level
            return stopped("restart: too few workers")
        plan = replace(begun.plan, layout=_renumbered(begun.plan.layout, replicas.workers))
        self.now = begun._replace(plan=plan)
        return from_checkpoint(world, plan.layout, plan.step_s, "restart")


def cluster(world: World, now: CellsChange | None = None) -> ClusterState:
    """Return the cluster with the cells that are there ``now``; without it, with all. All are on one node."""
    state = with_expert_loads(_whole_cluster(world.job, len(world.workers)), dict(world.expert_loads))
    if now is None:
        return state
    there = set(now.alive)
    dead = (one.worker for one in state.workers if one.worker not in there)
    return with_sizes(without(state, set(dead)), now.shapes)


@lru_cache(maxsize=64)
def _first_plan(job: JobSpec, profile: Profile, workers: int, config: OdysseyConfig) -> Planned | str:
    """Return how a job starts, which is the same on traces with the same mean time between failures; or why it does not
    fit, which may take as long to find out.

    Raises:
        ConfigError: there are too few workers for its redundancy.
    """
    planner = PolicyPlanner(config, must_fit=True)
    try:
        plan = planner.start(job, _whole_cluster(job, workers), to_json(profile)).plan
    except PlanInfeasible as error:
        return str(error)
    return Planned(planner.job, plan, planner.known.given)


def _renumbered(layout: Layout, workers: Sequence[int]) -> Layout:
    """Return ``layout``, of workers 0, 1, ..., on ``workers``, ascending."""
    return replace(
        layout,
        holders=tuple(tuple(workers[one] for one in found) for found in layout.holders),
        keepers=tuple(tuple(workers[one] for one in found) for found in layout.keepers),
        routes=tuple(
            replace(route, hops=tuple(replace(hop, worker=workers[hop.worker]) for hop in route.hops))
            for route in layout.routes
        ),
    )


@lru_cache(maxsize=4)
def _whole_cluster(job: JobSpec, workers: int) -> ClusterState:
    return initial_state(nodes=(0,) * (workers * job.cell_size), **job.cells)
