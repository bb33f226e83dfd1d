"""Whether workers keep what they send until a step's end, so that an interrupted step can go on.

That takes memory for every microbatch of a step (``Costs.keeps_messages``). Where plans with less memory are slower, or
none fits, an interrupted step is done again instead.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.bound import cluster_bound_s
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.case import worker_speeds
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decided import Decided
from odyssey_megatron.policy.shapes.pipelines import ALIKE

T = TypeVar("T")

_FREE = 0.9
"""A plan whose fullest worker leaves more than a tenth of its memory free is hardly slower for want of memory."""

_LONG = 1.25
"""Multiple of what no step is shorter than, whatever memory there is, from which on memory may be to blame for it. Of
the rows of ``tests/benchmarks/policies.py`` with free memory none is above 1.17.
"""


class Worth(NamedTuple):
    """With how many living workers messages are worth their memory, as far as that has been worked out.

    With more workers each of them has less state. So what holds with some number holds with more, or with fewer.
    """

    fewest: int = sys.maxsize
    """The least number with which they are."""
    most: int = 0
    """The largest number with which they are not."""

    def known(self, workers: int) -> bool | None:
        """Return whether they are worth it with so many workers; None if that is not known."""
        return True if workers >= self.fewest else False if workers <= self.most else None

    def noted(self, workers: int, pays: bool) -> Worth:
        """Return what is known once it has been worked out for so many workers."""
        if pays:
            return self._replace(fewest=min(self.fewest, workers))
        return self._replace(most=max(self.most, workers))


def planned_with_or_without(
    make: Callable[[Profile], Plan], profile: Profile, mtbf_s: float
) -> tuple[Plan, Profile]:
    """Return the plan that ``make`` gives, and the profile that it is for: ``profile``, or without messages.

    Args:
        mtbf_s: mean time between failures. Each of them would cost half a step more without messages.

    Raises:
        PlanInfeasible: neither fits.
    """
    kept, fits = _fitting(make, profile)
    limit = fits.costs.memory_bytes
    if not fits.costs.keeps_messages or limit is None:
        return kept, fits
    if max(size for _, size in kept.peak_bytes) <= _FREE * limit:
        return kept, fits
    without = profile.without_messages
    other = make(without)
    worth = ALIKE + other.step_s / 2 / mtbf_s
    return (other, without) if kept.step_s > other.step_s * (1 + worth) else (kept, fits)


def decided_with_or_without(
    decide: Callable[[Profile], Decided],
    profile: Profile,
    job: JobSpec,
    state: ClusterState,
    pays: bool | None = None,
) -> tuple[Decided, Profile]:
    """Return what ``decide`` gives for ``state``, and the profile that it is for: ``profile``, or without messages.

    That is so where nothing fits with them, or steps are long and would be shorter without. Forwards that run ahead
    need messages.

    Args:
        pays: whether messages are known to be worth their memory; None: not known.

    Raises:
        PlanInfeasible: neither fits.
    """
    if job.eager_forwards:
        return decide(profile), profile
    if pays is False and profile.costs.keeps_messages:
        profile = profile.without_messages
    kept, fits = _fitting(decide, profile)
    if pays or not fits.costs.keeps_messages or fits.costs.memory_bytes is None:
        return kept, fits
    speeds = worker_speeds(state)
    limit_s = _LONG * cluster_bound_s(job.num_microbatches, profile.costs, state.alive, speeds)
    # The plan that it comes to is worked out only if need be.
    if kept.plan.step_s > limit_s and kept.last.step_s > limit_s:
        without = profile.without_messages
        with contextlib.suppress(PlanInfeasible):
            other = decide(without)
            if other.last.step_s < kept.last.step_s * (1 - ALIKE):
                return other, without
    return kept, fits


def _fitting(make: Callable[[Profile], T], profile: Profile) -> tuple[T, Profile]:
    """Return what ``make`` gives for ``profile``, or, if nothing fits with messages, for the same without.

    Raises PlanInfeasible.
    """
    try:
        return make(profile), profile
    except PlanInfeasible:
        if not profile.costs.keeps_messages:
            raise
    without = profile.without_messages
    return make(without), without
