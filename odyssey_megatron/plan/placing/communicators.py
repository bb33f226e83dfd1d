"""What a plan's NCCL communicators cost: the number that a rank is in, their memory, and the time to connect them.

All figures are published ones. None has been measured in this project, so that the results are expectations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.names import about_size_text
from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.placing.groups import (
    NO_NODES,
    Channel,
    channels,
    groups_of_block,
    groups_of_cell,
    timed_pairs,
)
from odyssey_megatron.plan.plan import Transfer

CONNECT_S, CONNECT_S_PER_RANK = 1.13, 0.0026
"""Time to connect one communicator, fitted to the times in NVIDIA-NeMo/RL's pull request 3334 for shrinking one to 32
to 1,024 ranks. Its pull request 3186, with another network, gives 1.46 s and 0.66 ms.
"""

FIRST_USE_S = 1.9
"""How much longer the first operation took after that, in both pull requests."""

PAIR_BYTES, GROUP_BYTES = 544 * 2**20, 688 * 2**20
"""GPU memory of a communicator of two ranks, and of more, once it has summed: NVIDIA/nccl's issue 964, four A100 with
NVLink. Newer versions reserve less for communicators that only send and receive; ten together have been seen to take
10 GB (Si et al., arXiv 2510.20171).
"""
_STEP_BYTES = 4 * 2**30
"""Whichever workers die, plans are mostly to have the same room then, and so the orders that were worked out before."""

_Sizes = tuple[int, ...]
"""The number of ranks in each of some groups of a rank."""


def connect_s(size: int) -> float:
    """Return the time to connect a communicator of ``size`` ranks. A rank connects all of its own side by side."""
    return CONNECT_S + CONNECT_S_PER_RANK * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicators:
    """Communicators of one plan; each number is that of the rank where it is largest."""

    count: int
    """Number of communicators of a rank while it trains."""
    anew: int
    """Number of communicators that the plan before does not have."""
    num_bytes: int
    """GPU memory of all these of a rank, at most."""
    connect_s: float
    """Time to connect the slowest of the new ones; 0.0: there are none."""

    @property
    def held(self) -> str:
        """Number and memory of the communicators, for people."""
        size = about_size_text(self.num_bytes)
        return f"{self.count} communicators a rank at most, with NCCL up to {size} of its GPU"

    @property
    def connected(self) -> str:
        """The communicators that a change to this plan has to wait for, for people."""
        if not self.anew:
            return "no communicator to connect"
        several = "s" if self.anew > 1 else ""
        return (
            f"{self.anew} communicator{several} of a rank to connect, with NCCL in {self.connect_s:.1f} s, and "
            f"{FIRST_USE_S} s when they are first used"
        )


class Needs(NamedTuple):
    """The parts of a plan from which its communicators follow."""

    layout: Layout
    transfers: Collection[Transfer] = ()
    """The transfers that lead to the layout."""
    beside: bool = False
    """Whether it begins between two steps, so that layers move beside messages: see
    ``plan.placing.groups.group_members``.
    """

    @property
    def ways(self) -> Counter[Channel]:
        """Channel -> its number of communicators of two ranks when the plan begins."""
        if not self.beside:
            return Counter(channels(self.layout, self.transfers))
        return Counter([*channels(self.layout), *{(one.source, one.target) for one in self.transfers}])

    @property
    def lasting(self) -> Counter[Channel]:
        """The same behind its first step: those by which only layers move have ended
        (``execute/regrouping.py``).
        """
        return Counter(channels(self.layout))


def taken_bytes(plan: Needs, job: JobSpec) -> int:
    """Return the GPU memory that communicators of ``plan`` take of what plans may use: what they need beyond
    ``JobSpec.aside_bytes``, in steps of :data:`_STEP_BYTES`.
    """
    if job.aside_bytes is None:
        return 0
    sizes, _ = _in_steps(plan, job.cell(0))
    more = _most(sizes, _bytes_of_all) - job.aside_bytes
    return max(0, -(-more // _STEP_BYTES) * _STEP_BYTES)


def communicators(
    plan: Needs, cell: Cell, previous: Needs | None = None, nodes: Mapping[int, int] = NO_NODES
) -> Communicators:
    """Return the communicators of ``plan``, all of whose workers are whole cells like ``cell``.

    Args:
        previous: the plan that the job has been carrying out. Its communicators with the same members and the same use
            are taken over: all of them between two steps; after a failure those on which nothing is outstanding. None:
            nothing is connected yet. Then most ranks connect one more, with another, in which they time their link.
        nodes: worker -> its node, by which they do so (``plan/placing/groups.timed_pairs``).
    """
    sizes, of_block, anew = *_in_steps(plan, cell), defaultdict[_Sizes, Counter[int]](Counter)
    ways, there = plan.ways, previous.lasting if previous else Counter[Channel]()
    anew[2,].update(chain.from_iterable((ways - there).elements()))
    known = Counter(block.holders for block in (previous.layout.blocks() if previous else ()))
    workers_before = {*chain(*there, *known)}
    for block in plan.layout.blocks():
        if known[block.holders]:
            known[block.holders] -= 1
        else:
            anew[of_block[len(block.holders)]].update(block.holders)
    anew[_within(cell)].update({*chain(*sizes.values(), *ways)} - workers_before)
    if previous is None:
        anew[2,].update(chain.from_iterable(timed_pairs(plan.layout, nodes)))
    return Communicators(
        count=_most(sizes, len),
        anew=_most(anew, len),
        num_bytes=_most(sizes, _bytes_of_all),
        connect_s=max((connect_s(size) for own, used in anew.items() if used for size in own), default=0.0),
    )


def _in_steps(plan: Needs, cell: Cell) -> tuple[dict[_Sizes, Counter[int]], dict[int, _Sizes]]:
    """Return, for each kind of groups that ranks have while they train, how often each worker has it; and the groups of
    a block by its number of holders.
    """
    sizes, of_block = defaultdict[_Sizes, Counter[int]](Counter), dict[int, _Sizes]()
    # Layers that move before the first step take no communicator's memory from it.
    sizes[2,].update(chain.from_iterable((plan.ways if plan.beside else plan.lasting).elements()))
    for block in plan.layout.blocks():
        number = len(block.holders)
        if number not in of_block:
            of_block[number] = _of_block(block, cell)
        sizes[of_block[number]].update(block.holders)
    sizes[_within(cell)].update({*chain(*sizes.values(), *plan.ways)})  # also those that only send a layer
    return sizes, of_block


def _within(cell: Cell) -> _Sizes:
    return tuple(len(ranks) for ranks in groups_of_cell(cell).values())


def _most(sizes: Mapping[_Sizes, Counter[int]], each: Callable[[_Sizes], int]) -> int:
    """Return the largest sum of ``each`` over a worker's groups, counted as often as it has them."""
    total = Counter[int]()
    for own, used in sizes.items():
        weight = each(own)
        for worker, count in used.items():
            total[worker] += weight * count
    return max(total.values(), default=0)


def _of_block(block: Block, cell: Cell) -> _Sizes:
    """Return the number of ranks in each group in which a rank sums the gradients of ``block``."""
    first = Cells(replace(cell, rank=block.holders[0] * cell.full))
    return tuple(len(ranks) for ranks in groups_of_block(block, first).values())


def _bytes_of_all(sizes: _Sizes) -> int:
    return sum(PAIR_BYTES if size == 2 else GROUP_BYTES for size in sizes)
