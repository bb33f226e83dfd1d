"""The communication groups of a plan: their names, and which a rank is in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.plan import Plan, Transfer
from odyssey_megatron.plan.schedule import MESSAGE, SEND, Program

T = TypeVar("T")

WORLD = "world"
"""The group of all members. It connects hosts, whatever connects devices: see ``rebuild/hosts.py``."""

NO_NODES: Mapping[int, int] = MappingProxyType({})

_PAIR = "pair:"
_MOVES = ">>"

Channel = tuple[int, int]
"""(sending worker, receiving worker)."""


def channel_name(source: int, target: int) -> str:
    """Return the name of the channel of messages from worker ``source`` to ``target``."""
    return f"{source}>{target}"


def moves_name(source: int, target: int) -> str:
    """Return the name of the channel by which only layers move from worker ``source`` to ``target``."""
    return f"{source}{_MOVES}{target}"


def way_of(name: str) -> Channel | None:
    """Return which of the two ranks of a channel's group sends and which receives, as (sender, receiver).

    0 is the rank with the lower number, and 1 the other. None: ``name`` is another group's.
    """
    source, mark, target = name.partition(">")
    if not mark:
        return None
    # Ranks are numbered worker by worker, so comparing workers compares ranks.
    return (0, 1) if int(source) < int(target.lstrip(">").partition(".")[0]) else (1, 0)


def passes(name: str) -> bool:
    """Whether a group has had its use after the first step of its generation: layers moved through it, or it served to
    time a link.
    """
    return name.startswith(_PAIR) or _MOVES in name


def channels(layout: Layout, transfers: Iterable[Transfer] = ()) -> set[Channel]:
    """Return all channels of a plan: forwards go along routes, gradients back, and layers from sender to receiver."""
    steps = {(a.worker, b.worker) for route in layout.routes for a, b in pairwise(route.hops)}
    return steps | {(b, a) for a, b in steps} | {(one.source, one.target) for one in transfers}


def _channels_of(
    worker: int, program: Program, transfers: Iterable[Transfer], *, beside: bool
) -> dict[str, Channel]:
    """Return the channels that ``worker`` is at an end of, by name.

    They follow from its program, since a rank does not know the other workers of its routes.
    """
    ends = {
        (worker, one.peer) if one.op in SEND else (one.peer, worker) for one in program if one.op in MESSAGE
    }
    moves = {(one.source, one.target) for one in transfers if worker in (one.source, one.target)}
    apart = moves if beside else moves - ends
    return {channel_name(*one): one for one in ends} | {moves_name(*one): one for one in apart}


def block_group_name(first: int, last: int, part: int, parts: int) -> str:
    """Return the name of the group of all ranks that have ``part`` of a block that is in ``parts`` parts."""
    return f"block:{first}:{last}" if parts == 1 else f"block:{first}:{last}.{part}of{parts}"


class Holders(NamedTuple, Generic[T]):
    """The groups in which a rank sums the gradients of a block."""

    groups: dict[int, T]
    """For each part of the block (experts aside) that the rank has: the group of all ranks that have it."""
    ranks: tuple[int, ...]
    """Number of ranks that each holder has in such a group."""
    experts: dict[int, T]
    """For each part of the experts that the rank has: the group of all ranks that have it."""
    expert_ranks: tuple[int, ...]
    """Number of ranks that each holder has in such a group."""


def holder_groups(
    group: Callable[[str], T], cells: Cells, blocks: Sequence[Block]
) -> Callable[[int, int], Holders[T]]:
    """Return a function from layers ``[first, last)`` within one of ``blocks`` to the groups of its holders.

    ``group`` returns the group of a name.
    """

    def of_layers(first: int, last: int) -> Holders[T]:
        block = next(one for one in blocks if one.first <= first and last <= one.last)

        def of_part(part: int, parts: int) -> T:
            return group(block_group_name(block.first, block.last, part, parts))

        cell = cells.cell
        parts, expert_parts = cell.full_tensor, cell.parts.of_experts
        return Holders(
            {part: of_part(part, parts) for part in cell.held_shards},
            ranks_of_holders(block, cells, parts),
            {part: of_part(part, expert_parts) for part in cell.parts.own(expert_parts)},
            ranks_of_holders(block, cells, expert_parts),
        )

    return of_layers


def group_members(
    plan: Plan,
    members: tuple[int, ...],
    cells: Cells,
    *,
    tagged: bool,
    beside: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Return the groups of ``plan`` that the rank of ``cells.cell`` is in: name -> ranks.

    Args:
        beside: whether layers move while steps compute. Then they go through groups of their own: a device carries
            out the operations of one group in order, so that layers would hold up the messages of the step.
    """
    cell = cells.cell
    groups = {WORLD: members} | groups_of_cell(cell)
    if not tagged:
        program = plan.program(cell.worker)
        for between, ends in _channels_of(cell.worker, program, plan.transfers, beside=beside).items():
            other = ends[ends[0] == cell.worker]
            for one in cells.counterparts(other):
                groups[cell.named(between, one.rank)] = (min(cell.rank, one.rank), max(cell.rank, one.rank))
    for block in plan.layout.blocks():
        if cell.worker in block.holders:
            groups |= groups_of_block(block, cells)
    return groups


def groups_of_block(block: Block, cells: Cells) -> dict[str, tuple[int, ...]]:
    """Return the groups in which the rank of ``cells.cell``, whose worker holds ``block``, sums its gradients."""
    # There is one sum over all ranks that have the same part, so that all of them get the same bytes.
    groups, cell = {}, cells.cell
    for parts in {cell.full_tensor, cell.parts.of_experts}:
        for part in cell.parts.own(parts):
            ranks = tuple(rank for one in block.holders for rank in cells.having(one, part, parts))
            if len(ranks) > 1:
                groups[block_group_name(block.first, block.last, part, parts)] = ranks
    return groups


def ranks_of_holders(block: Block, cells: Cells, parts: int) -> tuple[int, ...]:
    """Return the number of ranks that each holder of ``block`` has in a group for one of ``parts`` parts of it."""
    part = cells.cell.parts.own(parts)[0]
    return tuple(len(cells.having(one, part, parts)) for one in block.holders)


def timed_pairs(layout: Layout, nodes: Mapping[int, int] = NO_NODES) -> tuple[tuple[int, int], ...]:
    """Return the pairs of workers that time the link between them once, before the first step, in order.

    A worker is in one pair at most. A pair is of links that the layout uses: between neighbours in a route, or between
    holders of the same layers, which sum gradients. If any of these links lies between nodes, only those that do are
    timed. Costs have one price for all links, which is that of the network then, as in estimates: a plan that was too
    cheap would be worse than one that is too dear.

    Args:
        nodes: worker -> its node; workers that are not in it are on one node.
    """
    links = [(a.worker, b.worker) for route in layout.routes for a, b in pairwise(route.hops)]
    for block in layout.blocks():
        half = len(block.holders) // 2
        links += zip(block.holders[:half], block.holders[-half:], strict=True) if half else ()
    pairs, between = dict[int, int](), [one for one in links if nodes.get(one[0]) != nodes.get(one[1])]
    taken = set[int]()
    for a, b in between or links:
        if a != b and taken.isdisjoint((a, b)):
            taken |= {a, b}
            pairs[a] = b
    return tuple(sorted(pairs.items()))


def timed_group(rank: int, other: int) -> dict[str, tuple[int, ...]]:
    """Return the group of two in which ``rank`` and ``other`` time their link: name -> ranks."""
    ranks = (min(rank, other), max(rank, other))
    return {f"{_PAIR}{ranks[0]}-{ranks[1]}": ranks}


def groups_of_cell(cell: Cell) -> dict[str, tuple[int, ...]]:
    """Return the groups within the rank's own cell: name -> ranks."""
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
    """Return the name of the group of ``ranks`` of one cell, which are equally far apart."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return f"cell:{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
