"""Two-speed recovery: go on at once by changing routes alone, and move layers behind the next steps.

Parameters and optimizer state do not change from the end of one optimizer step to the start of the next, so new holders
can be filled while forwards and backwards run. The job then waits only for the second change of groups, not for the
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.placing.redundancy import filling
from odyssey_megatron.plan.placing.transfer import plan_transfers, transfer_s
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import Decision, at_once, decide_at_once, scheduled

_VISIT_S = 30e-6
"""Time to schedule, lower and verify a microbatch's visit to a stage that was not scheduled before. Source: ``python
tests/benchmarks/planner.py``, for jobs whose pipelines are rerouted as one group.
"""

_HALVINGS = 12
"""Number of bisection steps: to less than a thousandth of the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSpeed:
    """Two plans, one after the other."""

    first: Decision
    """What is done at once; it needs no transfers."""
    after_steps: int
    """Number of its steps that hide the transfers of ``direct``."""
    direct: Decision
    tokens: float
    """Tokens expected to the horizon."""
    direct_tokens: float
    """The same if ``direct`` is done at once."""

    @property
    def now(self) -> Plan:
        return self.first.plan

    @property
    def then(self) -> Plan:
        return self.direct.plan


def two_speed(direct: Decision, config: OdysseyConfig) -> TwoSpeed | None:
    """Return the two-speed form of ``direct``; None if there is none that would be fast enough.

    There is none if ``direct`` moves nothing, or nothing can go on without moving. Expected tokens are integrals of the
    rate over the time without a failure, exponential with mean M as in :mod:`odyssey_megatron.policy.score`.
    """
    if not direct.best.transfers:
        return None
    job, profile, mean = direct.case.job, direct.case.profile, direct.case.mtbf_s
    horizon, then_s = config.horizon_s, direct.best.step_s
    hidden_s = transfer_s(direct.best.transfers, profile.costs)

    def tokens(step_s: float, start: float, end: float) -> float:
        lived = mean * (math.exp(-min(start, end) / mean) - math.exp(-end / mean))
        return job.tokens_per_step / step_s * lived

    def in_turn(first_s: float, switch_s: float, thinks_s: float = 0.0) -> float:
        began_s, switch_s = profile.group_build_s + thinks_s, switch_s + thinks_s
        return tokens(first_s, began_s, min(switch_s, horizon)) + tokens(
            then_s, switch_s + profile.group_build_s, horizon
        )

    direct_tokens = tokens(then_s, direct.best.transition_s, horizon)
    thinks_s = _thinks_s(direct.case)

    def wins(first_s: float) -> bool:
        """Return whether a first step of this length wins.

        The first plan runs for at least one step, and for as many as hide what moves. Everybody waits until it is
        worked out.
        """
        switch_s = profile.group_build_s + max(hidden_s, first_s)
        return in_turn(first_s, switch_s, thinks_s) > direct_tokens

    def longest_s(least_s: float) -> float:
        """Return the longest first step that wins, if it cannot be below ``least_s``; 0.0 if none does."""
        if least_s * math.exp(-profile.group_build_s / mean) < then_s:
            return math.inf
        return _last(wins, least_s) if wins(least_s) else 0.0  # slower steps only cost more

    # Options that move nothing have the routes of those that were tried, so they are no faster.
    limit_s = longest_s(min((one.least_step_s for *_, one in direct.options.tried if one), default=math.inf))
    if not limit_s:
        return None
    proposed = at_once(direct, limit_s)
    limit_s = longest_s(min((one.least_step_s for one in proposed.found), default=math.inf))
    if not limit_s:
        return None
    try:
        first = decide_at_once(direct, proposed, config, limit_s)
    except PlanInfeasible:
        return None
    steps = max(1, math.ceil(hidden_s / first.best.step_s))
    return TwoSpeed(
        first=first,
        after_steps=steps,
        direct=direct,
        tokens=in_turn(first.best.step_s, profile.group_build_s + steps * first.best.step_s),
        direct_tokens=direct_tokens,
    )


def _thinks_s(case: Case) -> float:
    """Return the time to work out what moves nothing; 0.0 for a single loss, which was worked out before."""
    layout = case.previous
    if len(set(layout.workers).difference(case.alive)) < 2:
        return 0.0
    return _VISIT_S * sum(len(route.microbatches) * len(route.hops) for route in layout.routes)


def _last(holds: Callable[[float], bool], low: float) -> float:
    """Return about the largest value for which ``holds``, or slightly more. It holds at ``low``, and not above some
    value.
    """
    high = 2 * low
    while holds(high) and high < math.inf:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high


def rows(both: TwoSpeed, direct: tuple[CandidateRow, ...]) -> tuple[CandidateRow, ...]:
    """Return the decision table of ``both``, made from that of going there at once."""
    now = both.first
    chosen = CandidateRow(
        name=now.policy,
        step_s=now.best.step_s,
        transition_s=now.best.transition_s,
        score=both.tokens,
        chosen=True,
        reason=f"at once, and {both.direct.policy} when its layers have moved behind about {both.after_steps} step(s)",
    )
    others = (row for row in direct if row.chosen or row.name != now.policy)
    return (chosen, *(replace(row, chosen=False) for row in others))


def towards(
    target: Plan, *, current: Plan, state: ClusterState, profile: Profile, job: JobSpec | None = None
) -> Plan:
    """Return the next plan on the way from ``current`` to ``target``. Plans are entered between two steps, and stop
    nothing. ``job``: see ``decide.scheduled``.

    First the new holders are filled behind a step of the current routes. ``target`` follows at once if only optimizer
    state moves, which a step needs at its end, or if the state of both layouts does not fit memory: then workers wait
    for what they lack.
    """
    alive, costs = state.alive, profile.costs
    transfers = plan_transfers(current.layout, target.layout, alive, costs)
    both = filling(current.layout, target.layout)
    if transfers and both.holders != current.layout.holders:
        try:
            moved = plan_transfers(current.layout, both, alive, costs)
            return scheduled("fill", both, moved, state, profile, job=job)
        except PlanInfeasible:
            pass
    return replace(target, transfers=transfers)
