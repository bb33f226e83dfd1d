"""Sums run in buckets beside the weight gradients that are left, and the planner's clock knows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.plan.checking.bound import lower_bound_s
from odyssey_megatron.plan.checking.simulate import reduce_s, simulate, step_end_s
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.layout import layout_from_routes, megatron_layout, pipeline_route
from odyssey_megatron.plan.schedule import Op, schedule_from_text
from odyssey_megatron.plan.scheduling.assemble import assemble
from odyssey_megatron.plan.scheduling.generate import build_schedule
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.plan.scheduling.reductions import (
    BUCKET_PARAMETERS,
    BUCKET_PARAMETERS_PER_HOLDER,
    Tail,
    buckets,
)
from tests.plan.samples import layer, uniform_costs

RAGGED = layout_from_routes(
    8,
    (
        pipeline_route((0, 1, 2), (3, 5, 8), (0, 3, 5)),
        pipeline_route((3, 4), (4, 8), (1, 4, 6, 7)),
        pipeline_route((5,), (8,), (2,)),
    ),
)
PP1_DP64 = megatron_layout(num_layers=12, pipeline_size=1, num_workers=64, num_microbatches=256)
PP2_DP2 = megatron_layout(num_layers=8, pipeline_size=2, num_workers=4, num_microbatches=8)
TIED = megatron_layout(num_layers=8, pipeline_size=2, num_workers=4, num_microbatches=8, tied=True)


def costs(layout, *, gradient_bytes=10, bucket_bytes=None, bytes_per_s=10.0, **times):
    one = replace(layer(**times), gradient_bytes=gradient_bytes)
    return replace(
        uniform_costs(layout.num_layers),
        layers=(one,) * layout.num_layers,
        tied=one if layout.tied else None,
        link_bytes_per_s=bytes_per_s,
        bucket_bytes=bucket_bytes,
    )


def spans(layout, **others):
    return [(one.first, one.last) for one in buckets(layout, costs(layout, **others))]


def test_a_block_is_cut_from_its_last_layer_on_and_the_lowest_are_what_is_left():
    assert spans(PP2_DP2, bucket_bytes=15) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert spans(PP2_DP2, bucket_bytes=21) == [(0, 1), (1, 4), (4, 5), (5, 8)]
    assert spans(PP2_DP2, bucket_bytes=0) == [(at, at + 1) for at in range(8)]
    assert spans(TIED, bucket_bytes=1000) == [(0, 4), (4, 8), (8, 9)]


def test_by_default_buckets_are_megatrons():
    assert 4 * BUCKET_PARAMETERS == 160_000_000
    assert spans(PP2_DP2, gradient_bytes=80_000_000) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    many = 4 * 64 * BUCKET_PARAMETERS_PER_HOLDER
    assert spans(PP1_DP64, gradient_bytes=-(-many // 6)) == [(0, 6), (6, 12)]


@pytest.mark.parametrize("bucket_bytes", [0, 15, 10**6])
@pytest.mark.parametrize("layout", [RAGGED, PP2_DP2, TIED], ids=["ragged", "pp2-dp2", "tied"])
def test_all_ways_to_the_programs_and_their_time_agree(layout, bucket_bytes):
    given = costs(layout, bucket_bytes=bucket_bytes)
    order = order_routes(layout, given)
    text = assemble(order, layout, given).programs.text()
    assert text == build_schedule(layout, given).to_text()
    timeline = verify(layout, schedule_from_text(text), given)
    assert step_end_s(layout, given, order.done_s, order.tails()) == pytest.approx(timeline.step_s)
    assert lower_bound_s(layout, given) <= timeline.step_s * (1 + 1e-12)


def test_sums_start_when_their_last_weight_gradient_has_run():
    given = costs(PP2_DP2, bucket_bytes=0)
    schedule = build_schedule(PP2_DP2, given)
    spans_of = dict(simulate(schedule, PP2_DP2, given).spans)
    for worker, program in schedule.programs:
        timed = [*zip(program, spans_of[worker], strict=True)]
        sums = [(instr, span) for instr, span in timed if instr.op is Op.REDUCE_GRAD]
        computed_s = max(end for instr, (_, end) in timed if instr.op is Op.WEIGHT_GRAD)
        assert [instr.first for instr, _ in sums] == sorted((i.first for i, _ in sums), reverse=True)
        assert sum(start < computed_s for _, (start, _) in sums) == len(sums) - 1, "all but the last one"


def test_on_a_first_stage_sums_start_beside_the_last_input_gradient():
    """Nobody waits for that: they start when it has passed their layers, and one more. Others' is waited for."""
    given = costs(PP2_DP2, bucket_bytes=0)
    schedule = build_schedule(PP2_DP2, given)
    spans_of = dict(simulate(schedule, PP2_DP2, given).spans)
    for worker, program in schedule.programs:
        timed = [*zip(program, spans_of[worker], strict=True)]
        begun, done = next(span for instr, span in reversed(timed) if instr.op is Op.INPUT_GRAD)
        starts = {instr.first: start for instr, (start, _) in timed if instr.op is Op.REDUCE_GRAD}
        assert done - begun == 4.0
        if worker < 2:  # layers 3 and 2 are passed; then a second for each weight gradient
            assert starts == {3: begun + 3.0, 2: begun + 5.0, 1: begun + 7.0, 0: begun + 8.0}
        else:
            assert starts == {at: done + 8.0 - at for at in (7, 6, 5, 4)}


def test_of_several_visits_the_upper_layers_are_whole_before_the_last_input_gradient():
    """A worker that has both ends: nothing of the upper one is waited for when the lower one's begins."""
    tail = Tail(spans=((0, 4), (12, 16)), speed=2.0, lead=(0, 4))
    given = costs(megatron_layout(num_layers=16, pipeline_size=2, num_workers=2, num_microbatches=4))
    assert [tail.left_s(given, first) for first in (12, 3, 1, 0, 16)] == [2.0, 1.0, 0.0, 0.0, 0.0]
    assert replace(tail, lead=None).left_s(given, 12) == 0.0


def test_sums_of_64_holders_are_hidden_where_there_is_room():
    """400 MB of gradients a worker, 25 GB/s, a step of 0.86 s: SIMULATED by this planner's clock."""
    times = dict(forward_s=0.006, input_grad_s=0.006, weight_grad_s=0.006)
    per_layer = 400_000_000 // PP1_DP64.num_layers
    given = costs(PP1_DP64, gradient_bytes=per_layer, bytes_per_s=2.5e10, **times)
    without = replace(given, layers=(replace(given.layers[0], gradient_bytes=0),) * PP1_DP64.num_layers)
    steps = [simulate(build_schedule(PP1_DP64, one), PP1_DP64, one).step_s for one in (given, without)]
    whole_s = reduce_s(given, 0, PP1_DP64.num_layers, 64)
    assert whole_s > 0.03
    assert steps[0] <= 1.02 * steps[1]
    assert steps[0] - steps[1] == pytest.approx(whole_s * 4 / 12), (
        "the last bucket: two are of 267 MB and 133 MB"
    )
