"""Routes that do without slow links."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.state import (
    SlowSums,
    apply,
    initial_state,
    with_slow_links,
    with_slow_sums,
)
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.checking.bound import lower_bound_s
from odyssey_megatron.plan.checking.simulate import simulate
from odyssey_megatron.plan.layout import megatron_layout
from odyssey_megatron.plan.schedule import Schedule
from odyssey_megatron.policy.decide import decide, scheduled
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.planner import PolicyPlanner
from odyssey_megatron.policy.routes.links import around, exchanged, side_by_side, sums_wait_s, waits_s
from tests.benchmarks.policies import job_of as benchmark_job
from tests.benchmarks.policies import profile_of
from tests.policy.test_decide import PROFILE, job
from tests.policy.test_history import FOREVER, planner_of

COSTS = PROFILE.costs


def layout(stages=4, workers=12, microbatches=12):
    return megatron_layout(
        num_layers=10, pipeline_size=stages, num_workers=workers, num_microbatches=microbatches
    )


def slow(*links, longer_s=0.05):
    both_ways = sorted({*links, *((b, a) for a, b in links)})
    return replace(COSTS, slow_links=tuple((a, b, longer_s) for a, b in both_ways))


def test_the_clock_and_the_order_agree_on_slow_links():
    costs = slow((0, 3), (7, 10))
    plan = scheduled("keep", layout(), (), with_links(costs), PROFILE)
    programs = tuple((worker, plan.program(worker)) for worker in layout().workers)
    by_clock = simulate(Schedule(programs=programs), layout(), costs).step_s
    assert plan.step_s == pytest.approx(by_clock), "the first by the order, the second by what it became"
    healthy = scheduled("keep", layout(), (), with_links(COSTS), PROFILE)
    assert plan.step_s > healthy.step_s
    assert waits_s(layout(), costs) == pytest.approx(2 * 2 * 4 * 0.05)


def with_links(costs, workers=12):
    return replace(initial_state(nodes=(0,) * workers), slow_links=costs.slow_links)


def test_one_slow_link_is_done_without_and_nothing_moves():
    costs = slow((0, 3))
    found = around(layout(), costs)
    assert waits_s(found, costs) == 0
    assert found.holders == layout().holders
    moved = [one for one in found.routes if one not in layout().routes]
    assert len(moved) == 2, "two pipelines exchange what is below the link"
    before, after = (
        Counter((hop, len(route.microbatches)) for route in one.routes for hop in route.hops)
        for one in (layout(), found)
    )
    assert before == after, "everybody has as much to do as before"


def test_healthy_links_change_nothing():
    assert around(layout(), COSTS) == layout()
    assert around(layout(), slow((0, 4))) == layout(), "no message goes that way"


def test_several_at_once_and_pipelines_with_unlike_shares():
    uneven = replace(
        layout(),
        routes=tuple(
            replace(route, microbatches=ids)
            for route, ids in zip(layout().routes, ((0, 1), (2, 3, 4, 5), (6, 7, 8, 9, 10, 11)), strict=True)
        ),
    ).check()
    costs = slow((0, 3), (4, 7), (5, 8), (9, 6))
    found = around(uneven, costs)
    assert waits_s(found, costs) == 0
    assert found.num_microbatches == 12


def test_a_worker_all_of_whose_links_are_slow_cannot_be_done_without():
    costs = slow(*((4, other) for other in range(12) if other != 4))
    assert waits_s(around(layout(), costs), costs) == waits_s(layout(), costs)


def test_without_replicas_workers_change_places():
    one = layout(stages=4, workers=4)
    costs = slow((1, 2))
    assert around(one, costs) == one
    found = exchanged(one, costs)
    assert waits_s(found, costs) == 0
    assert sorted(found.workers) == [0, 1, 2, 3]


def test_a_node_with_a_slow_network_has_pipelines_of_its_own():
    nodes = [worker // 4 for worker in range(12)]
    links = [(a, b) for a in range(12) for b in range(12) if (nodes[a] == 0) != (nodes[b] == 0)]
    costs = slow(*links)
    found = exchanged(layout(), costs)
    assert waits_s(found, costs) == 0
    assert {0, 1, 2, 3} in [{hop.worker for hop in route.hops} for route in found.routes]


def test_the_plan_changes_where_that_pays_and_not_where_it_does_not():
    planner, plan, state = planner_of(policy="reroute")
    hops = plan.layout.routes[0].hops
    link = hops[0].worker, hops[1].worker
    found = planner.rebalance(with_slow_links(state, {link: 0.5}), plan, 0.0, FOREVER)
    chosen = next(row for row in found.decided.rows if row.chosen)
    assert (chosen.name, found.decided.plan.transfers) == ("relink", ())
    assert found.decided.plan.step_s == pytest.approx(plan.step_s)
    assert found.gain > 0.3
    little = planner.rebalance(with_slow_links(state, {link: 1e-7}), plan, 0.0, FOREVER)
    assert little.gain < 1e-3
    back = planner.rebalance(state, found.decided.plan, 0.0, FOREVER).decided.plan
    assert (back.layout, back.programs) == (plan.layout, plan.programs), "exactly the first plan"


def test_what_the_plan_as_it_is_loses_counts_though_its_schedule_was_given_up():
    """With messages that take a fifth of a stage's forward the search sees soon that there is better."""
    profile = profile_of(8, 2, 4)
    message_s = 0.2 * profile.costs.spans.forward_s(0, len(profile.costs.layers)) / 8
    profile = replace(profile, costs=replace(profile.costs, link_latency_s=message_s))
    # Without communicators in the GPU's memory: beside these the bound says as much.
    planner, state = (
        PolicyPlanner(OdysseyConfig(horizon_s=1e9, backend="gloo")),
        initial_state(nodes=(0,) * 32),
    )
    plan = planner.start(benchmark_job(4, 8, 16), state, to_json(profile)).plan
    one, other = (hop.worker for hop in plan.layout.routes[0].hops[:2])
    slow = with_slow_links(state, {link: 40 * message_s for link in ((one, other), (other, one))})
    found = planner.rebalance(slow, plan, 0.0, FOREVER)
    kept = next(row for row in found.decided.rows if row.name == "keep")
    assert kept.step_s is None
    assert "given up" in kept.reason
    assert found.gain == pytest.approx(planner.step_s(slow, plan) / found.decided.plan.step_s - 1)
    assert found.gain > 0.3


def test_after_a_loss_slow_links_are_done_without_too():
    state = initial_state(nodes=(0,) * 8)
    plan = initial_plan(job(4), state, PROFILE)
    hops = plan.layout.routes[0].hops
    links = {(hops[0].worker, hops[1].worker): 0.5}
    died = apply(state, RankDied(rank=7, code=-9, cause="killed", t_s=0.0))
    config = OdysseyConfig(policy="reroute", horizon_s=1e9, mtbf_s=1e9)
    known = {"job": job(4), "previous": plan, "profile": PROFILE, "config": config, "now_s": 0.0}
    found = decide(state=with_slow_links(died, links), **known)
    costs = replace(COSTS, slow_links=found.case.profile.costs.slow_links)
    assert waits_s(decide(state=died, **known).plan.layout, costs) > 0
    assert waits_s(found.plan.layout, costs) == 0


NODE = SlowSums((0, 3, 6, 9), True, 50.0)
"""Of each stage of :func:`layout` one replica, all of one pipeline."""


@pytest.mark.parametrize("slow", [NODE, SlowSums((3, 4, 5), False, 50.0)], ids=["node", "alone"])
def test_the_clock_and_the_order_agree_on_slow_sums(slow):
    costs = replace(COSTS, slow_sums=(slow,))
    state = with_slow_sums(initial_state(nodes=(0,) * 12), [slow])
    plan = scheduled("keep", layout(), (), state, PROFILE)
    programs = tuple((worker, plan.program(worker)) for worker in layout().workers)
    assert plan.step_s == pytest.approx(simulate(Schedule(programs=programs), layout(), costs).step_s)
    usual = scheduled("keep", layout(), (), initial_state(nodes=(0,) * 12), PROFILE)
    assert usual.step_s < plan.step_s
    assert usual.bound_s <= lower_bound_s(layout(), costs) <= plan.step_s


@pytest.mark.parametrize(
    ("slow", "holders", "slows"),
    [
        (NODE, (0, 1, 2), True),
        (NODE, (1, 2), False),
        (NODE, (0, 3), False),
        (NODE, (0,), False),
        (SlowSums((0, 1), False, 2.0), (0, 1), True),
        (SlowSums((0, 1), False, 2.0), (0, 1, 2), True),
        (SlowSums((0, 1), False, 2.0), (0, 2), False),
    ],
)
def test_which_sums_are_slow(slow, holders, slows):
    assert slow.slows(holders) == slows


def test_who_sums_is_put_side_by_side():
    """Of four workers of a node three can have a stage to themselves; the fourth sums with others still."""
    costs = replace(COSTS, slow_sums=(NODE,))
    found = side_by_side(layout(), costs)
    crossing = {tuple(sorted(held)) for held in found.holders if NODE.slows(held)}
    assert len(crossing) == 1
    assert 0 < sums_wait_s(found, costs) < sums_wait_s(layout(), costs)
    assert sorted(found.workers) == sorted(layout().workers)
    few = replace(COSTS, slow_sums=(SlowSums((0, 3), True, 50.0),))
    assert side_by_side(layout(), few) == layout(), "there is no room"
    assert side_by_side(layout(), COSTS) == layout()
