"""The weight that embedding and head share: one layer more, which no route goes through."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from odyssey_megatron.errors import LayersLost, ScheduleInvalid
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.costs import LayerCost
from odyssey_megatron.plan.layout import layout_from_routes, megatron_layout, pipeline_route
from odyssey_megatron.plan.placing.memory import state_bytes
from odyssey_megatron.plan.placing.transfer import needed_at_once, plan_transfers
from odyssey_megatron.plan.schedule import schedule_from_text
from odyssey_megatron.plan.scheduling.assemble import assemble
from odyssey_megatron.plan.scheduling.order import order_routes
from tests.plan.samples import uniform_costs

WEIGHT = LayerCost(
    forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0, activation_bytes=0, weight_bytes=1000, gradient_bytes=2000,
    optimizer_bytes=4000, state_bytes=5000,
)  # fmt: skip
COSTS = replace(uniform_costs(6), tied=WEIGHT)
PP2_DP2 = megatron_layout(num_layers=6, pipeline_size=2, num_workers=4, num_microbatches=4, tied=True)
"""Workers 0 and 1 have the embedding, 2 and 3 the head."""
WHOLE = layout_from_routes(
    6, (pipeline_route((1,), (6,), (0, 1)), pipeline_route((2,), (6,), (2, 3))), tied=True
)


def test_its_holders_are_those_of_embedding_and_head():
    assert PP2_DP2.all_holders[6] == (0, 1, 2, 3)
    assert PP2_DP2.held_by(0) == (0, 1, 2, 6)
    assert [(block.first, block.last) for block in PP2_DP2.blocks()] == [(0, 3), (3, 6), (6, 7)]
    middle = megatron_layout(num_layers=6, pipeline_size=3, num_workers=3, num_microbatches=3, tied=True)
    assert middle.all_holders[6] == (0, 2)
    assert 6 not in middle.held_by(1)


def test_who_has_both_ends_has_it_once():
    plain = replace(COSTS, tied=None)
    of_both = state_bytes(WHOLE, COSTS)[1] - state_bytes(replace(WHOLE, tied=False), plain)[1]
    of_one = state_bytes(PP2_DP2, COSTS)[0] - state_bytes(replace(PP2_DP2, tied=False), plain)[0]
    assert of_both == of_one == WEIGHT.kept_bytes
    assert COSTS.spans.kept_bytes(0, 6) - plain.spans.kept_bytes(0, 6) == WEIGHT.kept_bytes
    assert COSTS.spans.kept_bytes(1, 5) == plain.spans.kept_bytes(1, 5)


def test_it_moves_once_and_only_to_who_lacks_it():
    moved = plan_transfers(PP2_DP2, WHOLE, (1, 2), COSTS)
    assert {one.layer for one in moved if one.target == 1} == {3, 4, 5}, (
        "the weight is there, for the embedding"
    )
    assert {one.layer for one in moved if one.target == 2} == {0, 1, 2}
    inner = megatron_layout(num_layers=6, pipeline_size=3, num_workers=6, num_microbatches=4, tied=True)
    moved = plan_transfers(inner, WHOLE, (0, 1, 2, 4, 5), COSTS)
    assert [one.target for one in moved if one.layer == 6] == [2], "it was in the middle"


def test_other_layers_have_other_costs():
    halved = COSTS.with_layers(replace(one, state_bytes=one.state_bytes // 2) for one in COSTS.all_layers)
    assert halved.tied == replace(WEIGHT, state_bytes=2500)
    assert len(halved.layers) == 6
    assert replace(COSTS, tied=None).with_layers(COSTS.layers) == replace(COSTS, tied=None)


def test_who_computes_an_end_needs_it_at_once():
    program = schedule_from_text("2: F0[0:3] B0[0:3] STEP").program(2)
    assert needed_at_once(PP2_DP2, 2, program, ()) == {0, 1, 2, 6}
    assert needed_at_once(PP2_DP2, 2, program, (6,)) == {0, 1, 2}


def test_it_is_lost_with_the_last_of_them():
    with pytest.raises(LayersLost, match="the embedding and layers 1 to 2"):
        plan_transfers(PP2_DP2, WHOLE, (2, 3), COSTS)
    alone = layout_from_routes(6, (pipeline_route((0, 1, 2), (1, 5, 6), (0,)),), tied=True)
    with pytest.raises(LayersLost, match="the embedding, the head and the tied weight"):
        plan_transfers(alone, WHOLE, (1,), COSTS)


def test_it_is_summed_behind_both_ends():
    text = assemble(order_routes(PP2_DP2, COSTS), PP2_DP2, COSTS).programs.text()
    assert text.count("REDUCE_GRAD[6:7]") == 4, "once on each"
    verify(PP2_DP2, schedule_from_text(text), COSTS)
    early = re.sub(r"( W\S+ REDUCE_GRAD\[\d:\d\]) REDUCE_GRAD\[6:7\]", r" REDUCE_GRAD[6:7]\1", text)
    with pytest.raises(ScheduleInvalid, match="comes after the reduction of its block"):
        verify(PP2_DP2, schedule_from_text(early), COSTS)
