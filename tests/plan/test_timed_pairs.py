"""Which ranks time a link before the first step: ends of links that the plan uses, and of those between nodes first."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.state import initial_state
from odyssey_megatron.plan.layout import Hop, Layout, Route, layout_from_routes, megatron_layout
from odyssey_megatron.plan.placing.groups import timed_pairs
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.scheduling.programs import Programs
from odyssey_megatron.plan.sending.assignment import Assignment
from odyssey_megatron.plan.sending.generation import Generation


def megatron(stages, replicas, *, tied=False):
    return megatron_layout(
        num_layers=stages + 2,
        pipeline_size=stages,
        num_workers=stages * replicas,
        num_microbatches=replicas,
        tied=tied,
    )


def on_nodes(layout, each):
    return {worker: worker // each for worker in layout.workers}


def used(layout):
    """The links of routes, and those between all holders that sum."""
    hops = {frozenset((a.worker, b.worker)) for route in layout.routes for a, b in pairwise(route.hops)}
    return hops | {frozenset((a, b)) for one in layout.blocks() for a in one.holders for b in one.holders}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("each", [1, 2, 3, 4, 8, 100])
@pytest.mark.parametrize(
    ("stages", "replicas"), [(1, 2), (1, 3), (1, 16), (2, 1), (2, 8), (3, 1), (3, 5), (4, 4), (8, 2), (8, 3)]
)
def test_pairs_are_links_that_the_plan_uses(stages, replicas, each, tied):
    layout = megatron(stages, replicas, tied=tied)
    nodes = on_nodes(layout, each)
    pairs = timed_pairs(layout, nodes)
    assert pairs
    ends = [*chain.from_iterable(pairs)]
    assert len(set(ends)) == len(ends), "each worker times one link at most"
    assert {frozenset(pair) for pair in pairs} <= used(layout)
    hops = [(a.worker, b.worker) for route in layout.routes for a, b in pairwise(route.hops)]
    if any(nodes[a] != nodes[b] for a, b in hops):
        assert all(nodes[a] != nodes[b] for a, b in pairs)


def test_megatrons_order_on_nodes_of_eight():
    """Four stages of eight replicas: each is a node, and consecutive ranks, as 0 and 1, exchange no activations."""
    layout = megatron(4, 8)
    pairs = timed_pairs(layout, on_nodes(layout, 8))
    assert pairs == tuple((at, at + 8) for at in (*range(8), *range(16, 24)))


def test_where_only_some_links_cross_nodes_these_are_timed():
    layout = megatron(4, 2)
    assert timed_pairs(layout, on_nodes(layout, 4)) == ((2, 4), (3, 5))


def test_where_only_sums_cross_nodes_these_are_timed():
    """Two pipelines of two, each on a node of its own."""
    hops = [tuple(Hop(worker=first + at, first=at, last=at + 1) for at in range(2)) for first in (0, 2)]
    routes = tuple(Route(microbatches=(at,), hops=one) for at, one in enumerate(hops))
    layout = layout_from_routes(2, routes)
    assert timed_pairs(layout, on_nodes(layout, 2)) == ((0, 2), (1, 3))


def test_replicas_of_one_stage_on_two_nodes():
    layout = megatron(1, 16)
    assert timed_pairs(layout, on_nodes(layout, 8)) == tuple((at, at + 8) for at in range(8))


def test_on_one_node_an_odd_stage_times_the_links_of_its_sums():
    assert timed_pairs(megatron(3, 2)) == ((0, 2), (1, 3), (4, 5))
    assert timed_pairs(megatron(3, 1)) == ((0, 1),), "the last one has nobody left"


def test_a_route_that_stays_on_a_worker_times_nothing_there():
    hops = tuple(Hop(worker=worker, first=at, last=at + 1) for at, worker in enumerate((0, 0, 1, 0)))
    layout = layout_from_routes(4, (Route(microbatches=(0,), hops=hops),))
    assert timed_pairs(layout) == ((0, 1),)
    alone = Layout(
        holders=((0,),), routes=(Route(microbatches=(0,), hops=(Hop(worker=0, first=0, last=1),)),)
    )
    assert timed_pairs(alone) == ()


@pytest.mark.parametrize("shapes", [(), ((2, 2),)], ids=["whole", "smaller"])
def test_in_cells_rank_by_rank(shapes):
    """Two stages of two replicas, cells of four on nodes of eight; and with one of two ranks."""
    layout, whole = megatron(2, 2), Cell.of(0, tensor=4)
    nodes = initial_state(nodes=tuple(rank // 8 for rank in range(16)), cell_size=4).nodes
    plan = Plan(
        policy="initial", layout=layout, programs=Programs.from_text("0: STEP"), transfers=(), step_s=0.0,
        bound_s=0.0, transition_s=0.0, peak_bytes=(),
    )  # fmt: skip
    generation = Generation(
        number=1, members=tuple(range(16)), dead=(), why="start", previous=None, plan=plan, plan_hash="",
        timed=timed_pairs(layout, nodes), shapes=shapes,
    )  # fmt: skip
    with_whom = {}
    for worker in range(4):
        for cell in whole.of_worker(worker, dict(shapes).get(worker, 0)):
            assignment = Assignment.of(generation, cell)
            other = assignment.timed_with
            with_whom[cell.rank] = other.rank if other else None
            groups = {name for name in assignment.groups(tagged=True) if name.startswith("pair:")}
            assert not groups, "messages with tags need no group"
            assert [*assignment.timed_group.values()] == (
                [tuple(sorted((cell.rank, other.rank)))] if other else []
            )
    left_over = {2: None, 3: None} if shapes else {2: 10, 3: 11}
    expected = {0: 8, 1: 9} | left_over | {at: at + 8 for at in range(4, 8)}
    expected |= {b: a for a, b in expected.items() if b is not None}
    assert with_whom == expected
    assert all(with_whom[b] == a for a, b in with_whom.items() if b is not None), "both ends agree"
