import itertools
from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import Share, apply, initial_state
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.simulate import step_end_s
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.memory import caps_for
from odyssey_megatron.plan.scheduling.generate import order_routes
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.shapes import ways
from odyssey_megatron.policy.shapes.kinds import Slow, mixed
from odyssey_megatron.policy.shapes.search import Search
from odyssey_megatron.policy.shapes.seating import place
from odyssey_megatron.policy.shapes.shares import Rate, deal, finish_s, min_max_shares
from odyssey_megatron.policy.shapes.splits import Splits
from tests.plan.samples import FREE, layer, uniform_costs
from tests.plan.test_generate import pipelines

SLOW = (Slow(0.5), Slow(0.8, Share(0.5)))


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
    costs = type(costs)(layers=layers, message_bytes=0, link_latency_s=0.0, link_bytes_per_s=1.0)
    ends = Splits(costs).split(stages)
    times = [one.compute_s for one in layers]
    loads = [sum(times[a:b]) for a, b in itertools.pairwise((0, *ends))]
    assert (max(loads), sum(load**2 for load in loads)) == brute_force_split(times, stages)


@pytest.mark.parametrize("way", [ways.ONCE, ways.V, ways.Way(2)])
def test_cuts_that_memory_does_not_bind_are_those_with_ample_memory(way):
    """They are taken over from there; found on their own they would be the same, however little memory there is."""
    costs = uniform_costs(9, ends=True)
    odd = [replace(one, activation_bytes=1 + i % 3) for i, one in enumerate(costs.layers)]
    costs = replace(costs, layers=tuple(odd))
    taken_over = set()
    for memory in range(12, 60):
        splits, alone = Splits(costs, memory, way=way), Splits(costs, memory, way=way)
        alone.ample = None
        sorts = splits.sorts.numbers(SLOW), alone.sorts.numbers(SLOW)
        assert sorts == ((0, 1), (0, 1))
        for stages, sort in itertools.product(range(1, splits.most_stages + 1), (0, 1)):
            kind = mixed(stages, sort)
            assert (splits.split(kind), splits.slow_place(kind)) == (
                alone.split(kind),
                alone.slow_place(kind),
            )
        for stages in range(1, splits.most_stages + 1):
            assert splits.split(stages) == alone.split(stages)
            taken_over.add(splits.split(stages) == Splits(costs, way=way).split(stages))
    assert taken_over == {True, False}


def test_shares_are_min_max():
    rates = [Rate(head_s=1.0, each_s=3.0), Rate(head_s=1.0, each_s=2.0), Rate(head_s=4.0, each_s=5.0)]
    shares = min_max_shares(10, rates)
    best = min(
        max(rate.finish_s(m) for m, rate in zip(option, rates, strict=True))
        for option in itertools.product(range(1, 9), repeat=3)
        if sum(option) == 10
    )
    assert sum(shares) == 10
    assert max(rate.finish_s(m) for m, rate in zip(shares, rates, strict=True)) == best
    assert finish_s(10, [(rate, 1) for rate in rates]) == pytest.approx(best)


def test_equal_shares_are_dealt_round_robin():
    assert deal((2, 2)) == ((0, 2), (1, 3))
    assert deal((3, 1)) == ((0, 1, 3), (2,))


def all_shapes(num_workers, num_microbatches, costs, budget=None):
    search = Search(costs, budget)
    return [
        search.shape(num_workers, num_microbatches, pipelines)
        for _, pipelines in search.ranked(num_workers, num_microbatches)
    ]


def test_estimates_order_shapes_as_the_scheduler_does():
    costs = uniform_costs(8, ends=True)
    previous = pipelines(10, 1, 8)
    steps = []
    for shape in all_shapes(7, 8, costs):
        assert sum(shape.shares) == 8
        layout = place(shape, range(7), previous, costs)
        caps = dict.fromkeys(layout.workers, 8)
        step = max(order_routes(layout, costs, in_flight_cap=caps).done_s.values())
        steps.append((step, shape.estimate_s))
    best = min(step for step, _ in steps)
    assert min(step for step, _ in steps[:3]) == best
    assert all(0.7 * step <= estimate <= step + 1e-9 for step, estimate in steps)


def test_the_stage_that_reduces_longest_sets_the_estimate():
    """The embedding's gradients take 40 s to reduce, so the first stage ends last, though it starts first."""
    costs = uniform_costs(8, ends=True)
    embedding = replace(layer(0.0, 0.0, 0.0, 0), gradient_bytes=40)
    costs = replace(costs, layers=(embedding, *costs.layers[1:]), link_bytes_per_s=1.0)
    (shape,) = (one for one in all_shapes(8, 8, costs) if len(one.ends) == 2)
    layout = place(shape, range(8), pipelines(10, 1, 8), costs)
    caps = dict.fromkeys(layout.workers, 8)
    step_s = step_end_s(layout, costs, order_routes(layout, costs, in_flight_cap=caps).done_s)
    assert 4 * 6 + 40 < shape.estimate_s <= step_s


def test_memory_shapes_the_split():
    """The head's parameters leave the last stage no room for a second layer."""
    costs = uniform_costs(6, ends=True)
    heavy = replace(layer(0.0, 0.0, 0.0, 0), weight_bytes=19, optimizer_bytes=0)
    costs = replace(costs, layers=(*costs.layers[:-1], heavy))
    assert Splits(costs).split(3) == (3, 5, 8)
    assert Splits(costs, 26).split(3) == (3, 6, 8)
    assert Splits(costs, 20).split(3) is None
    with pytest.raises(
        PlanInfeasible, match=r"3 stage\(s\) needs \d+ bytes a worker, and 20 bytes may be used"
    ):
        Search(costs, 20).shape(3, 4, 1)


def test_pipelines_that_share_optimizer_state_need_less_memory():
    """Of four bytes a layer two are optimizer state: with four pipelines half of it is kept by each."""
    costs = uniform_costs(6, ends=True)
    assert Search(costs).ranked(4, 4) == Search(costs, None, 2).ranked(4, 4), "no budget, no difference"
    whole, activations = 8 * 4, 6
    shared = whole - 8 * 1
    assert Search(costs, whole + activations).estimate_s(4, 4, 4)
    assert Search(costs, whole + activations - 1).estimate_s(4, 4, 4) is None
    assert Search(costs, shared + activations, 2).estimate_s(4, 4, 4)
    assert Search(costs, shared + activations - 1, 2).estimate_s(4, 4, 4) is None
    with pytest.raises(PlanInfeasible, match=f"needs {shared + activations} bytes a worker"):
        Search(costs, shared + activations - 1, 2).shape(4, 4, 4)


def test_the_weight_of_both_ends_has_twice_as_many_holders():
    """Embedding and head share a weight with four bytes of optimizer state: the two holders of each in two pipelines
    keep two of these, of all copies. Where a pipeline is a single worker, it keeps all four.
    """
    costs = replace(uniform_costs(4, ends=True), tied=replace(FREE, optimizer_bytes=4))
    halves, whole = 3 * 4 + 2, 6 * 4 + 4
    assert Search(costs, halves + 2, 2).estimate_s(4, 4, 2)
    assert Search(costs, halves + 1, 2).estimate_s(4, 4, 2) is None
    assert Search(costs, halves + 3).estimate_s(4, 4, 2) is None, "every holder keeps all"
    assert Search(costs, whole + 4, 2).estimate_s(2, 4, 2)
    assert Search(costs, whole + 3, 2).estimate_s(2, 4, 2) is None


def test_a_plan_is_found_that_fits_only_as_four_workers_share_the_weight_of_both_ends():
    costs = replace(uniform_costs(6, ends=True), tied=replace(FREE, optimizer_bytes=40, state_bytes=40))
    job = JobSpec(
        num_layers=8, pipeline_model_parallel_size=3, tensor_model_parallel_size=1, num_microbatches=6,
        tokens_per_step=1, train_steps=1, is_tied=True, optimizer_copies=2,
    )  # fmt: skip
    state = initial_state(nodes=(0,) * 6)
    home = initial_plan(job, state, Profile(costs=costs))
    for rank in (0, 3):
        state = apply(state, RankDied(rank=rank, code=-9, cause="killed"))
    profile = Profile(costs=replace(costs, memory_bytes=4 * 4 + 20 + 2 * 3))
    arguments = {"job": job, "previous": home, "profile": profile, "config": OdysseyConfig(), "now_s": 1.0}
    found = decide(state=state, **arguments).plan
    assert found.layout.lengths.startswith("2+2")
    assert max(dict(found.peak_bytes).values()) <= profile.costs.memory_bytes


def test_little_memory_slows_the_estimate():
    costs = uniform_costs(4, ends=True)
    assert max(one.each_s for one in Splits(costs, 1000).stages(4)) == 3.0
    # Room for one microbatch: the first stage waits until it is back, 4 down, 4 up and its weight gradient.
    assert max(one.each_s for one in Splits(costs, 4 + 4 + 1).stages(4)) == 9.0


@pytest.mark.parametrize(("link_bytes_per_s", "step_s"), [(1e9, 56.0), (1.0, 63.5)])
def test_full_memory_leaves_no_work_for_the_end(link_bytes_per_s, step_s):
    """Four pipelines of two stages. The head's parameters leave the last stage room for one microbatch. While the last
    gradient goes up it has one weight gradient left, 4 of the 8 that the first stage takes.
    """
    costs = uniform_costs(8, ends=True)
    heavy = replace(layer(0.0, 0.0, 0.0, 0), weight_bytes=8, optimizer_bytes=0)
    layers = (*costs.layers[:-1], heavy)
    costs = replace(costs, layers=layers, link_bytes_per_s=link_bytes_per_s, memory_bytes=30)
    search = Search(costs, 30)
    layout = place(search.shape(8, 16, 4), range(8), pipelines(10, 1, 8), costs)
    order = order_routes(layout, costs, in_flight_cap=caps_for(layout, costs))
    assert step_end_s(layout, costs, order.done_s, order.tails()) == pytest.approx(step_s)
    assert search.estimate_s(8, 16, 4) == pytest.approx(step_s)
    of_four = search.pipelines(8, (), 16)
    of_four.count(4, 0, 0.0)
    assert of_four.time_s(2, 4) == pytest.approx(step_s), "as the bounds of pipelines of any lengths"


def test_a_slow_worker_gets_fewer_layers_and_its_pipeline_fewer_microbatches():
    costs = uniform_costs(12, ends=True)
    shape = Search(costs).shape(8, 16, 2)
    previous = layout_from_routes(14, (pipeline_route((0, 2, 4, 6), (4, 7, 10, 14), (0,)),))
    layout = place(shape, range(8), previous, costs, {2: 0.5})
    slow, whole = sorted(layout.routes, key=lambda route: 2 not in [hop.worker for hop in route.hops])
    spans = {hop.worker: hop.last - hop.first for hop in slow.hops}
    assert spans[2] == 2
    assert sorted(hop.last - hop.first for hop in whole.hops) == [3, 3, 4, 4]  # ends: embedding, head
    assert (len(slow.microbatches), len(whole.microbatches)) == (7, 9)


def test_one_worker_can_run_everything():
    costs = uniform_costs(4, ends=True)
    (shape,) = all_shapes(1, 3, costs)
    assert (shape.ends, shape.shares) == (((6,),), (3,))


def test_more_workers_than_stages_can_be_leave_some_out():
    costs = uniform_costs(2, ends=True)
    assert {tuple(map(len, shape.ends)) for shape in all_shapes(5, 2, costs)} == {(2,), (2, 2)}
