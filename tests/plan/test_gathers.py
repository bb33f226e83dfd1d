"""New weights that are on their way when a step begins, where holders step some slices only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.plan.checking.bound import lower_bound_s
from odyssey_megatron.plan.checking.simulate import computed_before_s, step_end_s
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.layout import megatron_layout
from odyssey_megatron.plan.schedule import schedule_from_text
from odyssey_megatron.plan.scheduling.assemble import assemble
from odyssey_megatron.plan.scheduling.gathers import gather_order, gather_s, weights_late_s
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.plan.scheduling.reductions import buckets
from tests.plan.samples import layer, uniform_costs


def sliced(stages, copies=2, tied=False):
    """Eight layers on stages of four replicas."""
    layout = megatron_layout(
        num_layers=8, pipeline_size=stages, num_workers=4 * stages, num_microbatches=8, tied=tied
    )
    return replace(layout, keepers=layout.all_holders, copies=copies)


def costs(bytes_per_s, weight_bytes=10, **others):
    """Layers of a second each way, in buckets of their own."""
    one = replace(layer(1.0, 1.0, 1.0, 1), weight_bytes=weight_bytes, gradient_bytes=1)
    given = replace(uniform_costs(8), layers=(one,) * 8, link_bytes_per_s=bytes_per_s, link_latency_s=0.0)
    return replace(given, message_bytes=0, bucket_bytes=0, **others)


def late_s(layout, given):
    return weights_late_s(layout, buckets(layout, given), given)


def test_each_layer_is_waited_for_when_it_computes():
    # Three quarters of ten bytes a layer: the i-th arrives at 0.75 (i + 1), and is needed at i.
    assert gather_s(costs(10.0), 2, 3, holders=4) == pytest.approx(0.75)
    assert late_s(sliced(1), costs(10.0)) == pytest.approx(0.75)
    # At 1.875 (i + 1): the last one is the latest, of the first stage, as another one's first activation comes later.
    assert late_s(sliced(1), costs(4.0)) == pytest.approx(8 * 1.875 - 7)
    assert late_s(sliced(2), costs(4.0)) == pytest.approx(4 * 1.875 - 3)


def test_what_embedding_and_head_share_comes_first():
    layout = sliced(2, tied=True)
    given = costs(10.0, tied=replace(layer(0.0, 0.0, 0.0, 0), weight_bytes=40))
    order = gather_order(buckets(layout, given), layout.num_layers)
    assert [one.first for one in order] == [8, *range(8)]
    # Eight hold it, in seven eighths of four seconds; then come the embedding's own weights.
    assert late_s(layout, given) == pytest.approx(3.5 + 0.75)


@pytest.mark.parametrize("layout", [sliced(2, copies=0), sliced(2, copies=4)], ids=["whole", "all keep all"])
def test_nothing_is_on_its_way_where_each_holder_steps_all(layout):
    assert late_s(layout, costs(1.0)) == 0.0


@pytest.mark.parametrize("bytes_per_s", [1.0, 4.0, 1e9])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_all_ways_to_the_time_of_a_step_count_it(stages, bytes_per_s):
    layout, given = sliced(stages), costs(bytes_per_s)
    order = order_routes(layout, given)
    timeline = verify(layout, schedule_from_text(build(order, layout, given)), given)
    assert step_end_s(layout, given, order.done_s, order.tails()) == pytest.approx(timeline.step_s)
    without = replace(given, layers=(replace(given.layers[0], weight_bytes=0),) * 8)
    assert timeline.step_s == pytest.approx(
        verify(layout, schedule_from_text(build(order, layout, without)), without).step_s
        + late_s(layout, given)
    )
    assert lower_bound_s(layout, given) <= timeline.step_s * (1 + 1e-12)
    before_s = computed_before_s(layout, given, timeline.step_s)
    assert all(done_s <= before_s[worker] + 1e-9 for worker, done_s in order.done_s.items())


def build(order, layout, given):
    return assemble(order, layout, given).programs.text()
