"""What NCCL's communicators of a plan take: how many a rank is in, their memory, and the time to connect them.

No GPU of this project's has measured any of it: all figures are published ones, and what follows is an expectation.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.plan.groups import Channel, channels, groups_of_block, groups_of_cell
from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.plan import Transfer

CONNECT_S, CONNECT_S_PER_RANK = 1.13, 0.0026
"""Of one communicator, fitted to what NVIDIA-NeMo/RL's pull request 3334 gives for shrinking one to 32 to 1,024 ranks.
Its pull request 3186, with another network, gives 1.46 s and 0.66 ms.
"""

FIRST_USE_S = 1.9
"""So much longer took the first operation behind it, in both."""

PAIR_BYTES, GROUP_BYTES = 544 * 2**20, 688 * 2**20
"""Of a GPU, for a communicator of two ranks, and of more, once it has summed: NVIDIA/nccl's issue 964, four A100 with
NVLink. Newer versions reserve less for what is only sent and received; ten together have been seen to take 10 GB (Si et
al., arXiv 2510.20171).
"""


_Sizes = tuple[int, ...]
"""How many ranks are in each of some groups that a rank has."""


def connect_s(size: int) -> float:
    """How long a communicator of ``size`` ranks takes. All that a rank connects are connected side by side."""
    return CONNECT_S + CONNECT_S_PER_RANK * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicators:
    """Of one plan; each number is that of the rank where it is largest."""

    count: int
    anew: int
    """Of them, those that the plan before has not."""
    num_bytes: int
    """Of all, at most."""
    connect_s: float
    """The slowest of those that are connected anew; 0.0: there are none."""

    @property
    def held(self) -> str:
        """For people."""
        return f"{self.count} communicators a rank at most, with NCCL up to {self.num_bytes / 2**30:.1f} GiB of its GPU"

    @property
    def connected(self) -> str:
        """For people: what a change to this plan has to wait for."""
        if not self.anew:
            return "no communicator to connect"
        several = "s" if self.anew > 1 else ""
        return (
            f"{self.anew} communicator{several} of a rank to connect, with NCCL in {self.connect_s:.1f} s, and "
            f"{FIRST_USE_S} s when they are first used"
        )


class Needs(NamedTuple):
    """Of a plan, what its communicators follow from."""

    layout: Layout
    transfers: Collection[Transfer] = ()
    """Those that lead there."""
    beside: bool = False
    """It begins between two steps: see ``plan.groups.group_members``."""

    @property
    def ways(self) -> Counter[Channel]:
        """How many communicators of two each has."""
        if not self.beside:
            return Counter(channels(self.layout, self.transfers))
        return Counter([*channels(self.layout), *{(one.source, one.target) for one in self.transfers}])


def communicators(plan: Needs, cell: Cell, previous: Needs | None = None) -> Communicators:
    """Those of ``plan``, all of whose workers are whole cells like ``cell``.

    Args:
        previous: what the job goes on from. Communicators with the same members, and the same use, are taken over: all
            of them between two steps, behind a failure those on which nothing is outstanding. None: nothing is
            connected yet; then each rank has one more, with another rank, in which it times their link.
    """
    within = tuple(len(ranks) for ranks in groups_of_cell(cell).values())
    sizes, anew = defaultdict[_Sizes, Counter[int]](Counter), defaultdict[_Sizes, Counter[int]](Counter)
    ways, there = plan.ways, previous.ways if previous else Counter[Channel]()
    sizes[2,].update(chain.from_iterable(ways.elements()))
    anew[2,].update(chain.from_iterable((ways - there).elements()))
    known = Counter(block.holders for block in (previous.layout.blocks() if previous else ()))
    workers_before = {*chain(*there, *known)}
    alike: dict[int, _Sizes] = {}
    for block in plan.layout.blocks():
        number = len(block.holders)
        if number not in alike:
            alike[number] = _of_block(block, cell)
        sizes[alike[number]].update(block.holders)
        if known[block.holders]:
            known[block.holders] -= 1
        else:
            anew[alike[number]].update(block.holders)
    workers = sorted({*chain.from_iterable(sizes.values())})  # who only sends a layer has communicators, too
    sizes[within].update(workers)
    anew[within].update({*workers} - workers_before)
    if previous is None:
        paired = len(workers) * cell.size // 2 * 2  # an odd rank is left over
        for each in (sizes, anew):
            each[2,].update(workers[: math.ceil(paired / cell.size)])
    return Communicators(
        count=_most(sizes, len),
        anew=_most(anew, len),
        num_bytes=_most(sizes, lambda own: sum(map(_bytes, own))),
        connect_s=max((connect_s(size) for own, used in anew.items() if used for size in own), default=0.0),
    )


def _most(sizes: Mapping[_Sizes, Counter[int]], each: Callable[[_Sizes], int]) -> int:
    """Of the worker where it is most: the sum of ``each`` over its groups, as often as it has them."""
    total = Counter[int]()
    for own, used in sizes.items():
        weight = each(own)
        for worker, count in used.items():
            total[worker] += weight * count
    return max(total.values(), default=0)


def _of_block(block: Block, cell: Cell) -> _Sizes:
    """How many ranks are in each group of a rank that sums its gradients."""
    first = replace(cell, rank=block.holders[0] * cell.full)
    return tuple(len(ranks) for ranks in groups_of_block(block, first).values())


def _bytes(size: int) -> int:
    return PAIR_BYTES if size == 2 else GROUP_BYTES
