"""A plan's schedule without its last microbatches is one, too, of the same blocks."""

from __future__ import annotations

import pytest

from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.schedule import Schedule
from odyssey_megatron.plan.scheduling.generate import build_schedule
from odyssey_megatron.plan.scheduling.smaller import smaller
from tests.plan.samples import uniform_costs

LAYOUTS = {
    "alike": ((0, 2), (2, 4), (0, 2, 4)), "ragged": ((1, 3, 4), (1, 2, 4), (1, 3, 5)),
}  # fmt: skip


@pytest.mark.parametrize("size", range(1, 7))
def test_what_is_left_is_a_whole_schedule(size):
    layout = layout_from_routes(4, tuple(pipeline_route(*route) for route in LAYOUTS.values()))
    schedule = build_schedule(layout, uniform_costs(4))
    now = {worker: smaller(layout, schedule.program(worker), size) for worker in layout.workers}
    left = next(iter(now.values())).layout
    assert left.num_microbatches == size
    assert left.blocks() == layout.blocks()
    verify(left, Schedule(programs=tuple((worker, one.program) for worker, one in now.items())))
    if size == 6:
        assert all(one.program == schedule.program(worker) for worker, one in now.items())
