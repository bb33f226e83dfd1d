"""Communicators that outlive their generation, since connecting takes seconds and most do not include the dead rank.

At a failure, a communicator with outstanding operations is aborted even if all its members live: one of them may wait
for a rank that waits for the dead one. A communicator that is clean on this rank (``abort.Use``) is laid by. All ranks
tell each other which communicators they have laid by, and how many operations each was given. One that is clean with
the same count on all its members is as good as new. It goes to a group of the next generation that has the same members
and the same use. The others are aborted.

If nobody has died there is nothing to ask: each communicator goes on with the next operation of all its members.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.plan.placing.groups import Channel, way_of
from odyssey_megatron.rebuild.abort import Use

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A connected communicator. ``name`` is that of its first group, and ``number`` that group's generation."""

    name: str
    number: int
    ranks: Ranks
    backend: Any
    store: dist.Store
    use: Use

    @property
    def way(self) -> Channel | None:
        """The direction of messages that it is connected for (``plan.placing.groups.way_of``). None: collectives."""
        return way_of(self.name)

    @property
    def mark(self) -> int:
        """A number that is the same on all members that have given this communicator the same number of operations."""
        text = f"{self.number}/{self.name}/{self.use.given}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def fitting(there: Iterable[Communicator], named: Mapping[str, Ranks]) -> dict[str, Communicator]:
    """Return, by name, the communicators of ``there`` with which groups of ``named`` can go on.

    ``named`` has the ranks of each group. All members of a group find the same: the communicators that exist among
    these members, and the groups wanted among them, are the same for all of them.
    """
    free: dict[tuple[Ranks, Channel | None], list[Communicator]] = defaultdict(list)
    for one in sorted(there, key=lambda one: (one.number, one.name)):
        free[one.ranks, one.way].append(one)
    return {
        name: alike.pop(0) for name, ranks in sorted(named.items()) if (alike := free[ranks, way_of(name)])
    }


class Spare:
    """The communicators that this rank has laid by. For the training thread only."""

    def __init__(self) -> None:
        self._laid_by: list[Communicator] = []

    def lay_by(self, communicators: Sequence[Communicator]) -> None:
        self._laid_by += communicators

    def take(
        self, named: Mapping[str, Ranks], world: dist.ProcessGroup, members: Ranks
    ) -> dict[str, Communicator]:
        """Return, by name, the communicators for those groups of ``named`` that need not be connected anew.

        Collective over ``world``, the group of all ``members``. All other communicators that are laid by are aborted.
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
    """Return, for each rank, the marks of the communicators that it has laid by. Collective over ``world``."""
    most = torch.tensor([len(laid_by)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=world)
    if not most:
        return {}
    mine = torch.zeros(int(most), dtype=torch.int64)
    mine[: len(laid_by)] = torch.tensor([one.mark for one in laid_by], dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in members]
    dist.all_gather(rows, mine, group=world)
    return {rank: set(row.tolist()) for rank, row in zip(members, rows, strict=True)}
