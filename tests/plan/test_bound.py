from dataclasses import replace
from random import Random

import pytest

from odyssey_megatron.plan.checking.bound import cluster_bound_s, lower_bound_s
from odyssey_megatron.plan.checking.render import render
from odyssey_megatron.plan.checking.simulate import simulate
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.memory import minimum_bytes
from odyssey_megatron.plan.scheduling.generate import build_schedule
from tests.plan.samples import measured, uniform_costs


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


def test_the_last_gradient_is_summed_after_its_way_up():
    """Of two pipelines of three stages with a layer each. The last worker of each ends its last input gradient after
    2 + 8 s; above it follow two input gradients, the first layer's weight gradient, and that layer's sum.
    """
    routes = (
        pipeline_route((0, 1, 2), (1, 2, 3), tuple(range(4))),
        pipeline_route((3, 4, 5), (1, 2, 3), tuple(range(4, 8))),
    )
    layout = layout_from_routes(3, routes)
    costs = replace(uniform_costs(3, weight_grad_s=0.25), bucket_bytes=0, link_bytes_per_s=0.1)
    assert simulate(build_schedule(layout, costs), layout, costs).step_s >= lower_bound_s(layout, costs)
    assert lower_bound_s(layout, costs) == 2 + 8 + 2 + 0.25 + 10


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_is_shorter_whatever_memory_and_sums_take(seed):
    rng = Random(seed)
    stages, replicas, microbatches = rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 8)
    num_layers, legs = stages * rng.randint(1, 3) * (twice := rng.randint(1, 2)), twice if stages > 1 else 1
    each = num_layers // stages // legs
    places = [*range(stages), *reversed(range(stages - 1))] if legs == 2 else [*range(stages)]
    ends = [each * (at + 1) for at in range(len(places) - 1)] + [num_layers]
    routes = (
        pipeline_route(
            tuple(at + stages * one for at in places),
            tuple(ends),
            tuple(range(microbatches * one, microbatches * (one + 1))),
        )
        for one in range(replicas)
    )
    layout = layout_from_routes(num_layers, tuple(routes))
    costs = replace(
        measured(uniform_costs(num_layers, message_s=rng.choice((0.0, 0.1))), seed),
        bucket_bytes=rng.choice((0, 2, 10**6)),
        link_bytes_per_s=rng.choice((0.05, 0.3, 3.0)),
    )
    speeds = {rng.choice(layout.workers): rng.choice((0.5, 1.0))}
    more = rng.randint(0, 3 * num_layers)
    grows = rng.choice((0, 1, 6))  # by recomputation
    costs = costs.with_layers(replace(one, early_bytes=-grows * one.activation_bytes) for one in costs.layers)
    caps = {worker: least + more for worker, least in minimum_bytes(layout, costs).items()}
    schedule = build_schedule(layout, costs, in_flight_cap=caps, speeds=speeds)
    step_s = simulate(schedule, layout, costs, speeds).step_s
    assert lower_bound_s(layout, costs, speeds, caps) <= step_s * (1 + 1e-12)


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


def test_the_grid_of_many_workers_has_a_line_for_those_that_are_alike():
    """Of 17 pipelines of two workers, one with two microbatches: the others have one each."""
    shares = [(0, 1), *((number,) for number in range(2, 18))]
    routes = [pipeline_route((2 * at, 2 * at + 1), (1, 2), mine) for at, mine in enumerate(shares)]
    layout = layout_from_routes(2, tuple(routes))
    costs = uniform_costs(2)
    schedule = build_schedule(layout, costs)
    lines = render(schedule, simulate(schedule, layout, costs), width=32).splitlines()
    evens, odds = (",".join(str(one) for one in range(start, 34, 2)) for start in (4, 5))
    assert len(lines) == 4
    assert [line.rsplit("  and ")[1:] for line in lines] == [[], [], [evens], [odds]]
    assert "F2" in lines[2]
    assert "F1" in lines[0]
