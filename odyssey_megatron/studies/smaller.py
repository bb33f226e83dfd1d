"""What becomes of cells that have lost GPUs for good: which go on with fewer ranks, and by which plan."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from odyssey_megatron.cluster.cell import Shapes
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.places import left_of_cells
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.decide import Decision, decide
from odyssey_megatron.studies.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Smaller:
    """What is left of the cells that have lost GPUs."""

    sizes: Mapping[int, int]
    """Worker -> its number of ranks, of those that train again; that of a whole cell if others completed it."""
    why: str
    """The reason why all others stand by; empty: too few are left, or there are no others."""
    state: ClusterState
    decision: Decision | None
    """The plan in which they take part; None if there are none."""

    @property
    def plan(self) -> Plan | None:
        """Its plan, if any of them computes in it."""
        plan = self.decision.plan if self.decision else None
        return plan if plan and self.sizes.keys() & set(plan.layout.workers) else None

    def as_json(self) -> str:
        """Return sizes, reason and plan as a JSON object."""
        plan = "null" if self.plan is None else to_json(self.plan)
        sizes = json.dumps({str(worker): size for worker, size in self.sizes.items()})
        return f'{{"sizes":{sizes},"stands_by":{json.dumps(self.why or None)},"plan":{plan}}}'


def left_of(
    scenario: Scenario, state: ClusterState, killed: Collection[int], plan: Plan, home: Plan
) -> Smaller | None:
    """Return what is left of the cells of ``scenario`` when the GPUs of the ranks ``killed`` are given up; None if no
    cell has lost a part of its own.

    Args:
        state: the cluster without them.
        plan: the one with which the job goes on meanwhile.
        home: the healthy job's.
    """
    job, gpus, sizes = scenario.job, scenario.gpus_per_node, dict[int, int]()
    if not killed or job.cell_size == 1:
        return None
    why = stands_by(job, scenario.config, gpus)
    for node in sorted({rank // gpus for rank in killed}):
        slots = {rank: rank % gpus for rank in range(node * gpus, (node + 1) * gpus)}
        lost = [rank % gpus for rank in killed if rank // gpus == node]
        whole_job = gpus == len(scenario.state.ranks)
        sizes |= left_of_cells(slots, lost, sizes_of(job, scenario.config), whole_job=whole_job)
    here = {worker: size for worker, size in sizes.items() if size}
    if not here:
        return Smaller(sizes=here, why=why, state=state, decision=None)
    after = with_sizes(state, here)
    try:
        decision = decide(
            job=job,
            state=after,
            previous=plan,
            profile=scenario.profile,
            config=scenario.config,
            now_s=0.0,
            home=home.layout,
        )
    except (LayersLost, PlanInfeasible):
        decision = None
    return Smaller(sizes=here, why=why if len(here) < len(sizes) else "", state=after, decision=decision)


def sizes_of(job: JobSpec, config: OdysseyConfig) -> tuple[int, ...]:
    """Return the numbers of ranks that a cell may have by ``--odyssey-shrink``, descending: the whole one's first."""
    return (job.cell_size,) if config.shrink == "off" else job.cell_sizes


def stands_by(job: JobSpec, config: OdysseyConfig, gpus_per_node: int) -> str:
    """Return the reason why what is left of a broken cell stands by, or some of its ranks do; empty: there is none."""
    if job.cell_size > gpus_per_node:
        return "cells of ranks on several nodes do not go on with fewer"
    if config.shrink == "off":
        return "--odyssey-shrink off"
    return job.whole_cells_only or job.whole_shards_only or job.even_gangs_only


def with_sizes(state: ClusterState, sizes: Shapes) -> ClusterState:
    """Return ``state`` in which the workers in ``sizes`` live with these numbers of ranks."""
    workers = (
        replace(one.whole.smaller(sizes[one.worker] % state.cell_size), alive=True)
        if one.worker in sizes
        else one
        for one in state.workers
    )
    return replace(state, workers=tuple(workers))
