"""Whether workers keep what they send until a step's end, so that an interrupted step can go on.

That takes memory for every microbatch of a step (``Costs.keeps_messages``). Where plans with less memory are slower, or
none fits, an interrupted step is done again instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from math import inf

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decided import Decided
from odyssey_megatron.policy.shapes.pipelines import ALIKE

_FREE = 0.9
"""A plan whose fullest worker leaves more than a tenth of its memory free is hardly slower for want of memory."""

_LONG = 1.25
"""Multiple of what no step is shorter than, whatever memory there is, from which on memory may be to blame for it. Of
the rows of ``tests/benchmarks/policies.py`` with free memory none is above 1.17.
"""


def planned_with_or_without(
    make: Callable[[Profile], Plan], profile: Profile, mtbf_s: float
) -> tuple[Plan, Profile]:
    """Return the plan that ``make`` gives, and the profile that it is for: ``profile``, or without messages.

    Args:
        mtbf_s: mean time between failures. Each of them would cost half a step more without messages.

    Raises:
        PlanInfeasible: neither fits.
    """
    limit = profile.costs.memory_bytes
    if not profile.costs.keeps_messages or limit is None:
        return make(profile), profile
    without = profile.without_messages
    try:
        kept = make(profile)
    except PlanInfeasible:
        return make(without), without
    if max(size for _, size in kept.peak_bytes) <= _FREE * limit:
        return kept, profile
    other = make(without)
    worth = ALIKE + other.step_s / 2 / mtbf_s
    return (other, without) if kept.step_s > other.step_s * (1 + worth) else (kept, profile)


def decided_with_or_without(
    decide: Callable[[Profile], Decided], profile: Profile, bound_s: Callable[[], float]
) -> tuple[Decided, Profile]:
    """Return what ``decide`` gives, and the profile that it is for: ``profile``, or without messages.

    That is so where nothing fits with them, or steps are long and would be shorter without.

    Args:
        bound_s: gives a time that no step is shorter than, whatever memory there is. Called if there is a plan.

    Raises:
        PlanInfeasible: neither fits.
    """
    if not profile.costs.keeps_messages:
        return decide(profile), profile
    without = profile.without_messages
    try:
        kept = decide(profile)
    except PlanInfeasible:
        return decide(without), without
    limit_s = inf if profile.costs.memory_bytes is None else _LONG * bound_s()
    if (
        kept.plan.step_s > limit_s and kept.last.step_s > limit_s
    ):  # the last plan is worked out only if need be
        with contextlib.suppress(PlanInfeasible):
            other = decide(without)
            if other.last.step_s < kept.last.step_s * (1 - ALIKE):
                return other, without
    return kept, profile
