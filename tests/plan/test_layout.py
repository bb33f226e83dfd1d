"""What a layout says of itself."""

from __future__ import annotations

from dataclasses import replace

from odyssey_megatron.plan.layout import layout_from_routes, megatron_layout, pipeline_route
from odyssey_megatron.plan.placing.slices import EVERYTHING, NOBODY, WHOLE

ROUTED = layout_from_routes(4, (pipeline_route((0, 1), (2, 4), (0, 1)),))


def test_where_every_holder_keeps_its_state_only_shadows_have_spare_state():
    layout = replace(ROUTED, holders=((0, 1), (0, 1), (1,), (0, 1)))
    assert layout.spare_states(0) == {3: (EVERYTHING,)}
    assert layout.spare_states(1) == {0: (EVERYTHING,), 1: (EVERYTHING,)}


def test_of_a_slice_s_keepers_all_but_the_first_have_spare_state():
    third = WHOLE // 3
    rings = ((0, 1, 2), (1, 2, 0), (2, 0), (2, NOBODY, 0))
    layout = replace(ROUTED, holders=((0, 1, 2),) * 4, keepers=rings, copies=2).check()
    assert layout.spare_states(0) == {
        0: ((2 * third, WHOLE),), 1: ((third, 2 * third),), 2: (EVERYTHING,),
    }  # fmt: skip
    assert layout.spans_kept_by(0)[3] == ((third, 2 * third), (2 * third, WHOLE)), "and it sends both"
    assert layout.spare_states(2)[3] == ((2 * third, WHOLE),)
    assert layout.losses_survived == 0
    assert layout.alone() == {0: [3], 2: [3]}


def test_stages_have_as_many_layers_as_megatron_gives_them():
    layout = megatron_layout(
        num_layers=8, pipeline_size=3, num_workers=3, num_microbatches=3, stage_layers=(1, 4, 1)
    )
    (route,) = layout.routes
    assert [(hop.first, hop.last) for hop in route.hops] == [(0, 2), (2, 6), (6, 8)]
