"""Which groups a rank is in under a plan."""

from __future__ import annotations

from odyssey_megatron.cluster.state import Cell
from odyssey_megatron.execute.channels import WORLD, channel_groups
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.schedule import Schedule


def block_group_name(first: int, last: int) -> str:
    """The group of a block's holders."""
    return f"block:{first}:{last}"


def group_members(
    plan: Plan, members: tuple[int, ...], cell: Cell, *, tagged: bool
) -> dict[str, tuple[int, ...]]:
    """The groups of ``plan`` that the rank of ``cell`` is in, with their ranks."""
    between = {
        block_group_name(block.first, block.last): block.holders
        for block in plan.layout.blocks()
        if len(block.holders) > 1
    }
    if not tagged:
        own = Schedule(programs=((cell.worker, plan.program(cell.worker)),))
        between |= channel_groups(own)
    groups = {
        cell.named(name): tuple(map(cell.peer, workers))
        for name, workers in between.items()
        if cell.worker in workers
    }
    if cell.size > 1:
        groups[cell_group_name(cell.worker)] = cell.ranks
    return {WORLD: members} | groups


def cell_group_name(worker: int) -> str:
    """The group of a cell's ranks, for tensor parallelism."""
    return f"cell:{worker}"
