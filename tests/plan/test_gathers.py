"""New weights that a step waits for: of its worker's optimizer, and where holders step some slices only, of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.plan.checking.bound import lower_bound_s
from odyssey_megatron.plan.checking.simulate import computed_before_s, step_end_s
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.layout import layout_from_routes, megatron_layout, pipeline_route
from odyssey_megatron.plan.schedule import schedule_from_text
from odyssey_megatron.plan.scheduling.assemble import assemble
from odyssey_megatron.plan.scheduling.gathers import (
    ending_s,
    gather_order,
    gather_s,
    optimizers_s,
    weights_late_s,
)
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.plan.scheduling.reductions import buckets
from tests.plan.samples import layer, uniform_costs
from tests.plan.second import Second


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


@pytest.mark.parametrize("copies", [0, 2, 4])
def test_the_first_forwards_wait_for_their_workers_optimizers(copies):
    layout, given = sliced(2, copies=copies), costs(1e12, optimizer_s_per_byte=0.5)
    own_s = optimizers_s(layout, buckets(layout, given), given)
    share = 0.5 if copies == 2 else 1.0
    assert set(own_s.values()) == {0.5 * 4 * 2 * share}, "four layers of two bytes of state each"
    # A first stage begins as soon as it has stepped; a second one would begin four seconds later anyway.
    assert late_s(layout, given) == pytest.approx(4 * share)
    assert late_s(layout, given) - late_s(layout, costs(1e12)) == pytest.approx(4 * share)


def test_a_worker_with_twice_the_layers_has_a_longer_step():
    """Whoever gives one worker more layers makes it step more of them while others wait."""
    given = costs(1e12, optimizer_s_per_byte=0.5)
    even, uneven = (layout_from_routes(8, (pipeline_route((0, 1), (first, 8), (0, 1)),)) for first in (4, 6))
    assert late_s(even, given) == pytest.approx(4.0)
    assert late_s(uneven, given) == pytest.approx(6.0)
    # A second stage's seven seconds are waited for but for the one in which the first forward gets there.
    last = layout_from_routes(8, (pipeline_route((0, 1), (1, 8), (0, 1)),))
    assert late_s(last, given) == pytest.approx(7.0 - 1.0)


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_all_ways_to_the_time_of_a_step_count_its_end(stages, copies):
    layout, given = sliced(stages, copies), costs(10.0, optimizer_s_per_byte=0.7, agreement_s=0.25)
    order = order_routes(layout, given)
    text = build(order, layout, given)
    timeline = verify(layout, schedule_from_text(text), given)
    assert step_end_s(layout, given, order.done_s, order.tails()) == pytest.approx(timeline.step_s)
    assert Second(text, given, copies=copies).step_s == pytest.approx(timeline.step_s)
    assert lower_bound_s(layout, given) <= timeline.step_s * (1 + 1e-12)
    free = replace(given, optimizer_s_per_byte=0.0, agreement_s=0.0)
    end_s = ending_s(layout, buckets(layout, given), given)
    assert end_s - late_s(layout, free) > 0.7
    longer_s = timeline.step_s - verify(layout, schedule_from_text(text), free).step_s
    assert longer_s == pytest.approx(end_s - late_s(layout, free))
