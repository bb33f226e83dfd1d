"""A step of fewer microbatches than its plan is for: what is left of the plan without the last of them.

While a batch size grows, every step is carried out by the plan of the largest. A schedule that is free of deadlocks
remains so without a microbatch, left out as a whole and everywhere: that only removes waits. So no plan changes between
two steps of different sizes, and no step waits for one. Routes take microbatches in turn: each has its share of the
first.
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
    """Of the first ``size`` microbatches. Routes may be left without any; blocks stay as they are."""
    if size >= layout.num_microbatches:
        return StepPlan(layout=layout, program=program)
    routes = tuple(
        replace(route, microbatches=tuple(one for one in route.microbatches if one < size))
        for route in layout.routes
    )
    left = replace(layout, routes=routes, step_microbatches=size if layout.step_microbatches else 0)
    return StepPlan(layout=left, program=tuple(one for one in program if one.microbatch < size))
