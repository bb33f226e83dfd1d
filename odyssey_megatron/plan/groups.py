"""Which groups a rank is in under a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from odyssey_megatron.cluster.cell import NO_SHAPES, Cell, Shapes
from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.plan import Plan, Transfer
from odyssey_megatron.plan.schedule import MESSAGE, SEND, Program

T = TypeVar("T")

WORLD = "world"
"""The group of all members. It lies between hosts, whatever connects devices: see ``rebuild/hosts.py``."""

_PAIR = "pair:"

Channel = tuple[int, int]
"""(sender, receiver), workers."""


def channel_name(source: int, target: int) -> str:
    """Of what worker ``source`` sends to ``target``."""
    return f"{source}>{target}"


def moves_name(source: int, target: int) -> str:
    """Of the layers that worker ``source`` sends to ``target`` beside messages."""
    return f"{source}>>{target}"


def way_of(name: str) -> Channel | None:
    """Of a group of two ranks, for messages of one to the other, which of them is which: (sender, receiver), 0 the one
    with the lower number. None of other groups.
    """
    source, mark, target = name.partition(">")
    if not mark:
        return None
    # A worker's ranks are in a row, those of the next one behind them.
    return (0, 1) if int(source) < int(target.lstrip(">").partition(".")[0]) else (1, 0)


def outlives(name: str) -> bool:
    """Whether another generation may go on with the communicator of a group: not with one that has had its use."""
    return not name.startswith(_PAIR)


def channels(layout: Layout, transfers: Iterable[Transfer] = ()) -> set[Channel]:
    """All of a plan: forwards go along routes, gradients back, and layers as they move."""
    steps = {(a.worker, b.worker) for route in layout.routes for a, b in pairwise(route.hops)}
    return steps | {(b, a) for a, b in steps} | {(one.source, one.target) for one in transfers}


def _channels_of(
    worker: int, program: Program, transfers: Iterable[Transfer], *, beside: bool
) -> dict[str, Channel]:
    """Those that ``worker`` is at an end of, by its program: it does not know others' part of its routes."""
    ends = {
        (worker, one.peer) if one.op in SEND else (one.peer, worker) for one in program if one.op in MESSAGE
    }
    moves = {(one.source, one.target) for one in transfers if worker in (one.source, one.target)}
    if beside:
        return {channel_name(*one): one for one in ends} | {moves_name(*one): one for one in moves}
    return {channel_name(*one): one for one in ends | moves}


def block_group_name(first: int, last: int, part: int, parts: int) -> str:
    """The group of all who have ``part`` of what a block has in so many ``parts``."""
    return f"block:{first}:{last}" if parts == 1 else f"block:{first}:{last}.{part}of{parts}"


class Holders(NamedTuple, Generic[T]):
    """Of a block: those whom a rank sums its gradients with."""

    groups: dict[int, T]
    """By part that the rank has of it, that of all who have it."""
    ranks: tuple[int, ...]
    """Of each holder, in such a group."""
    experts: dict[int, T]
    """By part that the rank has of what experts are spread in, that of all who have the same ones."""
    expert_ranks: tuple[int, ...]


def holder_groups(
    group: Callable[[str], T], cell: Cell, blocks: Sequence[Block], shapes: Shapes = NO_SHAPES
) -> Callable[[int, int], Holders[T]]:
    """Gives, of a first layer and the one behind the last, both of one of the ``blocks``, its holders."""

    def of_layers(first: int, last: int) -> Holders[T]:
        block = next(one for one in blocks if one.first <= first and last <= one.last)

        def of_part(part: int, parts: int) -> T:
            return group(block_group_name(block.first, block.last, part, parts))

        parts, expert_parts = cell.full_tensor, cell.full_expert_parts
        return Holders(
            {part: of_part(part, parts) for part in cell.held_shards},
            ranks_of_holders(block, cell, shapes, parts),
            {part: of_part(part, expert_parts) for part in cell.own(expert_parts)},
            ranks_of_holders(block, cell, shapes, expert_parts),
        )

    return of_layers


def group_members(
    plan: Plan,
    members: tuple[int, ...],
    cell: Cell,
    shapes: Shapes = NO_SHAPES,
    *,
    tagged: bool,
    beside: bool = False,
) -> dict[str, tuple[int, ...]]:
    """The groups of ``plan`` that the rank of ``cell`` is in, with their ranks; ``shapes`` of all workers.

    ``beside``: layers move while steps compute. A device carries out what one group is given in its order: so they do
    not go before the messages of that step, in the same group, but through one of their own.
    """
    groups = {WORLD: members} | groups_of_cell(cell)
    if not tagged:
        program = plan.program(cell.worker)
        for between, ends in _channels_of(cell.worker, program, plan.transfers, beside=beside).items():
            other = ends[ends[0] == cell.worker]
            for one in cell.counterparts(other, shapes.get(other, 1)):
                groups[cell.named(between, one.rank)] = (min(cell.rank, one.rank), max(cell.rank, one.rank))
    for block in plan.layout.blocks():
        if cell.worker in block.holders:
            groups |= groups_of_block(block, cell, shapes)
    return groups


def groups_of_block(block: Block, cell: Cell, shapes: Shapes = NO_SHAPES) -> dict[str, tuple[int, ...]]:
    """Those that a rank of one of its holders sums its gradients in."""
    # One sum over all who have the same part leaves the same bytes on all of them.
    groups = {}
    for parts in {cell.full_tensor, cell.full_expert_parts, cell.parts}:
        for part in cell.own(parts):
            having = (cell.having(one, part, parts, shapes.get(one, 1)) for one in block.holders)
            ranks = tuple(rank for one in having for rank in one)
            if len(ranks) > 1:
                groups[block_group_name(block.first, block.last, part, parts)] = ranks
    return groups


def ranks_of_holders(block: Block, cell: Cell, shapes: Shapes, parts: int) -> tuple[int, ...]:
    """How many ranks each holder of ``block`` has in a group of those who have one of so many ``parts`` of it."""
    part = cell.own(parts)[0]
    return tuple(len(cell.having(one, part, parts, shapes.get(one, 1))) for one in block.holders)


def pair(members: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
    """Two ranks each, between whom messages are timed once. None for the last one of an odd number."""
    first = members.index(rank) // 2 * 2
    ranks = members[first : first + 2]
    return {f"{_PAIR}{ranks[0]}-{ranks[1]}": ranks} if len(ranks) == 2 else {}


def groups_of_cell(cell: Cell) -> dict[str, tuple[int, ...]]:
    """Those within the rank's own cell, with their ranks."""
    groups = (
        cell.ranks,
        cell.tensor_ranks,
        cell.context_ranks,
        *cell.context_level_ranks,
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
