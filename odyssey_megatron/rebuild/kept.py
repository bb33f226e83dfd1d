"""Communicators that outlive their generation: connecting takes seconds, and most know nothing of the dead rank.

At a failure one that has something outstanding is aborted, also where no end of it is dead: whoever waits there may
wait for one that waits for the dead. One that is clean on this rank (``abort.Use``) is laid by. All ranks tell each
other which ones those are, and how much each has been given: what is clean with the same count on all its members is as
good as new, and goes to a group of the same members, and with the same use, in the next generation. The others go.

Where nobody has died nothing has to be asked: each goes on with the next operation of all its members.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.plan.groups import Channel, way_of
from odyssey_megatron.rebuild.abort import Use

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One that is connected. ``name`` and ``number``: its first group's, and that one's generation's."""

    name: str
    number: int
    ranks: Ranks
    backend: Any
    store: dist.Store
    use: Use

    @property
    def way(self) -> Channel | None:
        """What it is connected for (``plan.groups.way_of``): messages that way, or what all do together."""
        return way_of(self.name)

    @property
    def mark(self) -> int:
        """The same on all members that have been through the same with it."""
        text = f"{self.number}/{self.name}/{self.use.given}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def fitting(there: Iterable[Communicator], named: Mapping[str, Ranks]) -> dict[str, Communicator]:
    """Those of ``named``, groups by their ranks, that can go on with one that is ``there``. All members of a group find
    the same: what is there with these members, and is wanted with them, is the same for all of them.
    """
    free: dict[tuple[Ranks, Channel | None], list[Communicator]] = defaultdict(list)
    for one in sorted(there, key=lambda one: (one.number, one.name)):
        free[one.ranks, one.way].append(one)
    return {
        name: alike.pop(0) for name, ranks in sorted(named.items()) if (alike := free[ranks, way_of(name)])
    }


class Spare:
    """What this rank has laid by. For the thread that trains."""

    def __init__(self) -> None:
        self._laid_by: list[Communicator] = []

    def lay_by(self, communicators: Sequence[Communicator]) -> None:
        self._laid_by += communicators

    def take(
        self, named: Mapping[str, Ranks], world: dist.ProcessGroup, members: Ranks
    ) -> dict[str, Communicator]:
        """Those of ``named``, groups by their ranks, that need not be connected anew. Collective over ``world``, of all
        ``members``; whatever else is laid by goes.
        """
        everywhere = _told(self._laid_by, world, members)
        laid_by, self._laid_by = self._laid_by, []
        clean = [one for one in laid_by if all(one.mark in everywhere.get(rank, ()) for rank in one.ranks)]
        taken = fitting(clean, named)
        for one in laid_by:
            if one not in taken.values():
                one.backend.abort()
        return taken


def _told(laid_by: Sequence[Communicator], world: dist.ProcessGroup, members: Ranks) -> dict[int, set[int]]:
    """Rank -> the marks of what it has laid by."""
    most = torch.tensor([len(laid_by)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=world)
    if not most:
        return {}
    mine = torch.zeros(int(most), dtype=torch.int64)
    mine[: len(laid_by)] = torch.tensor([one.mark for one in laid_by], dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in members]
    dist.all_gather(rows, mine, group=world)
    return {rank: set(row.tolist()) for rank, row in zip(members, rows, strict=True)}
