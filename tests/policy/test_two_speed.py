import math
from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.placing.slices import NOBODY
from odyssey_megatron.policy.decide import at_once, decide, decide_at_once
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.two_speed import towards, two_speed
from tests.policy.test_decide import PROFILE, job


def both(spec, link_bytes_per_s, **config):
    """The plan at once, that in two steps, and the case that they are for."""
    profile = replace(PROFILE, costs=replace(PROFILE.costs, link_bytes_per_s=link_bytes_per_s))
    state = initial_state(nodes=(0,) * 8)
    before = initial_plan(spec, state, profile)
    state = apply(state, RankDied(rank=2, code=-9, cause="killed", t_s=0.0))
    arguments = {
        "job": spec,
        "state": state,
        "previous": before,
        "profile": profile,
        "config": OdysseyConfig(mtbf_s=1e9, horizon_s=1e4, **config),
        "now_s": 0.0,
    }
    direct = decide(**arguments)
    return direct, two_speed(direct, arguments["config"]), arguments


def test_bytes_hide_behind_steps():
    """A slow link: moving takes seconds, in which the rerouted steps train on."""
    direct, plans, case = both(job(4), link_bytes_per_s=1e7)
    profile = case["profile"]
    moving_s = direct.plan.transition_s - profile.group_build_s
    assert moving_s > 0.5
    assert plans.now.transfers == ()
    assert plans.then == direct.plan
    assert plans.after_steps == math.ceil(moving_s / plans.now.step_s)
    # Some steps more at first, for a second change of groups and the last of them outlasting the transfer.
    later_s = profile.group_build_s + plans.after_steps * plans.now.step_s - moving_s
    steps = (plans.tokens - plans.direct_tokens) / 4096
    assert steps == pytest.approx(plans.after_steps - later_s / plans.then.step_s, rel=0.01)
    assert steps > 0


def test_lost_copies_of_optimizer_state_are_made_anew_behind_a_step():
    """Nobody waits for them: each layer has a keeper left, and its holders have the weights."""
    spec = replace(job(2, 16), optimizer_copies=2)
    _, plans, case = both(spec, link_bytes_per_s=5e6, policy="reroute")
    assert {len(one) for owners in plans.now.layout.owners for one in owners} == {1, 2}
    assert {len(one) for owners in plans.then.layout.owners for one in owners} == {2}
    for before, now in zip(case["previous"].layout.keepers, plans.now.layout.keepers, strict=True):
        assert now == tuple(NOBODY if worker == 2 else worker for worker in before)
    assert plans.tokens > plans.direct_tokens
    following = towards(plans.then, current=plans.now, state=case["state"], profile=case["profile"])
    assert following.layout == plans.then.layout, "in one change of plan"
    for moved in following.transfers:
        assert moved.target in plans.now.layout.holders[moved.layer]


def test_a_fast_link_has_nothing_to_hide():
    direct, plans, _ = both(job(4), link_bytes_per_s=1e12)
    assert direct.best.transfers
    assert plans is None


@pytest.mark.parametrize("link_bytes_per_s", [1e7, 3e7, 1e8, 3e8, 1e9, 1e10])
@pytest.mark.parametrize("spec", [job(4), job(2, 16), job(4, 32)])
def test_what_is_not_worked_out_comes_to_fewer_tokens(spec, link_bytes_per_s):
    """It has some steps more at first, and begins the final ones later."""
    direct, plans, case = both(spec, link_bytes_per_s=link_bytes_per_s)
    if plans is not None or not direct.best.transfers:
        return
    first_s = decide_at_once(direct, at_once(direct), case["config"]).best.step_s
    build_s, then_s = case["profile"].group_build_s, direct.best.step_s
    moving_s = direct.best.transition_s - build_s
    more_steps = max(1, math.ceil(moving_s / first_s))
    later_s = 2 * build_s + more_steps * first_s - direct.best.transition_s
    assert more_steps < 1.001 * later_s / then_s
