"""Layers take more memory than the estimates say: ranks run out of it until plans fit what there really is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied, RankJoined
from odyssey_megatron.cluster.state import Share, apply, initial_state
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.placing.memory import per_rank
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.heavier import Heavier
from odyssey_megatron.policy.planner import PolicyPlanner
from tests.plan.samples import preset_profile, uniform_costs
from tests.plan.second import Second, held_bytes
from tests.policy.test_risk import JOB
from tests.policy.test_share import COSTS, SMALL, computing, returned

PROFILE = preset_profile("llama2-7b", "a100")
BYTES = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
START = initial_state(nodes=(0,) * 16)


def really(costs, **times):
    """``costs`` whose layers keep so many times what they say: ``head`` or ``others``."""
    layers = [
        replace(
            one,
            activation_bytes=int(
                one.activation_bytes * times["head" if one is costs.layers[-1] else "others"]
            ),
        )
        for one in costs.layers
    ]
    return replace(costs, layers=tuple(layers))


def too_full(plan, costs, room_bytes):
    """The workers that really need more than there is."""
    second = Second(plan.schedule.to_text(), costs, {}, plan.layout.copies)
    peaks = second.peak_bytes(held_bytes(plan.layout, costs))
    return [worker for worker, size in peaks.items() if size > room_bytes]


@pytest.mark.parametrize("times", [{"head": 1.0, "others": 1.3}, {"head": 5.0, "others": 1.0}])
@pytest.mark.parametrize("is_known", [True, pytest.param(False, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("dead", [None, 3])
@pytest.mark.parametrize("at_once", [1, 16])
def test_plans_fit_at_last(times, is_known, dead, at_once):
    """Soon where it is known how much memory there is, as on GPUs, and then hardly slower than plans of somebody who
    knows what layers take.
    """
    room_bytes = 21 * 2**30
    costs = replace(PROFILE.costs, memory_bytes=room_bytes if is_known else None)
    true = really(costs, **times)
    planners = [PolicyPlanner(OdysseyConfig(device="cpu")) for _ in range(2)]
    plan, best = (
        one.start(JOB, START, to_json(replace(PROFILE, costs=known))).plan
        for one, known in zip(planners, (costs, replace(true, memory_bytes=room_bytes)), strict=True)
    )
    state = START
    if dead is not None:
        state = apply(state, RankDied(rank=dead, code=-9, cause="killed", t_s=0.0))
        plan, best = (
            one.decide(state, was, 100.0).plan for one, was in zip(planners, (plan, best), strict=True)
        )
    assert too_full(plan, true, room_bytes)
    tries = 0
    while full := too_full(plan, true, room_bytes):
        tries += 1
        assert tries <= 20, "more in a row would end the job"
        for worker in full[:at_once]:
            planners[0].ran_out(plan, worker, state)
        try:
            plan = planners[0].decide(state, plan, 100.0).plan
        except PlanInfeasible:  # the job goes on without these ranks
            for worker in full[:at_once]:
                state = apply(state, RankDied(rank=worker, code=-9, cause="memory", t_s=0.0))
            tries = 0
            plan = planners[0].decide(state, plan, 100.0).plan
    assert len(state.alive) >= 14
    if is_known and dead is not None:
        assert tries <= (5 if at_once == 1 and times["others"] > 1.0 else 2)
        assert plan.step_s < 1.1 * best.step_s
    again = planners[0].decide(state, plan, 200.0).plan
    assert not too_full(again, true, room_bytes), "it stays so"


def test_the_plan_behind_whose_step_a_rank_is_filled_goes_by_it_too():
    job = replace(JOB, num_layers=10, pipeline_model_parallel_size=2, num_microbatches=8)
    costs = replace(uniform_costs(8, ends=True, activation_bytes=4), memory_bytes=80)
    planner, true = PolicyPlanner(OdysseyConfig(device="cpu")), really(costs, head=1.0, others=1.5)
    state = apply(initial_state(nodes=(0,) * 4), RankDied(rank=3, code=-9, cause="killed"))
    home = planner.start(job, initial_state(nodes=(0,) * 4), to_json(Profile(costs=costs))).plan
    plan = planner.decide(state, home, 100.0).plan
    for worker in too_full(plan, true, 80):
        planner.ran_out(plan, worker, state)
    plan = planner.decide(state, plan, 100.0).plan
    back = apply(state, RankJoined(rank=3, node=0, incarnation=1))
    target = planner.decide(back, plan, 200.0).plan
    fill = planner.towards(back, plan, target)
    assert fill.policy == "fill"
    assert [too_full(one, true, 80) for one in (plan, fill, target)] == [[], [], []]


def test_of_a_smaller_cell_its_own_ranks_are_what_has_run_out():
    """After it the same plan would need as much as a rank is taken to have needed, and not more or less."""
    memory_bytes, shares = 100_000, {SMALL: Share(0.5)}
    layers = [replace(one, **{name: 1000 * getattr(one, name) for name in BYTES}) for one in COSTS.layers]
    costs = replace(COSTS, layers=tuple(layers), memory_bytes=memory_bytes)
    plan = returned(0.5, costs=costs, memory_bytes=memory_bytes)[1].plan
    assert SMALL in computing(plan)
    known = Heavier().after(plan, SMALL, costs, shares).applied(costs)
    peaks = Second(plan.schedule.to_text(), known, {}, plan.layout.copies).peak_bytes(
        held_bytes(plan.layout, known)
    )
    needed = dict(per_rank(tuple(peaks.items()), shares, plan.layout, known))[SMALL]
    assert needed == pytest.approx(memory_bytes / 0.85, rel=0.01)


def test_at_last_no_plan_helps():
    planner = PolicyPlanner(OdysseyConfig(device="cpu"))
    plan = planner.start(replace(JOB, num_microbatches=16), START, to_json(PROFILE)).plan
    tries = 0
    with pytest.raises(PlanInfeasible):  # noqa: PT012
        while tries < 40:
            tries += 1
            planner.ran_out(plan, 15, START)
            plan = planner.decide(START, plan, 100.0).plan
    assert tries < 40
    assert planner.decide(START, plan, 100.0).plan, "what was tried is taken back"
