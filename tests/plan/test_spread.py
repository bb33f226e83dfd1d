"""Which losses of whole nodes a layout survives, and its replicas apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import initial_state
from odyssey_megatron.plan.layout import Layout, layout_from_routes, megatron_layout, pipeline_route
from odyssey_megatron.plan.placing.redundancy import with_keepers
from odyssey_megatron.plan.placing.spread import on_one_node, spread
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.initial import initial_plan
from tests.plan.samples import uniform_costs

JOB = JobSpec(
    num_layers=10,
    pipeline_model_parallel_size=2,
    tensor_model_parallel_size=1,
    num_microbatches=8,
    tokens_per_step=1,
    train_steps=1,
)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("a_node", [1, 2, 3, 4, 6])
def test_any_node_may_be_lost(stages, replicas, a_node):
    count = stages * replicas
    if count % a_node or count == a_node:
        pytest.skip("not in whole nodes, or in one")
    layout = megatron_layout(num_layers=10, pipeline_size=stages, num_workers=count, num_microbatches=12)
    nodes = {worker: worker // a_node for worker in range(count)}
    apart = spread(layout, nodes)
    assert not on_one_node(apart, nodes)
    assert [sorted(map(len, one.holders)) for one in (apart, layout)] == [
        sorted(map(len, layout.holders))
    ] * 2
    assert [route.microbatches for route in apart.routes] == [route.microbatches for route in layout.routes]
    assert (apart is layout) == (not on_one_node(layout, nodes)), "what is apart already stays"


@pytest.mark.parametrize(("count", "a_node", "stages"), [(3, 2, 2), (4, 8, 2), (8, 8, 4)])
def test_replicas_on_two_nodes_are_dealt_to_all_if_that_is_asked_for(count, a_node, stages):
    """The loss of any one node is survived before; that of any two only then."""
    workers = count * a_node
    layout = megatron_layout(
        num_layers=10, pipeline_size=stages, num_workers=workers, num_microbatches=workers
    )
    nodes = {worker: worker // a_node for worker in range(workers)}

    def on(one: Layout) -> set[int]:
        return {len({nodes[worker] for worker in holders}) for holders in one.all_holders}

    assert on(layout) == {2}
    assert spread(layout, nodes) is layout
    assert on(wide := spread(layout, nodes, widely=True)) == {count}
    assert spread(wide, nodes, widely=True) is wide
    survives = not on_one_node(with_keepers(layout, None, nodes, 2), nodes)
    assert (spread(layout, nodes, 2, widely=True) is layout) == survives, "two keepers have two nodes at most"
    assert on(spread(layout, nodes, 3, widely=True)) == {count}


def test_a_job_that_asks_for_it_begins_on_all_nodes():
    state, profile = initial_state(nodes=(0, 0, 1, 1, 2, 2)), Profile(costs=uniform_costs(8, ends=True))
    for job, count in ((JOB, 2), (replace(JOB, spreads_replicas=True), 3)):
        holders = initial_plan(replace(job, num_microbatches=12), state, profile).layout.all_holders
        assert {len({state.nodes[worker] for worker in one}) for one in holders} == {count}


def test_pipelines_that_are_not_alike():
    """Six layers on four workers and on two, which have the same node."""
    long = pipeline_route((0, 1, 2, 3), (1, 3, 5, 6), (0, 1, 2, 3))
    short = pipeline_route((4, 5), (3, 6), (4, 5))
    layout = layout_from_routes(6, (long, short))
    nodes = {worker: worker % 3 // 2 for worker in range(6)} | {2: 0, 5: 0, 1: 1, 3: 1}
    assert on_one_node(layout, {worker: 0 for worker in range(6)}) == {}, "one node is all there is"
    together = {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 1}
    assert on_one_node(layout, together) == {0: [0, 1, 2], 1: [3, 4, 5]}
    apart = spread(layout, together)
    assert sum(map(len, on_one_node(apart, together).values())) < 6
    assert spread(apart, together) is apart or len(on_one_node(spread(apart, together), together)) == 0
    assert spread(layout, nodes).check()


def test_what_keepers_have_counts():
    """Every node computes all layers, but the optimizer state is on two of four holders, of one node."""
    layout = megatron_layout(num_layers=4, pipeline_size=1, num_workers=4, num_microbatches=4)
    nodes = {0: 0, 1: 0, 2: 1, 3: 1}
    kept = replace(layout, keepers=((0, 1, 2, 3),) * 4, copies=2)
    assert on_one_node(layout, nodes) == {}
    assert on_one_node(kept, nodes) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    chosen = with_keepers(layout, None, nodes, 2)
    assert on_one_node(chosen, nodes) == {}


def test_slices_whose_owners_no_ring_keeps_apart():
    """Each layer is on both nodes, on one of them three times: of four in a ring two neighbours are there."""
    layout = megatron_layout(num_layers=4, pipeline_size=2, num_workers=8, num_microbatches=4)
    nodes = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 1, 7: 0}
    assert on_one_node(with_keepers(layout, None, nodes, 2), nodes) == {0: [0, 1], 1: [2, 3]}
    assert spread(layout, nodes) is layout, "with all state on all holders any node may be lost"
    apart = with_keepers(spread(layout, nodes, 2), None, nodes, 2)
    assert on_one_node(apart, nodes) == {}


def test_a_job_with_slices_begins_so():
    job = replace(JOB, optimizer_copies=2)
    state, profile = initial_state(nodes=(0, 0, 0, 1, 1, 1, 1, 0)), Profile(costs=uniform_costs(8, ends=True))
    assert on_one_node(initial_plan(job, state, profile).layout, state.nodes)
    apart = initial_plan(replace(job, spreads_replicas=True), state, profile)
    assert not on_one_node(apart.layout, state.nodes)


def test_a_job_begins_so_as_fast():
    state, profile = initial_state(nodes=(0, 0, 1, 1)), Profile(costs=uniform_costs(8, ends=True))
    nodes = state.nodes
    own = initial_plan(JOB, state, profile)
    apart = initial_plan(replace(JOB, spreads_replicas=True), state, profile)
    assert on_one_node(own.layout, nodes)
    assert not on_one_node(apart.layout, nodes)
    assert own.step_s == apart.step_s
