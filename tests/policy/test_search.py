import itertools

import pytest

from odyssey_megatron.plan.generate import order_routes
from odyssey_megatron.policy.search import _Splitter, deal, min_max_shares, place, shapes
from tests.plan.samples import layer, uniform_costs
from tests.plan.test_generate import pipelines


def brute_force_split(times, stages):
    """Least maximum; then least sum of squares. Stages: embedding and head do not stand alone."""
    last = len(times)
    options = []
    for ends in itertools.combinations(range(2, last - 1), stages - 1):
        spans = list(itertools.pairwise((0, *ends, last)))
        loads = [sum(times[a:b]) for a, b in spans]
        options.append((max(loads), sum(load**2 for load in loads)))
    return min(options)


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("head", [0.0, 1.0, 7.0])
def test_layer_split_is_min_max(stages, head):
    costs = uniform_costs(8, ends=True)
    layers = (*costs.layers[:-1], layer(head, head, head))
    costs = type(costs)(
        layers=layers, message_bytes=0, link_latency_s=0.0, link_bytes_per_s=1.0
    )
    ends = _Splitter(costs).split(stages)
    times = [one.compute_s for one in layers]
    loads = [sum(times[a:b]) for a, b in itertools.pairwise((0, *ends))]
    assert (max(loads), sum(load**2 for load in loads)) == brute_force_split(times, stages)


def test_shares_are_min_max():
    rates = [(4.0, 3.0), (3.0, 2.0), (9.0, 5.0)]
    shares = min_max_shares(10, rates)
    best = min(
        max(once + (m - 1) * each for m, (once, each) in zip(option, rates, strict=True))
        for option in itertools.product(range(1, 9), repeat=3)
        if sum(option) == 10
    )
    assert sum(shares) == 10
    assert max(once + (m - 1) * each for m, (once, each) in zip(shares, rates, strict=True)) == best


def test_equal_shares_are_dealt_round_robin():
    assert deal((2, 2)) == ((0, 2), (1, 3))
    assert deal((3, 1)) == ((0, 1, 3), (2,))


def test_estimates_order_shapes_as_the_scheduler_does():
    costs = uniform_costs(8, ends=True)
    previous = pipelines(10, 1, 8)
    steps = []
    for shape in shapes(7, 8, costs):
        assert sum(shape.shares) == 8
        layout = place(shape, range(7), previous, costs)
        steps.append((max(order_routes(layout, costs).done_s.values()), shape.estimate_s))
    best = min(step for step, _ in steps)
    assert min(step for step, _ in steps[:3]) == best
    assert all(estimate <= 1.25 * step for step, estimate in steps)


def test_one_worker_can_run_everything():
    costs = uniform_costs(4, ends=True)
    (shape,) = shapes(1, 3, costs)
    assert (shape.ends, shape.shares) == (((6,),), (3,))


def test_more_workers_than_stages_can_be_leave_some_out():
    costs = uniform_costs(2, ends=True)
    lengths = {tuple(len(ends) for ends in shape.ends) for shape in shapes(5, 2, costs)}
    assert lengths == {(2,), (2, 2)}
