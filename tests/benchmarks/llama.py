"""Llama models with what they cost, for ``policies.py``: 32 workers, messages and sums that take their time.

Layers, head, messages, sums and bytes of state are the presets' (``odyssey_megatron/studies/presets.py``), messages
that are kept for an interrupted step are counted. Memory is what 1F1B needs on the fullest worker of the launch line's
layout (``equal``), an activation of one of its stages less (``tight``), and as much as a plan can use (``free``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout, megatron_layout
from odyssey_megatron.plan.placing.memory import fullest_bytes, one_f_one_b_bytes
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.initial import initial_plan
from tests.benchmarks.bars import Bar, at_least, at_most, kept
from tests.benchmarks.zero_bubble import summed_s, zb_v
from tests.plan.samples import preset_profile

WORKERS = 32
MEMORY = {"tight": -1, "equal": 0, "free": None}
"""Activations of a stage more than 1F1B's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Of one model."""

    model: str
    accelerator: str
    tensor: int
    stages: int
    microbatches: int
    """Of a pipeline."""

    @property
    def pipelines(self) -> int:
        return WORKERS // self.stages

    @property
    def name(self) -> str:
        tensor = f"_tp{self.tensor}" if self.tensor > 1 else ""
        return f"{self.model}{tensor}_dp{self.pipelines}_pp{self.stages}_m{self.microbatches}"


SETTINGS = (
    Setting(model="llama2-7b", accelerator="a100", tensor=1, stages=4, microbatches=16),
    Setting(model="llama2-13b", accelerator="a100", tensor=1, stages=8, microbatches=16),
    Setting(model="llama3-8b", accelerator="h100", tensor=1, stages=16, microbatches=32),
    Setting(model="llama3-70b", accelerator="h100", tensor=8, stages=8, microbatches=32),
)


def job_of(one: Setting, costs: Costs) -> JobSpec:
    return JobSpec(
        num_layers=len(costs.layers),
        pipeline_model_parallel_size=one.stages,
        tensor_model_parallel_size=1,
        num_microbatches=one.pipelines * one.microbatches,
        tokens_per_step=one.pipelines * one.microbatches,
        train_steps=1,
    )


def own_layout(job: JobSpec) -> Layout:
    return megatron_layout(
        num_layers=job.num_layers,
        pipeline_size=job.pipeline_model_parallel_size,
        num_workers=WORKERS,
        num_microbatches=job.num_microbatches,
    )


def profile_of(one: Setting, extra: int | None) -> Profile:
    """``extra``: see :data:`MEMORY`."""
    profile = preset_profile(one.model, one.accelerator, tensor_parallel_size=one.tensor)
    costs = replace(profile.costs, keeps_messages=True)
    layout = own_layout(job_of(one, costs))
    memory_bytes = 2**50
    if extra is not None:
        spans = (costs.spans.activation_bytes(hop.first, hop.last) for hop in layout.routes[0].hops)
        memory_bytes = fullest_bytes(layout, costs) + extra * max(spans)
    return replace(profile, costs=replace(costs, memory_bytes=memory_bytes), group_build_s=0.0)


def others(one: Setting, costs: Costs) -> dict[str, float]:
    """Healthy steps of what users run, whose sums, and of Megatron's messages, are taken to be hidden; but for
    ``zb_v_summed``, whose sums count as ours do.

    Megatron's, of ``chunks`` a worker: all of the slowest stage's, and the others' once, over ``chunks``. Of equal
    stages that is (M + (S - 1) / chunks) slots, Narayanan et al., arXiv 2104.04473, section 2.2.
    """
    layout = own_layout(job_of(one, costs))
    slots = [costs.spans.compute_s(hop.first, hop.last) for hop in layout.routes[0].hops]
    found = {
        name: one.microbatches * max(slots) + (sum(slots) - max(slots)) / chunks
        for name, chunks in (("1f1b", 1), ("vpp2", 2), ("vpp4", 4))
    }
    found["zb_v"], peak = zb_v(costs, one.stages, one.microbatches)
    found["zb_v_summed"] = summed_s(costs, one.stages, one.pipelines, one.microbatches)
    found["zb_v_memory"] = peak / max(one_f_one_b_bytes(layout, costs).values())
    return found


def measure(
    dead: dict[int, tuple[int, ...]], recover: Any, healthy_state: Any
) -> tuple[list[dict[str, Any]], list[Bar]]:
    """Rows, and the bars: without a failure, and what is left of the best healthy step at equal memory."""
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for one, (memory, extra) in itertools.product(SETTINGS, MEMORY.items()):
        profile = profile_of(one, extra)
        job = job_of(one, profile.costs)
        within, setting = 1.05 if extra is not None else 1.02, f"{one.name}_{memory}"
        best = initial_plan(replace(job, best_layout=True), healthy_state, profile)
        beside = others(one, profile.costs)
        rows.append(_row(f"{setting}_dead0", best, best, beside))
        bars.append(at_most(f"{setting}_dead0_over_bound", best.step_s / best.bound_s, 1.02))
        if memory != "tight":
            bars.append(
                at_least(f"{setting}_dead0_over_zb_v_summed", beside["zb_v_summed"] / best.step_s, 1.0)
            )
        for count, who in dead.items():
            name = f"{setting}_dead{count}"
            try:
                decision = recover(job, profile, who)[1]
            except PlanInfeasible as error:
                rows.append({"setting": name, "infeasible": str(error)[:200]})
                bars.append(at_most(f"{name}_has_a_plan", float("nan"), within))
                continue
            plan, proved_s = decision.plan, decision.bound_s
            rows.append({**_row(name, plan, best, beside), "proved_s": round(proved_s, 4)})
            bars.append(at_most(f"{name}_step_over_bound", plan.step_s / plan.bound_s, within))
            alive = 1 - count / WORKERS
            bars.append(kept(f"{name}_of_best_healthy", best.step_s, plan.step_s, proved_s, alive, within))
    return rows, bars


def _row(name: str, plan: Any, best: Any, beside: dict[str, float]) -> dict[str, Any]:
    return {
        "setting": name,
        "step_s": round(plan.step_s, 4),
        "bound_s": round(plan.bound_s, 4),
        "of_best_healthy": round(best.step_s / plan.step_s, 4),
        "fullest_gib": round(max(size for _, size in plan.peak_bytes) / 2**30, 1),
        "over": {
            name: round(step_s / plan.step_s, 3) for name, step_s in beside.items() if name != "zb_v_memory"
        },
        "zb_v_memory": round(beside["zb_v_memory"], 3),
        "pipelines": plan.layout.lengths,
    }
