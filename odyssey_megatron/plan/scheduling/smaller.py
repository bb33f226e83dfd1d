"""A step with fewer microbatches than its plan is for: the plan without the last ones.

While the batch size grows, every step is carried out by the plan for the largest one. A schedule that is free of
deadlocks remains so if a microbatch is left out completely, on all workers: that only removes waits. So the plan does
not change between steps of different sizes, and no step waits for a new one. Routes take microbatches in turn, so each
has its share of the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one worker carries out in a step."""

    layout: Layout
    program: Program


def smaller(layout: Layout, program: Program, size: int) -> StepPlan:
    """Return what a worker with ``program`` carries out of ``layout`` in a step of the first ``size`` microbatches.

    Routes may be left without any; blocks stay as they are.
    """
    if size >= layout.num_microbatches:
        return StepPlan(layout=layout, program=program)
    routes = tuple(
        replace(route, microbatches=tuple(one for one in route.microbatches if one < size))
        for route in layout.routes
    )
    left = replace(layout, routes=routes, step_microbatches=size if layout.step_microbatches else 0)
    return StepPlan(layout=left, program=tuple(one for one in program if one.microbatch < size))
