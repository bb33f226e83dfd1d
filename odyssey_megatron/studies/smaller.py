"""What ``odyssey plan`` says of cells that have lost GPUs for good: which go on with fewer ranks, and by which plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from odyssey_megatron.cluster.places import left_of_cells
from odyssey_megatron.cluster.state import ClusterState
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


def left_of(
    scenario: Scenario, state: ClusterState, killed: Collection[int], plan: Plan, home: Plan
) -> Smaller:
    """Return what is left of the cells of ``scenario`` when the GPUs of the ranks ``killed`` are given up.

    Args:
        state: the cluster without them.
        plan: the one with which the job goes on meanwhile.
        home: the healthy job's.
    """
    job, gpus, sizes = scenario.job, scenario.gpus_per_node, dict[int, int]()
    is_off = scenario.config.shrink == "off"
    for node in sorted({rank // gpus for rank in killed}):
        slots = {rank: rank % gpus for rank in range(node * gpus, (node + 1) * gpus)}
        lost = [rank % gpus for rank in killed if rank // gpus == node]
        sizes |= left_of_cells(slots, lost, (job.cell_size,) if is_off else job.cell_sizes)
    here = {worker: size for worker, size in sizes.items() if size}
    why = job.whole_cells_only or job.whole_shards_only or job.even_gangs_only
    if is_off:
        why = "--odyssey-shrink off"
    if job.cell_size > gpus:
        why = "cells of ranks on several nodes do not go on with fewer"
    if not here:
        return Smaller(sizes=here, why=why, state=state, decision=None)
    after = replace(
        state,
        workers=tuple(
            replace(one.smaller(here[one.worker] % job.cell_size), alive=True) if one.worker in here else one
            for one in state.workers
        ),
    )
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
