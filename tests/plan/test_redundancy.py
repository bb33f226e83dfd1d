"""Shadows and keepers: which losses a layout survives."""

from __future__ import annotations

import pytest

from odyssey_megatron.plan.layout import Layout, megatron_layout
from odyssey_megatron.plan.placing.memory import state_bytes
from odyssey_megatron.plan.placing.redundancy import with_keepers, with_shadows
from odyssey_megatron.plan.placing.slices import WHOLE, size
from odyssey_megatron.plan.placing.transfer import plan_transfers
from tests.plan.samples import uniform_costs

NODES = {worker: worker // 2 for worker in range(4)}
PP4 = megatron_layout(num_layers=10, pipeline_size=4, num_workers=4, num_microbatches=8)
PP2_DP4 = megatron_layout(num_layers=10, pipeline_size=2, num_workers=8, num_microbatches=8)
ONE_NODE = dict.fromkeys(range(8), 0)


@pytest.fixture(scope="module")
def costs():
    return uniform_costs(10)


def test_every_layer_has_a_second_holder_on_another_node(costs):
    shadowed = with_shadows(PP4, None, NODES, 2, costs).check()
    assert shadowed.routes == PP4.routes, "a shadow computes nothing"
    for before, holders in zip(PP4.holders, shadowed.holders, strict=True):
        assert set(before) < set(holders)
        assert len({NODES[worker] for worker in holders}) == 2


def test_shadows_are_shared_out(costs):
    shadowed = with_shadows(PP4, None, NODES, 2, costs)
    extra = [len(shadowed.held_by(worker)) - len(PP4.held_by(worker)) for worker in range(4)]
    assert max(extra) <= 3, "a stage each"


def test_layers_that_have_holders_enough_get_none(costs):
    assert with_shadows(PP2_DP4, None, ONE_NODE, 2, costs) == PP2_DP4
    assert with_shadows(PP4, None, {0: 0, 1: 0, 2: 0, 3: 0}, 9, costs).holders == ((0, 1, 2, 3),) * 10


def test_each_slice_is_kept_twice_and_everybody_has_the_same_share(costs):
    cut = with_keepers(PP2_DP4, None, ONE_NODE, 2).check()
    assert [sorted(ring) for ring in cut.keepers] == [list(held) for held in cut.holders]
    assert {len(one.owners) for found in cut.states for one in found} == {2}
    assert cut.losses_survived == 1


def test_only_what_was_lost_moves(costs):
    cut = with_keepers(PP2_DP4, None, ONE_NODE, 2)
    alive = [worker for worker in range(8) if worker != 1]
    holders = tuple(tuple(worker for worker in held if worker != 1) for held in cut.holders)
    left = Layout(holders=holders, routes=())
    nodes = dict.fromkeys(alive, 0)
    at_once = with_keepers(left, cut, nodes, 2, joins=False)
    assert plan_transfers(cut, at_once, alive, costs) == ()
    after = with_keepers(left, at_once, nodes, 2)
    moved = plan_transfers(at_once, after, alive, costs)
    assert {one.layer for one in moved} == {layer for layer, held in enumerate(cut.holders) if 1 in held}
    a_third = WHOLE // 3
    assert max(size([one.span]) for one in moved) <= a_third
    back = with_keepers(PP2_DP4, after, ONE_NODE, 2)
    assert {one.losses_survived for one in (after, back)} == {1}
    assert with_keepers(cut, after, ONE_NODE, 2) == cut, "the first layout has its places"


def test_who_keeps_optimizer_state_has_it_in_memory(costs):
    """A layer is one byte of weights, one of gradients and two of optimizer state; a stage of five layers has four
    holders, each of which keeps half of it.
    """
    everywhere = state_bytes(PP2_DP4, costs)
    shared = state_bytes(with_keepers(PP2_DP4, None, ONE_NODE, 2), costs)
    assert set(everywhere.values()) == {5 * 4}
    assert set(shared.values()) == {5 * 2 + 5 * 1}


def test_without_a_number_everybody_keeps_everything(costs):
    assert with_keepers(PP2_DP4, None, ONE_NODE, 0) is PP2_DP4
    assert PP2_DP4.owners == tuple(frozenset([held]) for held in PP2_DP4.holders)
