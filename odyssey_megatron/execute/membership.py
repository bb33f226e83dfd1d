"""Which groups a rank is in under a plan."""

from __future__ import annotations

from odyssey_megatron.cluster.state import Cell
from odyssey_megatron.execute.channels import WORLD, channel_groups
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.schedule import Schedule


def block_group_name(cell: Cell, first: int, last: int) -> str:
    """The group of all who have the same shard of a block as the rank."""
    return f"block:{first}:{last}" if cell.tensor == 1 else f"block:{first}:{last}.tp{cell.tensor_rank}"


def group_members(
    plan: Plan, members: tuple[int, ...], cell: Cell, *, tagged: bool
) -> dict[str, tuple[int, ...]]:
    """The groups of ``plan`` that the rank of ``cell`` is in, with their ranks."""
    groups = {WORLD: members} | groups_of_cell(cell)
    if not tagged:
        own = Schedule(programs=((cell.worker, plan.program(cell.worker)),))
        for name, workers in channel_groups(own).items():
            groups[cell.named(name)] = tuple(map(cell.peer, workers))
    for block in plan.layout.blocks():
        # One sum over all who have the same shard leaves the same bytes on all of them.
        ranks = tuple(rank for worker in block.holders for rank in cell.context_ranks(worker))
        if cell.worker in block.holders and len(ranks) > 1:
            groups[block_group_name(cell, block.first, block.last)] = ranks
    return groups


def groups_of_cell(cell: Cell) -> dict[str, tuple[int, ...]]:
    """Those within the rank's own cell, with their ranks."""
    groups = {
        tensor_group_name(cell): cell.tensor_ranks,
        context_group_name(cell): cell.context_ranks(cell.worker),
        cell_group_name(cell.worker): cell.ranks,
    }
    return {name: ranks for name, ranks in groups.items() if len(ranks) > 1}


def cell_group_name(worker: int) -> str:
    """The group of a cell's ranks."""
    return f"cell:{worker}"


def tensor_group_name(cell: Cell) -> str:
    """The rank's tensor-parallel group; that of the cell where these are all its ranks."""
    return cell_group_name(cell.worker) if cell.context == 1 else f"tensor:{cell.worker}.{cell.context_rank}"


def context_group_name(cell: Cell) -> str:
    """The rank's context-parallel group; that of the cell where these are all its ranks."""
    return cell_group_name(cell.worker) if cell.tensor == 1 else f"context:{cell.worker}.{cell.tensor_rank}"
