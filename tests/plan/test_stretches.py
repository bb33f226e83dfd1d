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
from odyssey_megatron.plan.placing.stretches import Seats, Stretches, in_stretch, kept_by
from tests.plan.samples import uniform_costs

SHAPES = [
    {"tensor": 1, "context": 2},
    {"tensor": 2, "context": 4},
    {"tensor": 1, "context": 4, "expert": 2},
    {"tensor": 1, "context": 8, "expert": 2},
    {"tensor": 2, "context": 1, "expert": 4},
]


def layout_of(workers, copies=2):
    routes = tuple(pipeline_route((one,), (3,), (one,)) for one in range(workers))
    layout = layout_from_routes(3, routes)
    return replace(layout, keepers=((*range(workers),),) * 3, copies=copies)


def jobs():
    for sizes in SHAPES:
        whole = Cell.of(0, **sizes)
        for each in whole.divisions(tensor=True):
            yield pytest.param(whole, {} if each == 1 else {1: whole.size // each}, id=f"{sizes}-{each}")


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize(("whole", "shapes"), [*jobs()])
def test_each_number_is_kept_twice_and_in_different_cells(whole, shapes, workers):
    """Also by a smaller cell; and seats are those of the ranks that keep the stretches."""
    layout, numel, having = layout_of(workers), 1009, {}
    (block,) = layout.blocks()
    for worker in range(workers):
        for cell in Cells(whole, shapes).ranks_of(worker):
            spans = kept_by(cell, layout, worker)[1]
            assert sum(stop - start for start, stop in spans) >= len(cell.parts.held_alike) * (
                2 * WHOLE // workers // whole.parts.alike - 2 * workers
            )
            for part in cell.parts.held:
                count = having.setdefault(part, {})
                for span in spans:
                    for number in range(*elements(span, numel)):
                        count.setdefault(number, Counter())[worker] += 1
            parts = cell.parts.count
            ranks = ranks_of_holders(block, Cells(cell, shapes), parts)
            seats, own = Seats.of(ranks, whole.parts.alike), Stretches.of(cell, layout)
            group = [
                rank
                for one in range(workers)
                for rank in Cells(cell, shapes).having(one, own_part(cell), parts)
            ]
            seat = [at for at, size in enumerate(seats.ranks) for _ in range(size)][group.index(cell.rank)]
            assert seats.kept()[seat] == (worker, own)
            assert {seats.keeping(worker, one) for one in own.own} == {seat}
    assert len(having) == whole.parts.count
    for count in having.values():
        assert sorted(count) == [*range(numel)]
        assert all(len(one) == 2 and {*one.values()} == {1} for one in count.values())


def own_part(cell):
    return cell.parts.own(cell.parts.count)[0]


def test_stretches_of_many_slices_stay_side_by_side():
    edges = [WHOLE * one // 16 for one in range(17)]
    spans = [in_stretch((a, b), number, 7) for number in range(7) for a, b in pairwise(edges)]
    assert spans[0][0] == 0
    assert spans[-1][1] == WHOLE
    assert all(before[1] == after[0] for before, after in pairwise(spans))


def test_a_rank_that_shares_with_nobody_has_all_of_it_in_one():
    assert Stretches(2, range(2)).spans([EVERYTHING]) == (EVERYTHING,)
    assert Stretches(2, range(2)).apart((EVERYTHING,)) == ((0, WHOLE // 2), (WHOLE // 2, WHOLE))
    assert Stretches(1, range(1)).spans([(0, 3), (3, 6)]) == ((0, 3), (3, 6))
    layout = replace(layout_of(2), keepers=(), copies=0)
    assert Stretches.of(Cell.of(1, tensor=1, context=2), layout) == Stretches(1, range(1))


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
