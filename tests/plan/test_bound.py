from dataclasses import replace

import pytest

from odyssey_megatron.plan.bound import cluster_bound_s, lower_bound_s
from odyssey_megatron.plan.generate import build_schedule
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.render import render
from odyssey_megatron.plan.simulate import simulate
from tests.plan.samples import uniform_costs


def test_one_worker_is_bound_by_its_work():
    layout = layout_from_routes(1, (pipeline_route((0,), (1,), (0, 1, 2)),))
    assert lower_bound_s(layout, uniform_costs(1)) == 9
    assert lower_bound_s(layout, uniform_costs(1), {0: 0.5}) == 18


def test_one_microbatch_is_bound_by_its_path():
    layout = layout_from_routes(4, (pipeline_route((0, 1, 2, 3), (1, 2, 3, 4), (0,)),))
    costs = uniform_costs(4, message_s=0.25)
    assert lower_bound_s(layout, costs) == 4 + 4 + 1 + 6 * 0.25
    assert simulate(build_schedule(layout, costs), layout, costs).step_s == lower_bound_s(layout, costs)


def test_no_layout_at_all_beats_the_cluster():
    costs = uniform_costs(4)
    assert cluster_bound_s(8, costs, range(4)) == 8 * 12 / 4
    # 32 layers of microbatches: in ten times three seconds half as fast workers do 5 each, and the others 10.
    assert cluster_bound_s(8, costs, range(4), {0: 0.5, 1: 0.5}) == pytest.approx(11 * 3)
    assert cluster_bound_s(64, uniform_costs(32), range(31)) == 67 * 3, (
        "31 x 66 layers are two less than 64 x 32"
    )
    # One microbatch: weight gradients run beside the way up, all but the last. A pipeline gets there exactly.
    assert cluster_bound_s(1, costs, range(4)) == 4 + 4 + 1
    pipeline = layout_from_routes(4, (pipeline_route((0, 1, 2, 3), (1, 2, 3, 4), (0,)),))
    assert simulate(build_schedule(pipeline, costs), pipeline, costs).step_s == 9


def test_layers_that_take_no_time_bound_nothing():
    costs = uniform_costs(2, ends=True)
    nothing = [replace(one, forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0) for one in costs.layers[1:-1]]
    costs = replace(costs, layers=(costs.layers[0], *nothing, costs.layers[-1]))
    ends_s = costs.layers[0].compute_s + costs.layers[-1].compute_s
    assert cluster_bound_s(8, costs, range(2)) == pytest.approx(8 * ends_s / 2)


def test_memory_that_is_short_makes_a_worker_wait():
    """The first of four stages, with memory for two microbatches: each is there for eight seconds, down and up, and for
    a weight gradient, and of two one begins a forward later, and ends a weight gradient later.
    """
    layout = layout_from_routes(4, (pipeline_route((0, 1, 2, 3), (1, 2, 3, 4), tuple(range(8))),))
    costs = uniform_costs(4)
    size = costs.spans.activation_bytes(0, 1)
    caps = dict.fromkeys(range(4), 2 * size)
    step_s = simulate(build_schedule(layout, costs, in_flight_cap=caps), layout, costs).step_s
    assert 8 * (8 + 1) / 2 + (1 + 1) / 2 == lower_bound_s(layout, costs, in_flight_cap=caps) <= step_s


def test_last_stage_starts_late():
    layout = layout_from_routes(4, (pipeline_route((0, 1, 2, 3), (1, 2, 3, 4), tuple(range(8))),))
    assert lower_bound_s(layout, uniform_costs(4)) == 3 + 8 * 3


def test_grid():
    layout = layout_from_routes(2, (pipeline_route((0, 1), (1, 2), (0, 1)),))
    costs = uniform_costs(2)
    schedule = build_schedule(layout, costs)
    timeline = simulate(schedule, layout, costs)
    assert timeline.step_s == 8
    assert render(schedule, timeline, width=24).splitlines() == [
        "0 F0-F1-...I0-W0-...I1-W1-",
        "1 ...F0-I0-W0-F1-I1-W1-...",
    ]
