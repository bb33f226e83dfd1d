"""The change from one generation's groups to the next one's."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.errors import Superseded
from odyssey_megatron.execute.parts import GroupBuilder, Groups, NoGroups
from odyssey_megatron.execute.prepare import Offers, elected
from odyssey_megatron.execute.votes import Votes
from odyssey_megatron.plan.placing import groups as membership
from odyssey_megatron.plan.placing.groups import WORLD
from odyssey_megatron.plan.sending.assignment import Assignment
from odyssey_megatron.plan.sending.generation import Generation


class Regrouping:
    """The groups that one rank is in.

    These are the groups of its generation; those of the generation before, if this one was prepared, until
    all members have left them; and those of an offered generation, which a thread builds while steps run.

    Args:
        decline: Called from that thread with the number of an offered generation and the reason why its
            groups cannot be built.
        on_groups: Called with the groups of each generation that this rank enters.
        tagged: See ``Assignment.groups``.
    """

    def __init__(
        self,
        cell: Cell,
        build: GroupBuilder,
        *,
        decline: Callable[[int, str], None],
        on_groups: Callable[[Groups], None],
        tagged: bool,
    ):
        self._cell, self._build, self._on_groups, self._tagged = cell, build, on_groups, tagged
        self._entered: Groups | None = None
        self._left: Groups | None = None
        self._offers = Offers[Groups](decline)
        self.ballot = self._offers.ballot
        self.boundary = 0
        """The offered generation that all members have prepared, and enter before the next step; 0: none."""

    # -- an offered generation --------------------------------------------------------------------------------------

    def prepare(self, offered: Generation) -> None:
        """Build the groups of an ``offered`` generation while steps run. May be called from any thread.

        Communicators that the current generation has are not built, but taken over when the new one begins.
        """
        # The cell of this rank leaves, once all others are ready.
        if self._cell.rank not in offered.members:
            self._offers.prepare(offered.number, NoGroups)
            return
        if (entered := self._entered) is None:
            # This rank has left the generation that the offered one was to follow, so nobody will enter that.
            return
        named = Assignment.of(offered, self._cell).groups(tagged=self._tagged)
        self._offers.prepare(
            offered.number, lambda: self._build(offered.number, named, entered.communicators)
        )

    def count(self, votes: Votes) -> None:
        """Count the votes of a step: have all members prepared the same generation?"""
        self.boundary = elected(votes.ballots, votes.squares, self.world.size())

    def enter_prepared(self, number: int) -> bool:
        """Enter generation ``number`` if its groups were prepared; return whether they were.

        If not, the groups of the generation before must be aborted, and the new ones built. Raises
        Superseded.
        """
        self.boundary = 0
        prepared = self._offers.take(number)
        if prepared is None:
            return False
        self._left, self._entered = self._entered, prepared
        prepared.take_over(self._left)
        return True

    # -- the generation that this rank is in ------------------------------------------------------------------------

    def build(self, assignment: Assignment) -> None:
        """Build the groups of this rank's generation. Raises as ``rebuild.groups.build_groups``."""
        # In a planned generation others may take over communicators; this rank has none to take over.
        before = () if assignment.generation.planned else None
        self._entered = self._build(assignment.number, assignment.groups(tagged=self._tagged), before)

    def announce(self) -> None:
        """Tell that this rank is in the groups of the generation."""
        self._on_groups(self.entered)

    def all_have_entered(self) -> None:
        """Close the groups of the generation before, in which nobody is any more."""
        if self._left is not None:
            self._left.close()
            self._left = None

    def part(self, *, together: bool) -> None:
        """Leave the groups that have had their use, where groups take a device's memory: the plan counts on it.

        Called by every rank once it has what it lacked, and its device is through. ``together``: all have come that
        far. Otherwise they wait for one another here: what was sent may still be on its way, and would be lost.
        """
        if not self.entered.can_part:
            return
        if not together:
            dist.barrier(group=self.world)
        self.entered.part()

    def abort(self) -> None:
        """End every operation. :meth:`leave` must follow."""
        for groups in (self._entered, self._left):
            if groups is not None:
                groups.abort()

    def leave(self) -> None:
        for groups in (self._entered, self._left):
            if groups is not None:
                groups.leave()
        self._entered = self._left = None

    # -- what others use ------------------------------------------------------------------------------------------

    @property
    def has_entered(self) -> bool:
        """Whether this rank is in the groups of a generation."""
        return self._entered is not None

    @property
    def holds(self) -> torch.Tensor | None:
        """See ``execute/ledger.py``; None also where this rank is in no groups."""
        return None if self._entered is None else self._entered.holds

    @property
    def entered(self) -> Groups:
        """The groups of this rank's generation. Raises Superseded if there are none."""
        if self._entered is None:
            raise Superseded("no groups")
        return self._entered

    @property
    def world(self) -> dist.ProcessGroup:
        """The group of all members."""
        return self.entered[WORLD]

    def within_cell(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of ``ranks`` of this rank's cell; None if this rank is the only one."""
        return self.find(membership.cell_group_name(ranks))

    def find(self, name: str) -> dist.ProcessGroup | None:
        """Return the group of that name, if this rank is in it."""
        return self.entered[name] if name in self.entered else None

    def holders_of(
        self, assignment: Assignment, first: int, last: int, part: int, parts: int
    ) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
        """Return the group of the ranks that have ``part``, of ``parts``, of the block ``[first, last)``.

        None: this rank alone has. The second value is the number of these ranks for each holder.
        """
        (block,) = (one for one in assignment.layout.blocks() if (one.first, one.last) == (first, last))
        ranks = membership.ranks_of_holders(block, assignment.cells, parts)
        return self.find(membership.block_group_name(first, last, part, parts)), ranks

    @property
    def are_over(self) -> bool:
        """Whether the groups are aborted, on a device that goes on with what the abort has left there."""
        return self.holds is not None and not self.holds.item()
