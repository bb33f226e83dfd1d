"""The redundancy that was asked for: where workers are lost or back, and where it does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied, RankJoined
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.policy.costs.measured import Measured
from odyssey_megatron.policy.costs.profile import Observation, Profile
from odyssey_megatron.policy.decide import decide, scheduled
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.planner import PolicyPlanner
from tests.plan.samples import uniform_costs
from tests.policy.test_risk import CONFIG, JOB, PROFILE, START, struck

CALM = OdysseyConfig(mtbf_s=1e10, horizon_s=1e6)
"""No loss is to be expected: nobody would add a shadow for its score."""


def job(stages, microbatches, layers=6, **more):
    return JobSpec(
        num_layers=layers,
        pipeline_model_parallel_size=stages,
        tensor_model_parallel_size=1,
        num_microbatches=microbatches,
        tokens_per_step=1000,
        train_steps=10,
        **more,
    )


def limited(spec, workers, costs):
    """(Profile with as much memory as the first plan takes, that plan, who there is)."""
    state = initial_state(nodes=(0,) * workers)
    plan = initial_plan(spec, state, Profile(costs=costs))
    costs = replace(costs, memory_bytes=max(dict(plan.peak_bytes).values()))
    return Profile(costs=costs), initial_plan(spec, state, Profile(costs=costs)), state


def without(state, *ranks):
    for rank in ranks:
        state = apply(state, RankDied(rank=rank, code=-9, cause="killed"))
    return state


def holders_of(plan):
    """How many the layers have."""
    return {len(holders) for holders in plan.layout.holders}


def measured(plan, rank):
    """All takes half as long again as it was estimated."""
    return Measured(
        spans=tuple(
            Observation(
                first=hop.first,
                last=hop.last,
                samples=len(route.microbatches),
                step=step,
                **dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), 1.5 * (hop.last - hop.first)),
            )
            for step in range(3)
            for route in plan.layout.routes
            for hop in route.hops
            if hop.worker == rank
        )
    )


def test_state_that_cannot_be_cut_anew_stays_where_it_is():
    """Of three who keep two thirds each, two would have to keep all of it; they have no room for that."""
    spec = job(1, 6, layers=3, optimizer_copies=2)
    costs = uniform_costs(3)
    costs = replace(costs, layers=tuple(replace(one, optimizer_bytes=30) for one in costs.layers))
    profile, plan, state = limited(spec, 3, costs)
    after = decide(job=spec, state=without(state, 1), previous=plan, profile=profile, config=CALM, now_s=0.0)
    assert not after.plan.transfers
    assert after.plan.layout.routes
    verify(after.plan.layout, after.plan.schedule, profile.costs)
    assert max(dict(after.plan.peak_bytes).values()) <= profile.costs.memory_bytes


def test_without_room_for_shadows_the_job_goes_on_without():
    """One pipeline of three, each with the layers of another one: two have room for half of all layers, and no more."""
    spec, state = job(3, 3, least_holders=2), initial_state(nodes=(0,) * 3)
    costs = uniform_costs(6)
    layers = tuple(replace(one, activation_bytes=20) for one in costs.layers)
    profile = Profile(costs=replace(costs, layers=layers, memory_bytes=75))
    plan = initial_plan(spec, state, profile)
    assert holders_of(plan) == {2}
    after = decide(job=spec, state=without(state, 1), previous=plan, profile=profile, config=CALM, now_s=0.0)
    assert holders_of(after.plan) == {1}
    assert "needs 84 bytes" in " ".join(row.reason for row in after.candidates), "with shadows"


@pytest.mark.parametrize("level", [1, 2])
def test_so_many_holders_as_were_asked_for_are_there_again(level):
    """Two of four replicas are lost, and one is back: whatever that costs, as nobody waits for what moves."""
    spec, state = job(2, 12, least_holders=2 + level), initial_state(nodes=(0,) * 8)
    profile, config = Profile(costs=uniform_costs(6)), replace(CALM, policy="reroute")
    home, now = initial_plan(spec, state, profile), without(state, *range(level, 4))
    common = {"job": spec, "profile": profile, "config": config, "now_s": 0.0}
    lost = decide(state=now, previous=home, **common).plan
    assert min(holders_of(lost)) >= 2 + level
    back = apply(now, RankJoined(rank=3, node=0, incarnation=1))
    again = decide(state=back, previous=lost, home=home.layout, **common).plan
    assert min(holders_of(again)) >= 2 + level


def test_the_table_has_what_comes_behind_the_next_steps_too():
    """Both are called reroute: what is done at once, and the same with new shadows."""
    spec, state = job(2, 12, least_holders=4), initial_state(nodes=(0,) * 8)
    costs = replace(uniform_costs(6, state_bytes=10_000), link_bytes_per_s=500.0)
    planner = PolicyPlanner(OdysseyConfig(policy="reroute"))
    home = planner.start(spec, state, to_json(Profile(costs=costs))).plan
    found = planner.decide(without(state, 1), home, 0.0)
    assert found.target is not None
    assert not found.plan.transfers
    rows = [row for row in found.rows if row.name == "reroute" and row.score is not None]
    assert [row.chosen for row in rows] == [True, False]
    assert "with new shadows" in rows[1].reason


def test_shadows_that_were_asked_for_make_a_single_pipeline_as_good_as_any():
    """What it would risk without them is not held against it: ``auto``, which weighs both, comes to the same."""
    costs = replace(PROFILE, restart_s=7200.0, costs=replace(PROFILE.costs, memory_bytes=31 * 2**30))
    plan = initial_plan(JOB, START, costs)
    common = {"state": struck(), "previous": plan, "profile": costs, "now_s": 0.0}
    auto = decide(job=JOB, config=replace(CONFIG, redundancy="auto"), **common)
    asked = decide(job=replace(JOB, least_holders=2), config=CONFIG, **common)
    assert auto.best.option.note == "pipelines 17, with new shadows"
    assert asked.best.layout == auto.best.layout
    assert asked.best.score == auto.best.score


def test_layers_move_behind_steps_as_they_were_measured():
    """What is planned between two steps goes by the same costs as the plan that it leads to."""
    spec, state = job(2, 8), initial_state(nodes=(0,) * 4)
    costs = uniform_costs(6)
    planner = PolicyPlanner(replace(CALM, redundancy="off"))
    home = planner.start(spec, state, to_json(Profile(costs=costs))).plan
    planner.learn(state, home, [to_json(measured(home, rank)) for rank in range(4)], 100.0)
    planner.rehearse(state, home, 100.0)
    now = without(state, 1)
    lost = planner.decide(now, home, 100.0).plan
    back = apply(now, RankJoined(rank=1, node=0, incarnation=1))
    target = planner.decide(back, lost, 100.0).plan
    fill = planner.towards(back, lost, target)
    assert fill.policy == "fill"
    assert fill.step_s == pytest.approx(
        1.5 * scheduled("fill", fill.layout, (), back, Profile(costs=costs)).step_s
    )
