"""Flags that a job would be better off with, each tried before it is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.names import layer_names
from odyssey_megatron.plan.placing.redundancy import with_keepers
from odyssey_megatron.plan.placing.spread import on_one_node, spread
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.messages import planned_with_or_without
from odyssey_megatron.policy.score import mean_time_between_failures_s
from odyssey_megatron.studies.losses import alone
from odyssey_megatron.studies.scenario import Scenario

_STANDBY = "--odyssey-redundancy state"

WORTH = 0.01
"""A layout that is faster by less than this share is not recommended."""


def started(scenario: Scenario, job: JobSpec) -> Plan:
    """Return the plan that ``job`` would start with, with or without kept messages. Raises PlanInfeasible."""
    state, config = scenario.state, scenario.config
    mtbf_s = mean_time_between_failures_s(state, config.mtbf_s, state.started_s)
    return planned_with_or_without(
        lambda profile: initial_plan(job, state, profile), scenario.profile, mtbf_s
    )[0]


def suggested(
    scenario: Scenario, job: JobSpec, before: Plan, best: Plan, after: Plan
) -> Iterator[tuple[str, str]]:
    """Yield (flag, why) for flags that the job does not have.

    Args:
        job: as it was planned.
        before: the healthy job's plan.
        best: the best plan of the healthy job, whatever the launch line's layout.
        after: the plan that lasts until the next loss.
    """
    config, nodes = scenario.config, scenario.state.nodes
    if config.mode != "recover":
        yield "--odyssey", "to survive at all"
    gain = before.step_s / best.step_s - 1
    faster = config.layout != "auto" and gain >= WORTH
    whys = [f"a healthy job has {gain:.1%} more throughput"] if faster else []
    apart = spread((best if faster else before).layout, nodes, job.optimizer_copies)
    # As a job that begins with this layout has them:
    apart = with_keepers(apart, None, nodes, job.optimizer_copies)
    if on_one_node(before.layout, nodes) and not on_one_node(apart, nodes):
        whys.append("the loss of any one node is survived, too")
    if whys:
        yield f"--odyssey-layout {'auto' if faster else 'spread'}", "; ".join(whys)
    if config.redundancy != "off" or not (single := alone(before.layout) or alone(after.layout)):
        return
    names = names_of(single, before)
    when = "" if alone(before.layout) else " after this loss"
    # Either flag is enough, and this one costs memory.
    needless = bool(faster and not alone(best.layout) and not when)
    why = f"without a second holder{when}: {names}"
    if needless:
        yield _STANDBY, f"{why}; not needed with --odyssey-layout auto"
    else:
        yield _standby(
            scenario, replace(job, best_layout=job.best_layout or faster), best if faster else before, why
        )


def _standby(scenario: Scenario, job: JobSpec, usual: Plan, why: str) -> tuple[str, str]:
    """Return the flag that gives each layer a second holder, with its price beside ``usual``, the plan without it; or
    no flag, and why it cannot be had.
    """
    least = replace(scenario.config, redundancy="state").least_holders
    try:
        plan = started(scenario, replace(job, least_holders=least))
    except PlanInfeasible as error:
        return "", f"{why}; {_STANDBY} would not fit: {error}"
    longer = plan.step_s / usual.step_s - 1
    return _STANDBY, f"{why}; a healthy step takes {max(0.0, longer):.1%} longer"


def names_of(layers: Sequence[int], plan: Plan) -> str:
    """Return ascending ``layers`` in words."""
    total = plan.layout.num_layers
    if len(layers) in (0, total):
        return "all layers" if layers else "no layers"
    return layer_names(list(layers), total)
