"""An order that was found for a layout serves another one with the same routes and workers, and as much memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.memory import caps_for
from odyssey_megatron.policy.contest import _serves
from odyssey_megatron.policy.options import Drawn
from tests.plan.samples import uniform_costs

COSTS = uniform_costs(6, ends=True)
ROUTES = tuple(pipeline_route((2 * at, 2 * at + 1), (4, 8), range(4 * at, 4 * at + 4)) for at in range(2))
LAYOUT = layout_from_routes(8, ROUTES)


def drawn(layout, more=0):
    caps = {worker: 100 + more for worker in layout.workers}
    return Drawn(layout=layout, caps=caps, bound=None)


def test_the_same_routes_and_as_much_memory_or_more():
    assert _serves(drawn(LAYOUT), drawn(LAYOUT))
    assert _serves(drawn(LAYOUT), drawn(replace(LAYOUT, copies=2), more=1))
    assert not _serves(drawn(LAYOUT), drawn(LAYOUT, more=-1))
    assert set(caps_for(LAYOUT, COSTS, {})) == set(LAYOUT.workers), "as here"


@pytest.mark.parametrize("idle", [0, 1])
def test_holders_without_routes_are_in_orders_too(idle):
    shadowed = replace(LAYOUT, holders=tuple((*one, 9) for one in LAYOUT.holders))
    assert 9 in shadowed.workers
    both = drawn(LAYOUT), drawn(shadowed)
    assert not _serves(both[idle], both[1 - idle])


def test_other_routes():
    other = layout_from_routes(
        8, (replace(ROUTES[0], microbatches=(0, 1, 2)), replace(ROUTES[1], microbatches=(3, 4, 5, 6, 7)))
    )
    assert not _serves(drawn(LAYOUT), drawn(other))
