"""Workers that have some of a whole cell's ranks: slower, and each of their ranks with more bytes."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from odyssey_megatron.cluster.events import RankDied, RankJoined
from odyssey_megatron.cluster.state import Share, apply, initial_state, with_speeds
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.simulate import simulate
from odyssey_megatron.plan.layout import Hop, Route, layout_from_routes
from odyssey_megatron.plan.placing.memory import (
    activation_caps,
    caps_for,
    fullest_bytes,
    per_rank,
    state_bytes,
)
from odyssey_megatron.policy.case import worker_shares, worker_speeds
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.planner import PolicyPlanner
from tests.plan.samples import uniform_costs
from tests.policy.test_decide import check, job, kill

COSTS = uniform_costs(12, ends=True)
SMALL = 4


def returned(share, *, costs=COSTS, memory_bytes=None, speed=1.0):
    """What is decided once worker 4, of two pipelines of four stages, is back with ``share`` of its ranks."""
    costs = replace(costs, memory_bytes=memory_bytes)
    spec, state, profile = job(4, 24, 14), initial_state(nodes=(0,) * 8), Profile(costs=costs)
    home = initial_plan(spec, state, profile)
    common = {
        "job": spec,
        "profile": profile,
        "config": OdysseyConfig(mtbf_s=1e9, horizon_s=1e9),
        "now_s": 1.0,
    }
    after = decide(state=kill(state, SMALL), previous=home, **common).plan
    back = apply(kill(state, SMALL), RankJoined(rank=SMALL, node=0, incarnation=1))
    workers = (replace(one, share=share, speed=speed) if one.worker == SMALL else one for one in back.workers)
    back = replace(back, workers=tuple(workers))
    return after, decide(state=back, previous=after, home=home.layout, **common)


def computing(plan):
    return {hop.worker for route in plan.layout.routes for hop in route.hops}


def test_it_is_as_fast_as_its_share_unless_it_was_measured():
    state = initial_state(nodes=(0,) * 3)
    workers = (state.workers[0], replace(state.workers[1], share=0.5), replace(state.workers[2], speed=0.8))
    assert worker_speeds(replace(state, workers=workers)) == {1: 0.5, 2: 0.8}
    assert worker_shares(replace(state, workers=workers)) == {1: Share(0.5)}
    faster = (workers[0], replace(workers[1], speed=1.4), workers[2])
    assert worker_speeds(replace(state, workers=faster)) == {1: 0.7, 2: 0.8}


def test_a_cell_is_whole_again_when_it_comes_back():
    state = initial_state(nodes=(0,) * 2)
    smaller = replace(state, workers=(replace(state.workers[0], share=0.5), state.workers[1]))
    back = apply(kill(smaller, 0), RankJoined(rank=0, node=0, incarnation=1))
    assert back.workers[0].share == 1.0


@pytest.mark.parametrize(
    ("ranks", "left", "experts", "most"), [(4, 3, 2, 3), (8, 7, 16, 19), (10, 7, 21, 30), (11, 3, 15, 55)]
)
def test_each_rank_of_an_uneven_gang_has_the_experts_of_its_fullest(ranks, left, experts, most):
    """And activations of as many lanes as there are turns."""
    state = initial_state(nodes=(0,) * ranks, cell_size=ranks, experts=experts)
    worker, turns = state.workers[0].smaller(left), -(-ranks // left)
    share = worker.beside_whole
    assert worker.pace == share.ranks == 1 / turns
    assert share.state / share.ranks == pytest.approx(most / experts)


def test_bytes_of_each_of_its_ranks():
    """With half of the ranks, so much fits as in half of the memory."""
    layout = initial_plan(job(4, 24, 14), initial_state(nodes=(0,) * 8), Profile(costs=COSTS)).layout
    budget = 2 * fullest_bytes(layout, COSTS) + 1
    state = state_bytes(layout, COSTS)
    caps = activation_caps(layout, COSTS, budget_bytes=budget, shares={SMALL: Share(0.5)})
    assert caps[SMALL] == budget // 2 - state[SMALL]
    assert caps[0] == budget - state[0]
    with pytest.raises(
        PlanInfeasible, match=r"worker 4, which counts as 25% of a cell, needs 60 bytes \(48 bytes of"
    ):
        activation_caps(layout, COSTS, budget_bytes=59, shares={SMALL: Share(0.25)})
    activation_caps(layout, COSTS, budget_bytes=60, shares={SMALL: Share(0.25)})


def test_an_uneven_gang_takes_turns_and_has_its_share_of_experts():
    """Three of four ranks take two turns, as two do, and one of them has three experts, in place of two."""
    state = initial_state(nodes=(0,) * 8, cell_size=4, experts=2)
    gangs = [state.workers[0].smaller(size) for size in (4, 3, 2)]
    of_experts = [round(replace(one, experts_work=0.5).pace, 6) for one in gangs]
    assert of_experts == [1.0, round(1 / 1.75, 6), 0.5], "of whose work experts do half"
    assert [(one.pace, one.beside_whole) for one in gangs] == [
        (1.0, Share()), (0.5, Share(0.5, 0.75)), (0.5, Share(0.5, 1.0))
    ]  # fmt: skip


def test_weights_of_context_ranks_are_the_same_however_many_there_are():
    """Half of the context-parallel ranks have twice the activations each, and no more weights."""
    state = initial_state(nodes=(0,) * 16, cell_size=4, context=2)
    both = [state.workers[0].smaller(size).beside_whole for size in (4, 2, 1)]
    assert both == [Share(), Share(0.5, 0.5), Share(0.25, 0.5)]
    layout = initial_plan(job(4, 24, 14), initial_state(nodes=(0,) * 8), Profile(costs=COSTS)).layout
    budget, kept = 2 * fullest_bytes(layout, COSTS), state_bytes(layout, COSTS)
    caps = activation_caps(layout, COSTS, budget_bytes=budget, shares={SMALL: Share(0.5, 0.5)})
    assert 2 * caps[SMALL] == budget - kept[SMALL], "each of its ranks has twice that"
    shares = {SMALL: Share(0.5, 0.5)}
    ((_, peak),) = per_rank(((SMALL, kept[SMALL] + 10),), shares, layout, COSTS)
    assert peak == kept[SMALL] + 20


def test_messages_that_are_kept_are_as_long_as_activations():
    """Half of the context-parallel ranks have twice of each sequence, in what they have sent as well."""
    costs, share = replace(COSTS, keeps_messages=True, message_bytes=3), Share(0.5, 0.5)
    layout = initial_plan(job(4, 24, 14), initial_state(nodes=(0,) * 8), Profile(costs=costs)).layout
    weights, kept = (state_bytes(layout, one)[SMALL] for one in (COSTS, costs))
    budget = 2 * fullest_bytes(layout, costs)
    caps = activation_caps(layout, costs, budget_bytes=budget, shares={SMALL: share})
    each_of_two = weights + 2 * (kept - weights)
    assert 2 * caps[SMALL] == budget - each_of_two
    assert per_rank(((SMALL, kept + 10),), {SMALL: share}, layout, costs) == ((SMALL, each_of_two + 20),)


def test_where_memory_is_not_known_nobody_is_refused():
    layout = initial_plan(job(4, 24, 14), initial_state(nodes=(0,) * 8), Profile(costs=COSTS)).layout
    whole, caps = (caps_for(layout, COSTS, shares) for shares in ({}, {SMALL: Share(0.25)}))
    assert {worker for worker in caps if caps[worker] != whole[worker]} <= {SMALL}
    assert caps[SMALL] == activation_caps(layout, COSTS)[SMALL]


def test_it_is_used_where_that_pays_and_memory_allows():
    after, decision = returned(0.5)
    check(decision.plan, range(8), 24)
    assert decision.plan.step_s < after.step_s
    assert SMALL in computing(decision.plan)


@pytest.mark.parametrize("whole", [1, 2])
def test_it_may_be_a_pipeline_by_itself(whole):
    """Half a cell beside cells that have all layers: there is no other one for a second stage of it."""
    spec, profile = job(1, 16, 14), Profile(costs=COSTS)
    state = initial_state(nodes=(0,) * (whole + 1))
    home = initial_plan(spec, state, profile)
    half = (replace(one, share=0.5) if one.worker == whole else one for one in state.workers)
    back = replace(state, workers=tuple(half), fresh=frozenset({whole}))
    common = {"job": spec, "profile": profile, "config": OdysseyConfig(mtbf_s=1e9, horizon_s=1e9)}
    after = decide(state=kill(state, whole), previous=home, now_s=1.0, **common).plan
    found = decide(state=back, previous=after, home=home.layout, now_s=2.0, **common).plan
    check(found, range(whole + 1), 16)
    assert found.step_s < after.step_s * {1: 0.7, 2: 0.9}[whole]
    (own,) = (one for one in found.layout.routes if one.hops[0].worker == whole)
    assert len(own.microbatches) < 16 / (whole + 1), "it has half of what others have"


def test_where_memory_does_not_allow_it_idles_and_the_table_says_why():
    """A layer with its state and one activation takes 4 + 1 bytes of each of a whole cell's ranks, 40 of these."""
    after, decision = returned(0.125, memory_bytes=25)
    assert SMALL not in computing(decision.plan)
    assert decision.plan.step_s <= after.step_s * (1 + 1e-9)
    reasons = " ".join(row.reason for row in decision.candidates)
    assert "worker 4, which counts as 12% of a cell, needs" in reasons


@pytest.mark.parametrize("memory_bytes", [30, 40, 60])
def test_no_rank_has_more_than_there_is(memory_bytes):
    _, decision = returned(0.5, memory_bytes=memory_bytes)
    plan = decision.plan
    peaks = dict(plan.peak_bytes)
    assert max(peaks.values()) <= memory_bytes
    if SMALL in peaks:
        assert peaks[SMALL] >= math.ceil(state_bytes(plan.layout, COSTS)[SMALL] / 0.5)


def test_whole_cells_only_are_what_a_restart_begins_with():
    _, decision = returned(0.5)
    case = decision.case
    assert case.whole == 7
    step_s = case.search.estimate_s(4, case.job.num_microbatches, 1)
    assert case.left == pytest.approx(case.usual_step_s / step_s)


def test_the_first_layout_with_a_smaller_cell_is_ordered_for_what_that_has():
    """The first plan's order is for whole cells: it would keep more than fits."""
    spec, state = (
        replace(job(2, 16, 6), tensor_model_parallel_size=2),
        initial_state(nodes=(0,) * 8, cell_size=2),
    )
    costs = replace(uniform_costs(6), memory_bytes=40)
    planner = PolicyPlanner(OdysseyConfig(device="cpu", policy="reroute", mtbf_s=1e9, horizon_s=1e9))
    home = planner.start(spec, state, to_json(Profile(costs=costs))).plan
    now = apply(state, RankDied(rank=0, code=-9, cause="killed"))
    after = planner.decide(now, home, 1.0).plan
    back = apply(now, RankJoined(rank=0, node=0, incarnation=1, size=1))
    again = planner.decide(back, after, 1.0).plan
    assert again.layout == home.layout
    shares = worker_shares(back)
    for plan, fits in ((home, False), (again, True)):
        peaks = simulate(plan.schedule, plan.layout, costs).peak_bytes
        assert (dict(per_rank(peaks, shares, plan.layout, costs))[0] <= 40) == fits


def test_where_memory_is_not_known_a_worker_may_be_visited_twice_by_a_single_microbatch():
    """It keeps both visits at once, which is more than 1F1B counts."""
    ends = ((0, 1), (1, 4), (0, 6), (1, 10))
    spans = pairwise((0, *(end for _, end in ends)))
    hops = (Hop(worker=worker, first=a, last=b) for (worker, _), (a, b) in zip(ends, spans, strict=True))
    layout = layout_from_routes(10, (Route(microbatches=(0,), hops=tuple(hops)),))
    costs = uniform_costs(10)
    assert caps_for(layout, costs)[1] == 7


def test_the_first_layout_with_a_slow_worker_keeps_its_order():
    """Another one gains little, and would make steps a fifth longer once that worker is as fast as others again: as
    the layout stays then, its order does.
    """
    spec, state = replace(job(4, 16, 10), least_holders=2), initial_state(nodes=(0,) * 4)
    costs, slow = uniform_costs(10), with_speeds(state, {1: 0.5})
    planner = PolicyPlanner(OdysseyConfig(device="cpu", policy="reroute", mtbf_s=1e9, horizon_s=1e9))
    home = planner.start(spec, state, to_json(Profile(costs=costs))).plan
    now = apply(slow, RankDied(rank=3, code=-9, cause="killed"))
    after = planner.decide(now, home, 1.0).plan
    back = apply(now, RankJoined(rank=3, node=0, incarnation=1))
    again = planner.decide(back, after, 1.0).plan
    healed = planner.rebalance(with_speeds(replace(back, fresh=frozenset()), {1: 1.0}), again, 2.0, 1e9)
    assert again.layout == healed.decided.plan.layout == home.layout
    assert simulate(again.schedule, again.layout, costs).step_s == pytest.approx(home.step_s)
