"""Two-speed recovery: go on at once by routes alone, and move layers behind the back of the next steps.

Parameters and optimizer state do not change from the end of one optimizer step to the start of the next, so new
holders can be filled while forwards and backwards run. Only the second change of
groups is then exposed, not the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.generation import CandidateRow
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.redundancy import filling
from odyssey_megatron.plan.transfer import plan_transfers, transfer_s
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.decide import Decision, at_once, decide_at_once, scheduled
from odyssey_megatron.policy.profile import Profile

_VISIT_S = 30e-6
"""What it takes to schedule, lower and verify a microbatch's visit to a stage that nobody has scheduled before. Source:
``python tests/benchmarks/planner.py``, of jobs whose pipelines are rerouted as one group.
"""

_HALVINGS = 12
"""To a thousandth and less of what is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSpeed:
    """Two plans in a row."""

    first: Decision
    """Needs no transfers."""
    after_steps: int
    """So many steps of it hide the transfers of ``direct``."""
    direct: Decision
    tokens: float
    """Expected to the horizon."""
    direct_tokens: float
    """The same for doing what ``direct`` says at once."""

    @property
    def now(self) -> Plan:
        return self.first.plan

    @property
    def then(self) -> Plan:
        return self.direct.plan


def two_speed(direct: Decision, config: OdysseyConfig) -> TwoSpeed | None:
    """The two-speed form of ``direct``; None where it moves nothing, nothing can go on without moving, or no order of
    what can would be fast enough.

    Expected tokens are integrals of the rate over the time that no failure has come, exponential with mean M as
    in :mod:`odyssey_megatron.policy.score`.
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
        """Whether so long a step may: it takes at least one, and as many as hide what moves; all wait until it is
        worked out.
        """
        switch_s = profile.group_build_s + max(hidden_s, first_s)
        return in_turn(first_s, switch_s, thinks_s) > direct_tokens

    def longest_s(least_s: float) -> float:
        """That a step of what cannot be faster than ``least_s`` may take; 0.0 if none may."""
        if least_s * math.exp(-profile.group_build_s / mean) < then_s:
            return math.inf
        return _last(wins, least_s) if wins(least_s) else 0.0  # slower steps only cost

    # What moves nothing has the routes of what was tried: it is no faster.
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
    """How long it takes to work out what moves nothing; 0.0 of a single loss, which has been worked out before."""
    layout = case.previous
    if len(set(layout.workers).difference(case.alive)) < 2:
        return 0.0
    return _VISIT_S * sum(len(route.microbatches) * len(route.hops) for route in layout.routes)


def _last(holds: Callable[[float], bool], low: float) -> float:
    """About up to where ``holds``, which does at ``low`` and from somewhere on does not; rather more."""
    high = 2 * low
    while holds(high) and high < math.inf:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high


def rows(both: TwoSpeed, direct: tuple[CandidateRow, ...]) -> tuple[CandidateRow, ...]:
    """The decision table of ``both``, made from that of going there at once."""
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


def towards(target: Plan, *, current: Plan, state: ClusterState, profile: Profile) -> Plan:
    """The next plan on the way from ``current`` to ``target``, each entered between two steps and stopping nothing.

    First the new holders are filled behind a step of the current routes. Where only optimizer state moves, which a step
    needs at its end, ``target`` at once; and where both layouts' state does not fit memory: then its workers wait for
    what they lack.
    """
    alive, costs = state.alive, profile.costs
    transfers = plan_transfers(current.layout, target.layout, alive, costs)
    both = filling(current.layout, target.layout)
    if transfers and both.holders != current.layout.holders:
        try:
            return scheduled("fill", both, plan_transfers(current.layout, both, alive, costs), state, profile)
        except PlanInfeasible:
            pass
    return replace(target, transfers=transfers)
