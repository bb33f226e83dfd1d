"""The way back to the first plan: exactly that plan, with nothing moved in the step that enters it."""

import contextlib
from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.config import OdysseyConfig, policies
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.two_speed import towards
from tests.policy.test_decide import PROFILE, job

WHOLE = initial_state(nodes=(0,) * 8)


def there_and_back(
    spec: JobSpec, profile: Profile, dead: tuple[int, ...], policy: str
) -> tuple[Plan, Plan, Plan, Plan]:
    """The first plan, that without ``dead``, that with all again, and the next one on the way there."""
    case = {"job": spec, "profile": profile, "now_s": 0.0}
    first = initial_plan(spec, WHOLE, profile)
    state = WHOLE
    for rank in dead:
        state = apply(state, RankDied(rank=rank, code=-9, cause="killed", t_s=0.0))
    case |= {"config": OdysseyConfig(policy=policy), "home": first.layout}
    without = decide(state=state, previous=first, **case).plan
    again = decide(state=WHOLE, previous=without, **case).plan
    return first, without, again, towards(again, current=without, state=WHOLE, profile=profile)


def least_memory(spec: JobSpec, profile: Profile, dead: tuple[int, ...], policy: str) -> Profile:
    """``profile`` with the least memory that is enough to go on without ``dead``, in steps of 2 %."""
    memory_bytes = 1024
    while True:
        memory_bytes = memory_bytes * 51 // 50
        limited = replace(profile, costs=replace(profile.costs, memory_bytes=memory_bytes))
        with contextlib.suppress(PlanInfeasible):
            there_and_back(spec, limited, dead, policy)
            return limited


@pytest.mark.parametrize("copies", [0, 2, 3])
@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("dead", [(1,), (6,), (0, 5)])
def test_back_to_the_first_layout(copies, policy, dead):
    spec = replace(job(2, 16), optimizer_copies=copies)
    first, without, again, both = there_and_back(spec, PROFILE, dead, policy)
    assert again.layout == first.layout, "holders, keepers and who of them sends the weights"
    last = towards(again, current=both, state=WHOLE, profile=PROFILE)
    assert both.policy == "fill"
    assert both.layout.routes == without.layout.routes
    assert last.layout == first.layout
    assert both.layout.keepers == without.layout.keepers, "whoever is new is sent weights alone"
    assert copies or not last.transfers
    for one in last.transfers:
        assert one.target in both.layout.holders[one.layer], "it comes behind a step"


def test_without_memory_for_both_layouts_it_goes_there_at_once():
    """Also to keepers that are sent what they send on."""
    spec = replace(job(2, 16), optimizer_copies=2)
    limited = least_memory(spec, PROFILE, (1,), "replan")
    first, without, again, next_one = there_and_back(spec, limited, (1,), "replan")
    assert next_one.layout == again.layout == first.layout
    assert any(moved.target not in without.layout.holders[moved.layer] for moved in next_one.transfers)
