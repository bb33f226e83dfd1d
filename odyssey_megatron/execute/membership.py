"""Which groups a rank is in under a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from odyssey_megatron.cluster.state import Cell
from odyssey_megatron.execute.channels import channel_groups
from odyssey_megatron.plan.layout import Block
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.rebuild.groups import WORLD

T = TypeVar("T")


def block_group_name(cell: Cell, first: int, last: int, parts: int) -> str:
    """The group of all who have the same as the rank of what a block has in so many ``parts``."""
    return f"block:{first}:{last}" if parts == 1 else f"block:{first}:{last}.{cell.index % parts}of{parts}"


def holder_groups(
    group: Callable[[str], T], cell: Cell, blocks: Sequence[Block]
) -> Callable[[int, int], tuple[T, T]]:
    """Gives, of a first layer and the one behind the last, both of one of the ``blocks``, the ``group`` of all who have
    the same part of it as the rank, and of all who have the same experts.
    """

    def of_layers(first: int, last: int) -> tuple[T, T]:
        block = next(one for one in blocks if one.first <= first and last <= one.last)
        dense, experts = (
            group(block_group_name(cell, block.first, block.last, one))
            for one in (cell.tensor, cell.expert_parts)
        )
        return dense, experts

    return of_layers


def group_members(
    plan: Plan, members: tuple[int, ...], cell: Cell, *, tagged: bool
) -> dict[str, tuple[int, ...]]:
    """The groups of ``plan`` that the rank of ``cell`` is in, with their ranks."""
    groups = {WORLD: members} | groups_of_cell(cell)
    if not tagged:
        for name, workers in channel_groups(cell.worker, plan.program(cell.worker), plan.transfers).items():
            groups[cell.named(name)] = tuple(map(cell.peer, workers))
    for block in plan.layout.blocks():
        # One sum over all who have the same part leaves the same bytes on all of them.
        for parts in {cell.tensor, cell.expert_parts, cell.parts}:
            ranks = tuple(rank for worker in block.holders for rank in cell.alike(worker, parts))
            if cell.worker in block.holders and len(ranks) > 1:
                groups[block_group_name(cell, block.first, block.last, parts)] = ranks
    return groups


def pair(members: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
    """Two ranks each, between whom messages are timed once. None for the last one of an odd number."""
    first = members.index(rank) // 2 * 2
    ranks = members[first : first + 2]
    return {f"pair:{ranks[0]}-{ranks[1]}": ranks} if len(ranks) == 2 else {}


def groups_of_cell(cell: Cell) -> dict[str, tuple[int, ...]]:
    """Those within the rank's own cell, with their ranks."""
    groups = (
        cell.ranks,
        cell.tensor_ranks,
        cell.context_ranks,
        cell.lane_ranks,
        cell.expert_ranks,
        cell.expert_tensor_ranks,
        cell.expert_part_ranks,
    )
    return {cell_group_name(ranks): ranks for ranks in groups if len(ranks) > 1}


def cell_group_name(ranks: tuple[int, ...]) -> str:
    """The group of ``ranks``, equally far apart, of a cell."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return f"cell:{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
