"""Which groups a rank is in."""

from __future__ import annotations

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.plan.placing.groups import block_group_name, groups_of_cell


def test_groups_of_a_cell():
    """Of a cell that is cut in one way only, its one group is all of them."""
    assert groups_of_cell(Cell(rank=3)) == {}
    for context in (1, 4):
        assert groups_of_cell(Cell(rank=5, size=4, context=context)) == {"cell:4-7": (4, 5, 6, 7)}
    both = groups_of_cell(Cell(rank=5, size=4, context=2))
    assert both == {"cell:4-7": (4, 5, 6, 7), "cell:4-5": (4, 5), "cell:5-7:2": (5, 7)}
    assert groups_of_cell(Cell.of(5, tensor=2, expert=2)) == both, "two lanes, whose ranks share out experts"
    levels = groups_of_cell(Cell.of(13, tensor=2, context=4, context_levels=(2, 2)))
    assert (9, 11, 13, 15) in levels.values()
    assert {levels["cell:13-15:2"], levels["cell:9-13:4"]} == {(13, 15), (9, 13)}, (
        "in a row, and rows in a row"
    )


def test_one_sum_over_all_who_have_the_same_shard():
    """Of a cell of 2 x 2, ranks 1 and 3; of experts, each rank of a gang has others."""
    names = [block_group_name(0, 4, Cell(rank=rank, size=4, context=2).index % 2, 2) for rank in range(8)]
    assert names[1] == names[3] == names[5] != names[0] == names[2]
    gang = [Cell.of(rank, tensor=2, expert=2) for rank in range(8)]
    experts = [block_group_name(0, 4, one.index % one.expert_parts, one.expert_parts) for one in gang]
    assert experts[:4] == experts[4:]
    assert len(set(experts)) == 4
