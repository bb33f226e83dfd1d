"""From one generation's groups to the next one's."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.errors import Superseded
from odyssey_megatron.execute.parts import GroupBuilder, Groups, NoGroups
from odyssey_megatron.execute.prepare import Offers, elected
from odyssey_megatron.execute.votes import Votes
from odyssey_megatron.plan import groups as membership
from odyssey_megatron.plan.assignment import Assignment
from odyssey_megatron.plan.generation import Generation
from odyssey_megatron.plan.groups import WORLD


class Regrouping:
    """The groups that one rank is in: those of its generation; those of the one before, if this one was prepared, until
    all members have left them; and those of the offered one, which a thread builds behind the steps.

    Args:
        decline: is called, from that thread, with the number of an offered generation and why its groups cannot be
            built.
        on_groups: hears of the groups of each generation that this rank enters.
        tagged: see ``Assignment.groups``.
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
        """Builds its groups behind the back of the steps, but for communicators that the generation has which the steps
        are of: those are taken over. Any thread.
        """
        if self._cell.rank not in offered.members:  # its cell leaves, once all others are ready
            self._offers.prepare(offered.number, NoGroups)
            return
        if (entered := self._entered) is None:
            return  # all have been in the generation that it was to follow: this rank has left it, and nobody will
        named = Assignment(generation=offered, cell=self._cell).groups(tagged=self._tagged)
        self._offers.prepare(
            offered.number, lambda: self._build(offered.number, named, entered.communicators)
        )

    def count(self, votes: Votes) -> None:
        """Of a step: whether all members have prepared the same one."""
        self.boundary = elected(votes.ballots, votes.squares, self.world.size())

    def enter_prepared(self, number: int) -> bool:
        """Generation ``number`` begins. Whether its groups were prepared; else those of the one before must be aborted,
        and its own built. Raises Superseded.
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
        """Raises as ``rebuild.groups.build_groups``."""
        before = () if assignment.generation.planned else None  # of a planned one it has come to the others
        self._entered = self._build(assignment.number, assignment.groups(tagged=self._tagged), before)

    def announce(self) -> None:
        """This rank is in the groups of the generation."""
        self._on_groups(self.entered)

    def all_have_entered(self) -> None:
        """Nobody is in the groups of the generation before any more."""
        if self._left is not None:
            self._left.close()
            self._left = None

    def abort(self) -> None:
        """Ends every operation; :meth:`leave` follows."""
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
        """This rank is in the groups of a generation."""
        return self._entered is not None

    @property
    def holds(self) -> torch.Tensor | None:
        """See ``execute/ledger.py``: None also where this rank is in no groups."""
        return None if self._entered is None else self._entered.holds

    @property
    def entered(self) -> Groups:
        """Raises Superseded if there are none."""
        if self._entered is None:
            raise Superseded("no groups")
        return self._entered

    @property
    def world(self) -> dist.ProcessGroup:
        """Of all members."""
        return self.entered[WORLD]

    def within_cell(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """That of ``ranks`` of this rank's cell; None if it is the only one."""
        return self.find(membership.cell_group_name(ranks))

    def find(self, name: str) -> dist.ProcessGroup | None:
        """If this rank is in it."""
        return self.entered[name] if name in self.entered else None

    def holders_of(
        self, assignment: Assignment, first: int, last: int, slot: int
    ) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
        """The group of the holders of a block ``[first, last)``; of each all ranks that have the same of it as this one
        in a ``slot`` (``Cell.slot``), and how many these are.
        """
        parts = self._cell.parts
        (block,) = (one for one in assignment.layout.blocks() if (one.first, one.last) == (first, last))
        ranks = membership.ranks_of_holders(block, self._cell, assignment.shapes, parts)
        return self.entered[membership.block_group_name(first, last, slot % parts, parts)], ranks

    @property
    def are_over(self) -> bool:
        """They are aborted, on a device that goes on with what that has left."""
        return self.holds is not None and not self.holds.item()
