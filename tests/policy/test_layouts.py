import pytest

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.layout import Hop, Layout, layout_from_routes, megatron_layout, pipeline_route
from odyssey_megatron.plan.scheduling.generate import build_schedule, order_routes
from odyssey_megatron.policy.policies.drop import drop_pipelines
from odyssey_megatron.policy.policies.shift import shift_layers
from odyssey_megatron.policy.routes.paths import merge_hops
from odyssey_megatron.policy.routes.rerouting import reroute
from odyssey_megatron.policy.shapes.shares import deal
from tests.plan.samples import uniform_costs
from tests.plan.test_generate import pipelines


def slots(layout, costs, in_flight):
    caps = dict.fromkeys(layout.workers, in_flight)
    schedule = build_schedule(layout, costs, in_flight_cap=caps)
    return verify(layout, schedule, costs, in_flight_cap=caps).step_s


def alive_without(layout, *dead):
    return set(layout.workers) - set(dead)


def test_slots_of_recycle():
    """ReCycle's example (arXiv 2405.14009): 3 pipelines, 4 stages, 6 microbatches, f = i = w = 1.

    27 failure-free and 36 with a failed end stage, fused; the split backward brings the end stage to 30 and an
    interior one to the exact optimum of 29 for a step that ends with a flush.
    """
    layout = pipelines(4, 3, 6)
    fused = uniform_costs(4, input_grad_s=2.0, weight_grad_s=0.0)
    assert slots(layout, fused, 4) == 27
    assert slots(reroute(layout, alive_without(layout, 9), fused), fused, 6) == 36
    split = uniform_costs(4)
    assert slots(reroute(layout, alive_without(layout, 9), split), split, 5) == 30
    assert slots(reroute(layout, alive_without(layout, 6), split), split, 5) == 29


def test_work_of_the_dead_is_spread_evenly():
    layout = pipelines(4, 3, 6)
    after = reroute(layout, alive_without(layout, 3), uniform_costs(4))
    load = dict.fromkeys(after.workers, 0)
    for route in after.routes:
        for hop in route.hops:
            load[hop.worker] += len(route.microbatches)
    assert (load[4], load[5]) == (9, 9)
    assert all(load[worker] == 6 for worker in load if worker not in (4, 5))
    assert after.holders[1] == (4, 5)


def test_which_replica_has_died_makes_no_difference():
    """To what is left of unlike pipelines, however workers and microbatches are numbered: so it has been looked at."""
    own = deal((7, 7, 7, 7, 6, 6))
    numbers = iter((9, 4, 13, 0, 6, 2, 12, 5, 11, 1, 8, 10, 3, 7))
    cuts = [(2, 4)] * 4 + [(2, 3, 4)] * 2
    routes = [
        pipeline_route(tuple(next(numbers) for _ in ends), ends, microbatches)
        for ends, microbatches in zip(cuts, own, strict=True)
    ]
    layout, costs = layout_from_routes(4, routes), uniform_costs(4)
    for kind, number in (((0, 2), 7), ((2, 4), 7), ((0, 2), 6), ((2, 3), 6)):
        shapes = set()
        for route in (one for one in routes if len(one.microbatches) == number):
            for worker in (hop.worker for hop in route.hops if (hop.first, hop.last) == kind):
                after = reroute(layout, alive_without(layout, worker), costs)
                caps = dict.fromkeys(after.workers, 100)
                order = order_routes(after, costs, in_flight_cap=caps)
                shapes.add(frozenset(group.solved.shape for group in order.groups))
        assert len(shapes) == 1


def test_several_dead_also_in_one_pipeline_and_one_stage():
    layout = pipelines(4, 4, 4)
    after = reroute(layout, alive_without(layout, 0, 4, 5, 15), uniform_costs(4))
    assert after.holders == ((1, 2, 3), (6, 7), (8, 9, 10, 11), (12, 13, 14))
    verify(after, build_schedule(after, uniform_costs(4)))


def test_a_second_failure_on_top_of_a_first():
    layout = pipelines(2, 3, 6)
    first = reroute(layout, alive_without(layout, 0), uniform_costs(2))
    second = reroute(first, alive_without(layout, 0, 1), uniform_costs(2))
    assert second.holders == ((2,), (3, 4, 5))
    verify(second, build_schedule(second, uniform_costs(2)))


def test_a_slow_holder_gets_less():
    layout = pipelines(1, 3, 4)
    after = reroute(layout, {1, 2}, uniform_costs(1), {1: 0.5})
    shares = {route.hops[0].worker: len(route.microbatches) for route in after.routes}
    assert order_routes(after, uniform_costs(1), speeds={1: 0.5}).done_s == {1: 24.0, 2: 24.0}
    assert sum(shares.values()) == 12


def test_a_slow_worker_keeps_the_share_of_its_speed():
    """x = (1 - p) / (1 + p / (N - 1)) of its microbatches leave: p = 1/2, N = 3, x = 0.4."""
    layout = pipelines(1, 3, 15)
    after = reroute(layout, {0, 1, 2}, uniform_costs(1), {1: 0.5})
    shares = dict.fromkeys((0, 1, 2), 0)
    for route in after.routes:
        shares[route.hops[0].worker] += len(route.microbatches)
    assert shares == {0: 18, 1: 9, 2: 18}


def test_dropped_pipelines_leave_their_rest_as_holders():
    layout = pipelines(2, 3, 2)
    after = drop_pipelines(layout, alive_without(layout, 0))
    assert after.holders == ((1, 2), (3, 4, 5))
    assert [(len(r.microbatches), r.hops[0].worker) for r in after.routes] == [(3, 1), (3, 2)]
    verify(after, build_schedule(after, uniform_costs(2)))
    with pytest.raises(PlanInfeasible, match="every pipeline"):
        drop_pipelines(layout, alive_without(layout, 0, 1, 5))


def test_boundaries_move_away_from_the_damaged_stage():
    """Three stages of four layers on three pipelines; the middle one loses a worker: 12 / 8 = 4 / 2.67 / 4 wide."""
    before = megatron_layout(num_layers=14, pipeline_size=3, num_workers=9, num_microbatches=9)
    costs = uniform_costs(12, ends=True)
    kept = reroute(before, set(range(9)) - {4}, costs)
    moved = shift_layers(kept, costs)
    assert [hop.last for hop in kept.routes[0].hops] == [5, 9, 14]
    assert [hop.last for hop in moved.routes[0].hops] in ([6, 9, 14], [5, 8, 14])
    verify(moved, build_schedule(moved, costs))
    with pytest.raises(PlanInfeasible, match="no boundary is better"):
        shift_layers(before, costs)


def test_a_shadow_takes_over():
    """Worker 2 held layer 1 without a route (Bamboo's redundancy in these terms); nothing has to move."""
    alone = layout_from_routes(2, (pipeline_route((0, 1), (1, 2), (0, 1, 2)),))
    shadowed = Layout(holders=((0,), (1, 2)), routes=alone.routes).check()
    after = reroute(shadowed, {0, 2}, uniform_costs(2))
    assert after.holders == ((0,), (2,))
    assert [hop.worker for hop in after.routes[0].hops] == [0, 2]
    verify(after, build_schedule(after, uniform_costs(2)))


def test_ragged_holders_take_over_in_pieces():
    ragged = layout_from_routes(
        4,
        (
            pipeline_route((0, 1), (2, 4), (0,)),
            pipeline_route((2, 3, 4), (1, 3, 4), (1,)),
        ),
    )
    after = reroute(ragged, {0, 1, 2, 4}, uniform_costs(4))
    assert after.routes[1].hops == (
        Hop(worker=2, first=0, last=1),
        Hop(worker=0, first=1, last=2),
        Hop(worker=1, first=2, last=3),
        Hop(worker=4, first=3, last=4),
    )


def test_no_other_holder_is_refused_with_the_reason():
    layout = pipelines(2, 2, 2)
    with pytest.raises(PlanInfeasible, match=r"no other holder of the head of worker\(s\) \[2, 3\]"):
        reroute(layout, {0, 1}, uniform_costs(2))


def test_neighbouring_visits_become_one():
    a, b = Hop(worker=1, first=0, last=1), Hop(worker=1, first=1, last=3)
    c = Hop(worker=2, first=3, last=4)
    assert merge_hops([a, b, c]) == (Hop(worker=1, first=0, last=3), c)
