"""Flags that a job would be better off with, each tried before it is named."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.names import layer_names
from odyssey_megatron.plan.placing.redundancy import with_keepers
from odyssey_megatron.plan.placing.spread import on_one_node, spread
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.decide import Decision, decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.messages import planned_with_or_without
from odyssey_megatron.policy.score import mean_time_between_failures_s
from odyssey_megatron.studies.answer import WhatIf
from odyssey_megatron.studies.losses import alone
from odyssey_megatron.studies.scenario import Scenario
from odyssey_megatron.studies.smaller import left_of

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


def suggested(answer: WhatIf, job: JobSpec, killed: Collection[int]) -> Iterator[tuple[str, str]]:
    """Yield (flag, why) for flags that the job does not have.

    Args:
        answer: but for the flags and the next losses.
        job: as it was planned.
        killed: the ranks whose GPUs are dead.
    """
    scenario, before, best = answer.scenario, answer.before, answer.best
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
    if config.redundancy != "off":
        return
    if single := alone(before.layout):
        why = f"without a second holder: {names_of(single, before)}"
        if faster and not alone(best.layout):
            # Either flag is enough, and this one costs memory.
            yield _STANDBY, f"{why}; not needed with --odyssey-layout auto"
        else:
            job = replace(job, best_layout=job.best_layout or faster)
            yield _standby(scenario, job, best if faster else before, why)
    elif answer.lasting_decision and (single := alone(answer.lasting[0].layout)):
        why = f"without a second holder after this loss: {names_of(single, before)}"
        yield _standby_after(answer, job, killed, answer.lasting_decision, why)


def _standby(scenario: Scenario, job: JobSpec, usual: Plan, why: str) -> tuple[str, str]:
    """Return the flag that gives each layer a second holder, with its price beside ``usual``, the plan without it; or
    no flag, and why it cannot be had.
    """
    try:
        plan = started(scenario, _with_standby(job, scenario.config))
    except PlanInfeasible as error:
        return "", f"{why}; {_STANDBY} would not fit: {error}"
    return _STANDBY, f"{why}; {_price(plan, usual)}"


def _standby_after(
    answer: WhatIf, job: JobSpec, killed: Collection[int], without: Decision, why: str
) -> tuple[str, str]:
    """Return the flag with its price after the loss, beside the decision ``without`` it; or no flag, if the job is
    better off without.
    """
    scenario, config = answer.scenario, replace(answer.scenario.config, redundancy="state")
    job = _with_standby(job, config)
    try:
        usual = started(scenario, job)
        begun = replace(scenario.started_with(job, usual), config=config)
        decision = decide(
            job=job, state=answer.state, previous=usual, profile=begun.profile, config=config, now_s=0.0
        )
    except PlanInfeasible as error:
        return "", f"{why}; {_STANDBY} would not fit: {error}"
    except LayersLost as error:  # where the job begins with another layout for the flag
        return "", f"{why}; with {_STANDBY} this loss would end the job: {error}"
    smaller = left_of(begun, answer.state, killed, decision.plan, usual)
    if smaller and smaller.plan and smaller.decision:
        decision = smaller.decision
    if alone(decision.best.layout):
        return "", f"{why}; {_STANDBY} finds no room for one"
    steps = f"steps of {decision.best.step_s * 1e3:.1f} ms in place of {without.best.step_s * 1e3:.1f} ms"
    if decision.best.score < without.best.score:
        return "", f"{why}; {_STANDBY} would cost more than the risk: {steps} after this loss"
    return _STANDBY, f"{why}; {steps} after it, and {_price(usual, answer.before)}"


def _with_standby(job: JobSpec, config: OdysseyConfig) -> JobSpec:
    return replace(job, least_holders=replace(config, redundancy="state").least_holders)


def _price(plan: Plan, usual: Plan) -> str:
    return f"a healthy step takes {max(0.0, plan.step_s / usual.step_s - 1):.1%} longer"


def names_of(layers: Sequence[int], plan: Plan) -> str:
    """Return ascending ``layers`` in words."""
    total = plan.layout.num_layers
    if {*range(total)} <= {*layers}:  # a tied weight comes on top of these
        return "all layers"
    return layer_names(list(layers), total) if layers else "no layers"
