"""The way back to the first plan: exactly that plan, with nothing moved in the step that enters it."""

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.policy.decide import decide, initial_plan
from odyssey_megatron.policy.two_speed import towards
from tests.policy.test_decide import PROFILE, job

WHOLE = initial_state(nodes=(0,) * 8)


def there_and_back(copies, dead, policy="auto"):
    """The first plan, that without ``dead`` and that with all again."""
    case = {"job": replace(job(2, 16), optimizer_copies=copies), "profile": PROFILE, "now_s": 0.0}
    first = initial_plan(case["job"], WHOLE, PROFILE)
    state = WHOLE
    for rank in dead:
        state = apply(state, RankDied(rank=rank, code=-9, cause="killed", t_s=0.0))
    case |= {"config": OdysseyConfig(policy=policy), "home": first.layout}
    without = decide(state=state, previous=first, **case).plan
    return first, without, decide(state=WHOLE, previous=without, **case).plan


@pytest.mark.parametrize("copies", [0, 2, 3])
@pytest.mark.parametrize("policy", ["auto", "reroute", "replan"])
@pytest.mark.parametrize("dead", [(1,), (6,), (0, 5)])
def test_back_to_the_first_layout(copies, policy, dead):
    first, without, again = there_and_back(copies, dead, policy)
    assert again.layout == first.layout, "holders, keepers and who of them sends the weights"
    both = towards(again, current=without, state=WHOLE, profile=PROFILE)
    last = towards(again, current=both, state=WHOLE, profile=PROFILE)
    assert both.policy == "fill"
    assert both.layout.routes == without.layout.routes
    assert (last.layout, last.transfers) == (first.layout, ())
    for before, now in zip(without.layout.states, both.layout.keepers, strict=copies > 0):
        assert now[0] in before, "whoever is sent a layer cannot send its weights before they are there"
