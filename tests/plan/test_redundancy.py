"""Shadows and keepers: which losses a layout survives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.plan.layout import megatron_layout
from odyssey_megatron.plan.memory import one_f_one_b_bytes, state_bytes
from odyssey_megatron.plan.redundancy import with_keepers, with_shadows
from odyssey_megatron.plan.transfer import plan_transfers
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


def test_each_layer_is_kept_twice_and_alike_often(costs):
    kept = with_keepers(PP2_DP4, None, ONE_NODE, 2, costs).check()
    assert {len(keepers) for keepers in kept.keepers} == {2}
    often = [sum(worker in keepers for keepers in kept.keepers) for worker in range(8)]
    assert max(often) - min(often) <= 1
    first = [sum(keepers[0] == worker for keepers in kept.keepers) for worker in range(8)]
    assert max(first) <= 2, "five layers of a stage, four to send them"


def test_only_what_was_lost_moves(costs):
    kept = with_keepers(PP2_DP4, None, ONE_NODE, 2, costs)
    alive = [worker for worker in range(8) if worker != 1]
    smaller = megatron_layout(num_layers=10, pipeline_size=2, num_workers=8, num_microbatches=8)
    holders = tuple(tuple(worker for worker in held if worker != 1) for held in smaller.holders)
    after = with_keepers(
        type(smaller)(holders=holders, routes=smaller.routes), kept, {w: 0 for w in alive}, 2, costs
    )
    lost = sum(1 in keepers for keepers in kept.keepers)
    assert lost
    for layer, (before, now) in enumerate(zip(kept.keepers, after.keepers, strict=True)):
        assert now[0] in before, f"layer {layer}: whoever is sent the state must not send the weights"
    assert len(plan_transfers(kept, after, alive, costs)) == lost


def test_who_keeps_optimizer_state_has_it_in_memory(costs):
    """A layer is one byte of weights, one of gradients and two of optimizer state; a stage of five layers has four
    holders, which keep ten copies of them.
    """
    everywhere = state_bytes(PP2_DP4, costs)
    shared = state_bytes(with_keepers(PP2_DP4, None, ONE_NODE, 2, costs), costs)
    assert set(everywhere.values()) == {5 * 4}
    assert sorted(shared.values()) == [5 * 2 + 2 * 2] * 4 + [5 * 2 + 2 * 3] * 4


def test_where_memory_is_short_another_node_and_those_before_come_second(costs):
    """The second holder's node is another one, so that it would keep all five layers of its stage."""
    nodes = {0: 0, 1: 1, 2: 0, 3: 0} | dict.fromkeys(range(4, 8), 2)
    activations = one_f_one_b_bytes(PP2_DP4, costs)[0]

    def kept(previous, optimizer_bytes):
        limited = replace(costs, memory_bytes=5 * 2 + activations + optimizer_bytes)
        found = with_keepers(PP2_DP4, previous, nodes, 2, limited).check()
        return found, [sum(worker in keepers for keepers in found.keepers) for worker in range(4)]

    roomy, often = kept(None, 10)
    assert often[1] == 5
    assert kept(None, 6)[1] == [3, 3, 2, 2]
    moved, often = kept(roomy, 6)
    assert often == [3, 3, 2, 2]
    assert len(plan_transfers(roomy, moved, range(8), costs)) == 2, "no more than it takes"


def test_without_a_number_everybody_keeps_everything(costs):
    assert with_keepers(PP2_DP4, None, ONE_NODE, 0, costs) is PP2_DP4
    assert PP2_DP4.states == PP2_DP4.holders
