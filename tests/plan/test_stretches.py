"""Ranks of a cell that have the same of a layer share out the optimizer state that their worker keeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.cluster.state import initial_state
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.groups import ranks_of_holders
from odyssey_megatron.plan.placing.memory import per_rank, state_bytes
from odyssey_megatron.plan.placing.slices import EVERYTHING, WHOLE, elements
from odyssey_megatron.plan.placing.stretches import (
    DENSE,
    EXPERTS,
    Seats,
    Stretches,
    exchanged,
    in_stretch,
    is_everything,
    kept_by,
    of_kind,
)
from tests.plan.samples import uniform_costs

SHAPES = [
    {"tensor": 1, "context": 2},
    {"tensor": 2, "context": 4},
    {"tensor": 1, "expert": 2},
    {"tensor": 1, "context": 4, "expert": 2},
    {"tensor": 1, "context": 8, "expert": 2},
    {"tensor": 1, "context": 2, "expert": 4},
    {"tensor": 2, "context": 1, "expert": 4, "expert_tensor": 1},
    {"tensor": 4, "context": 1, "expert": 2, "expert_tensor": 1},
    {"tensor": 2, "context": 1, "expert": 3, "expert_tensor": 1},
    {"tensor": 2, "context": 1, "expert": 4, "experts": 12},
    {"tensor": 1, "context": 1, "expert": 5, "experts": 10},
]


def layout_of(workers, copies=2):
    routes = tuple(pipeline_route((one,), (3,), (one,)) for one in range(workers))
    layout = layout_from_routes(3, routes)
    return replace(layout, keepers=((*range(workers),),) * 3, copies=copies)


def jobs():
    for sizes in SHAPES:
        whole = Cell.of(0, **sizes)
        smaller = {whole.size // each for each in whole.divisions(tensor=True)} | {*whole.uneven_sizes}
        for size in sorted(smaller):
            shapes = {} if size == whole.size else {1: size}
            yield pytest.param(whole.among(shapes), shapes, id=f"{sizes}-{size}")


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize(("whole", "shapes"), [*jobs()])
def test_each_number_is_kept_twice_and_in_different_cells(whole, shapes, workers):
    """Also by a smaller cell; and seats are those of the ranks that keep the stretches."""
    layout, numel, having = layout_of(workers), 1009, {}
    (block,) = layout.blocks()
    for worker in range(workers):
        for cell in Cells(whole, shapes).ranks_of(worker):
            spans, own = kept_by(cell, layout, worker)[1], Stretches.of(cell, layout)
            for number, kind in enumerate(own.kinds):
                shares = [(low - kind.all[0], high - kind.all[0]) for low, high in spans]
                shares = [one for one in shares if one in within_whole(shares)]
                for part in cell.parts.own(kind.parts):
                    count = having.setdefault((number, part), {})
                    for span in shares:
                        for one in range(*elements(span, numel)):
                            count.setdefault(one, Counter())[worker] += 1
                cells, part = Cells(cell, shapes), cell.parts.own(kind.parts)[0]
                seats = Seats(ranks_of_holders(block, cells, kind.parts), kind.stretches)
                group = [rank for one in range(workers) for rank in cells.having(one, part, kind.parts)]
                seat = group.index(cell.rank)
                assert seats.kept()[seat] == (worker, kind.own)
                assert {seats.keeping(worker, one) for one in kind.own} == {seat}
    assert len(having) == sum(kind.parts for kind in own.kinds)
    for count in having.values():
        assert sorted(count) == [*range(numel)]
        assert all(len(one) == 2 and {*one.values()} == {1} for one in count.values())


def within_whole(spans):
    return [one for one in spans if one[0] >= 0 and one[1] <= WHOLE]


@pytest.mark.parametrize("size", [4, 2, 3, 1])
@pytest.mark.parametrize("other", [4, 2, 3, 1])
def test_ranks_of_any_gang_are_sent_what_they_are_to_keep(size, other):
    """From those of any other gang; and each of them once, by ranks that it exchanges something with anyway."""
    shapes = {worker: one for worker, one in ((0, size), (1, other)) if one < 4}
    whole, span = Cell.of(0, tensor=1, expert=4, experts=8).among(shapes), (WHOLE // 3, WHOLE)
    for target in Cells(whole, shapes).ranks_of(1):
        sources, came = Cells(target, shapes).counterparts(0), []
        for source in sources:
            given = exchanged(source, target, span, sends=True)
            taken = exchanged(source, target, span, sends=False)
            assert [one[1:] for one in given] == [one[1:] for one in taken]
            for kind in Stretches.of_cell(target).kinds:
                of_kind = [one for one in taken if kind.all[0] <= one.span[0] < kind.all[1]]
                came += [(cell_part(target, kind, one), one.span) for one in of_kind]
        wanted = [
            ((kind.parts, part), one)
            for kind in Stretches.of_cell(target).kinds
            for one in kind.each([span])
            for part in target.parts.own(kind.parts)
        ]
        assert sorted(came) == sorted(wanted)


def cell_part(cell, kind, piece):
    return kind.parts, cell.parts.own(kind.parts)[piece.number]


@pytest.mark.parametrize(("expert", "size", "most"), [(8, 8, 1), (8, 4, 2), (8, 7, 2), (8, 5, 2), (8, 3, 3)])
def test_a_rank_of_a_gang_keeps_its_lanes_stretches_and_its_own_experts(expert, size, most):
    """A share of everything but experts, which lanes have alike; and of each expert that it has all slices."""
    whole = Cell.of(0, tensor=1, expert=expert, experts=16)
    shapes = {} if size == expert else {0: size}
    kept = [kept_by(cell, layout_of(4), 0)[1] for cell in Cells(whole.among(shapes), shapes).ranks_of(0)]
    dense = [sum(high - low for low, high in spans if low < DENSE[1]) for spans in kept]
    assert max(dense) == most * WHOLE // 2 // expert
    assert sum(dense) == WHOLE // 2
    assert {sum(high - low for low, high in spans if low >= EXPERTS[0]) for spans in kept} == {WHOLE // 2}


def test_stretches_of_many_slices_stay_side_by_side():
    edges = [WHOLE * one // 16 for one in range(17)]
    spans = [in_stretch((a, b), number, 7) for number in range(7) for a, b in pairwise(edges)]
    assert spans[0][0] == 0
    assert spans[-1][1] == WHOLE
    assert all(before[1] == after[0] for before, after in pairwise(spans))


def test_a_rank_that_shares_with_nobody_has_all_of_it_in_one():
    layout = layout_of(2)
    whole = Cell.of(0, tensor=1, context=2)
    half = Stretches.of(whole.smaller(1), layout)
    assert half.spans([EVERYTHING]) == (EVERYTHING,)
    assert half.apart((EVERYTHING,)) == ((0, WHOLE // 2), (WHOLE // 2, WHOLE))
    alone = Stretches.of(Cell.of(0, tensor=1), layout)
    assert alone.spans([(0, 3), (3, 6)]) == ((0, 3), (3, 6))
    gang = Stretches.of(Cell.of(1, tensor=1, expert=2), layout)
    assert gang.spans([EVERYTHING]) == ((DENSE[0] + WHOLE // 2, DENSE[1]), EXPERTS)
    assert not is_everything(gang.spans([EVERYTHING]))
    of_one = Stretches.of(Cell.of(0, tensor=1, expert=2).smaller(1), layout).spans([EVERYTHING])
    assert of_one == (DENSE, EXPERTS)
    assert is_everything(of_one)
    uncut = replace(layout, keepers=(), copies=0)
    for cell in (whole, Cell.of(1, tensor=1, expert=2)):
        assert Stretches.of(cell, uncut).spans([EVERYTHING]) == (EVERYTHING,)


def test_spans_of_one_kind_are_nothing_of_the_other():
    assert of_kind((3, 9), spread=False) == of_kind((3, 9), spread=True) == (3, 9)
    assert of_kind((DENSE[0] + 3, DENSE[1]), spread=False) == (3, WHOLE)
    assert of_kind(EXPERTS, spread=True) == EVERYTHING
    assert of_kind(DENSE, spread=True) is of_kind(EXPERTS, spread=False) is None


def test_plans_count_experts_apart():
    """A gang of 4: a quarter of what its lanes have alike, and all of the experts of one."""
    costs = uniform_costs(1, ends=True)
    costs = costs.with_layers(
        replace(one, weight_bytes=40, expert_bytes=30, optimizer_bytes=400, state_bytes=440)
        for one in costs.layers
    )
    cut = costs.with_stretches(4)
    assert {one.optimizer_bytes for one in cut.layers} == {300 + 100 // 4}
    assert {*cut.moved_bytes} == {330 + 28}
    assert cut.with_stretches(1) == costs
    assert {one.optimizer_bytes for one in costs.with_stretches(4, 2).layers} == {150 + 25}


def test_plans_count_with_them_and_half_a_cell_has_as_much_on_fewer_ranks():
    costs, layout = uniform_costs(1, ends=True), layout_of(4)
    costs = costs.with_layers(
        replace(one, weight_bytes=10, gradient_bytes=20, optimizer_bytes=400) for one in costs.layers
    )
    cut = costs.with_stretches(2)
    assert cut.with_stretches(2) is cut
    assert cut.with_stretches(1) == costs
    assert {*state_bytes(layout, costs).values()} == {3 * (30 + 200)}
    own = state_bytes(layout, cut)
    assert {*own.values()} == {3 * (30 + 100)}
    state = initial_state(nodes=(0,) * 8, cell_size=2, context=2, shares_out=True)
    shares = {1: state.workers[1].smaller(1).beside_whole}
    assert dict(per_rank(tuple(own.items()), shares, layout, cut))[1] == 3 * (30 + 200)
