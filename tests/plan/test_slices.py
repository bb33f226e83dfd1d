"""A layer's optimizer state over its holders: who keeps what of it, whatever becomes of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import (
    NOBODY,
    WHOLE,
    elements,
    firsts,
    kept,
    ring_of,
    size,
    slices,
    within,
    without,
)
from odyssey_megatron.plan.placing.transfer import plan_transfers
from tests.plan.samples import uniform_costs


@given(st.integers(1, 300), st.integers(1, 4))
def test_each_share_is_kept_so_often_and_everybody_has_his_part(count, copies):
    found = slices(tuple(range(count)), copies)
    assert [one.span[0] for one in found] == [0, *(one.span[1] for one in found[:-1])]
    assert found[-1].span[1] == WHOLE
    assert {len(set(one.owners)) for one in found} == {min(copies, count)}
    shares = [size(kept(found)[worker]) for worker in range(count)]
    assert max(shares) <= min(copies, count) * math.ceil(WHOLE / count)
    if count > copies:
        assert [size(firsts(found)[worker]) for worker in range(count)] == [
            one.span[1] - one.span[0] for one in found
        ]


@given(st.integers(0, 10**13), st.integers(1, 100))
def test_slices_are_all_of_a_layer_be_it_small(numel, count):
    cut = [elements(one.span, numel) for one in slices(tuple(range(count)), 1)]
    assert cut[0][0] == 0
    assert cut[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    assert max(b - a for a, b in cut) <= numel / count * (1 + count / WHOLE) + 1


@given(st.integers(1, 5), st.integers(2, 12))
def test_neighbours_are_on_different_nodes_where_that_can_be(each, number_of_nodes):
    holders = tuple(range(each * number_of_nodes))
    for nodes in (
        {worker: worker // each for worker in holders},
        {worker: worker % number_of_nodes for worker in holders},
    ):
        for one in slices(ring_of(holders, (), nodes, 2), 2) if len(holders) > 2 else ():
            assert len({nodes[worker] for worker in one.owners}) == 2, nodes


def test_whoever_is_lost_leaves_a_place_which_another_may_take():
    nodes = {worker: worker % 2 for worker in range(9)}
    ring = ring_of(tuple(range(8)), (), nodes, 2)
    after = ring_of((0, 1, 2, 3, 4, 6, 7), ring, nodes, 2, joins=False)
    assert after == tuple(NOBODY if worker == 5 else worker for worker in ring)
    assert [one.span for one in slices(after, 2)] == [one.span for one in slices(ring, 2)]
    assert min(len(one.owners) for one in slices(after, 2)) == 1
    assert ring_of((0, 1, 2, 3, 4, 6, 7, 8), after, nodes, 2) == tuple(8 if one == 5 else one for one in ring)
    smaller = ring_of((0, 1, 2, 3, 4, 6, 7), after, nodes, 2)
    assert smaller == tuple(one for one in ring if one != 5)
    assert ring_of((0, 1, 2, 3, 4, 6, 7), smaller, nodes, 2, joins=False) == smaller


def test_a_slice_without_an_owner_left_is_cut_anew_among_the_living():
    nodes = dict.fromkeys(range(6), 0)
    ring = ring_of((0, 1, 2, 3), (), nodes, 2)
    assert NOBODY not in ring_of((4, 5), ring, nodes, 2, joins=False)


rings = st.lists(st.permutations(range(7)).map(lambda all_: tuple(all_[:4])), min_size=2, max_size=4)


@given(rings, st.integers(1, 3), st.sets(st.integers(0, 6), max_size=2))
def test_transfers_leave_everybody_with_what_he_keeps(steps, copies, dead):
    """Whatever the rings are one after the other; of the lost nothing is asked, unless that loses all."""
    layouts = [
        Layout(holders=(tuple(range(7)),) * 2, routes=(), keepers=(ring, ring[::-1]), copies=copies)
        for ring in steps
    ]
    alive = [worker for worker in range(7) if worker not in dead]
    layouts = [
        one
        if not dead
        else replace(
            one, keepers=tuple(tuple(w if w not in dead else NOBODY for w in ring) for ring in one.keepers)
        )
        for one in layouts
    ]
    if any(not one.owners for layout in layouts for found in layout.states for one in found):
        return
    for before, after in itertools.pairwise(layouts):
        had = [dict(kept(found)) for found in before.states]
        moved = plan_transfers(before, after, alive, uniform_costs(2))
        for one in moved:
            assert not [*without([one.span], had[one.layer][one.source])], "it has what it sends"
            assert not [*within(one.span, had[one.layer].get(one.target, ()))], "nobody is sent what he has"
        for layer, found in enumerate(after.states):
            for worker, spans in kept(found).items():
                sent = sorted(one.span for one in moved if (one.layer, one.target) == (layer, worker))
                lacking = [*without([*without(spans, had[layer].get(worker, ()))], sent)]
                assert not lacking, (worker, lacking)
