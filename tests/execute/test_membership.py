"""Which groups a rank is in."""

from __future__ import annotations

from odyssey_megatron.cluster.state import Cell
from odyssey_megatron.execute.membership import (
    block_group_name,
    context_group_name,
    groups_of_cell,
    tensor_group_name,
)


def test_groups_of_a_cell():
    """Of a cell that is cut in one way only, its one group is all of them."""
    assert groups_of_cell(Cell(rank=3)) == {}
    for context in (1, 4):
        cell = Cell(rank=5, size=4, context=context)
        assert groups_of_cell(cell) == {"cell:1": (4, 5, 6, 7)}
        name = tensor_group_name if context == 1 else context_group_name
        assert name(cell) == "cell:1"
    both = groups_of_cell(Cell(rank=5, size=4, context=2))
    assert both == {"cell:1": (4, 5, 6, 7), "tensor:1.0": (4, 5), "context:1.1": (5, 7)}


def test_one_sum_over_all_who_have_the_same_shard():
    """Of a cell of 2 x 2, ranks 1 and 3."""
    names = [block_group_name(Cell(rank=rank, size=4, context=2), 0, 4) for rank in range(8)]
    assert names[1] == names[3] == names[5] != names[0] == names[2]
