"""What a layout says of itself."""

from __future__ import annotations

from dataclasses import replace

from odyssey_megatron.plan.layout import layout_from_routes, megatron_layout, pipeline_route

ROUTED = layout_from_routes(4, (pipeline_route((0, 1), (2, 4), (0, 1)),))


def test_where_every_holder_keeps_its_state_only_shadows_have_spare_state():
    layout = replace(ROUTED, holders=((0, 1), (0, 1), (1,), (0, 1)))
    assert layout.spare_states(0) == {3}
    assert layout.spare_states(1) == {0, 1}


def test_of_the_keepers_all_but_the_first_have_spare_state():
    layout = replace(ROUTED, holders=((0, 1, 2),) * 4, keepers=((0, 1), (1, 0), (2, 0), (2,)))
    assert layout.spare_states(0) == {1, 2}
    assert layout.spare_states(1) == {0}
    assert layout.spare_states(2) == frozenset()


def test_stages_have_as_many_layers_as_megatron_gives_them():
    layout = megatron_layout(
        num_layers=8, pipeline_size=3, num_workers=3, num_microbatches=3, stage_layers=(1, 4, 1)
    )
    (route,) = layout.routes
    assert [(hop.first, hop.last) for hop in route.hops] == [(0, 2), (2, 6), (6, 8)]
