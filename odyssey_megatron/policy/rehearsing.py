"""Rehearsals: likely losses are decided on while the job trains, so that a real one finds what it looks up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState, apply
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy import messages
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decided import Decided
from odyssey_megatron.policy.preparing import incidents, prepare

Decide = Callable[[ClusterState, Profile], Decided]
"""A function (who is left, profile) -> what would be decided. Raises OdysseyError if that ends the job."""


class Rehearsed(NamedTuple):
    """What rehearsals have found."""

    profile: Profile
    """The costs to decide by from now on."""
    without_messages: bool
    """Whether these are for plans without kept messages, other than the costs that were given."""
    worth: messages.Worth
    """With how many living workers messages are worth their memory."""


def rehearse(
    job: JobSpec,
    state: ClusterState,
    current: Plan,
    profile: Profile,
    now_s: float,
    *,
    decide: Decide,
    mtbf_s: Callable[[ClusterState], float],
) -> Rehearsed:
    """Decide on likely losses, those that leave most workers last: what they look up is then the freshest.

    Args:
        profile: the newest costs.
        now_s: the present, on the clock of ``state``'s times.
        mtbf_s: gives the mean time between failures for who is left.
    """
    found = [left for left in _left(state, current, now_s) if left.alive]
    without = bool(found) and _better_without(job, found[0], profile, decide, mtbf_s(found[0]))
    profile = profile.without_messages if without else profile
    prepare(job, state, profile)
    worth = messages.Worth()
    for left in sorted(found, key=lambda one: len(one.alive)):

        def decided(profile: Profile, left: ClusterState = left) -> Decided:
            return decide(left, profile)

        with contextlib.suppress(OdysseyError):
            pays = worth.known(len(left.alive)) or None
            _, used = messages.decided_with_or_without(decided, profile, job, left, pays)
            worth = worth.noted(len(left.alive), used is profile)
    return Rehearsed(profile, without, worth)


def _left(state: ClusterState, current: Plan, now_s: float) -> Iterator[ClusterState]:
    """Yield the state that each rehearsed incident leaves."""
    for incident in incidents(current, state):
        left = state
        for rank in incident:
            left = apply(left, RankDied(rank=rank, code=0, cause="rehearsal", t_s=now_s))
        yield left


def _better_without(
    job: JobSpec, left: ClusterState, profile: Profile, decide: Decide, mtbf_s: float
) -> bool:
    """Whether the first loss, of which ``left`` is left, is better mended by a plan without messages."""
    if job.eager_forwards:  # these go on by messages
        return False
    try:
        _, found = messages.planned_with_or_without(lambda one: decide(left, one).last, profile, mtbf_s)
    except OdysseyError:
        return False
    return found is not profile
