"""``Assignment``: the part of a generation's plan that concerns one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.placing import groups
from odyssey_megatron.plan.placing.slices import Span
from odyssey_megatron.plan.placing.stretches import kept_by
from odyssey_megatron.plan.placing.transfer import needed_at_once
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.schedule import Program
from odyssey_megatron.plan.scheduling.reductions import buckets_of
from odyssey_megatron.plan.scheduling.smaller import StepPlan, smaller
from odyssey_megatron.plan.sending.generation import Generation


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The part of ``generation`` that concerns the rank of ``cell``."""

    generation: Generation
    cell: Cell

    @classmethod
    def of(cls, generation: Generation, cell: Cell) -> Assignment:
        """Return the part of the rank of ``cell``, whatever smaller cells there were when it was made."""
        return cls(generation=generation, cell=cell.among(dict(generation.shapes)))

    @property
    def number(self) -> int:
        """The generation's number."""
        return self.generation.number

    @property
    def plan(self) -> Plan:
        return self.generation.plan

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def worker(self) -> int:
        return self.cell.worker

    @cached_property
    def cells(self) -> Cells:
        return Cells(self.cell, dict(self.generation.shapes))

    @property
    def is_first(self) -> bool:
        """Whether no generation was live before, so that nobody has any layers."""
        return self.generation.previous is None

    @property
    def is_fresh(self) -> bool:
        """Whether this rank's process holds nothing yet: it has taken the place of one that was lost."""
        return self.cell.rank in self.generation.fresh

    @cached_property
    def program(self) -> Program:
        """The program of this rank's worker, for a step of the largest number of microbatches."""
        return self.plan.program(self.worker)

    def step(self, microbatches: int, program: Program | None = None) -> StepPlan:
        """Return what is carried out in a step of ``microbatches`` microbatches.

        ``program`` is the worker's whole program by default, or what is left of it.
        """
        return smaller(self.layout, self.program if program is None else program, microbatches)

    @cached_property
    def kept(self) -> Mapping[int, tuple[Span, ...]]:
        """Layer -> the spans of its optimizer state that this rank keeps."""
        return kept_by(self.cell, self.layout, self.worker)

    @cached_property
    def buckets(self) -> tuple[Block, ...]:
        """The blocks that this rank's worker holds, cut into the buckets in which their holders sum gradients."""
        buckets = buckets_of([self.program], self.layout)
        return tuple(one for one in buckets if self.worker in one.holders)

    @property
    def held(self) -> tuple[int, ...]:
        """The layers that this worker holds under the plan, ascending."""
        return self.layout.held_by(self.worker)

    @property
    def held_before(self) -> tuple[int, ...]:
        """The layers that this worker has when the generation begins, ascending."""
        before = None if self.is_fresh else self.generation.previous
        return before.held_by(self.worker) if before is not None else ()

    @property
    def needed_at_once(self) -> set[int]:
        """The layers that must be here before the generation's first step; others may come while it computes."""
        return needed_at_once(self.layout, self.worker, self.program, self.held_before)

    def groups(self, *, tagged: bool) -> dict[str, tuple[int, ...]]:
        """Return the groups that this rank is in: name -> ranks.

        Args:
            tagged: whether messages between two workers go through the group of all members, told apart by tags. If
                not they go through groups of two, and the first generation has more such groups to time links in.
        """
        named = groups.group_members(
            self.plan,
            self.generation.members,
            self.cells,
            tagged=tagged,
            beside=self.generation.planned,
        )
        return named | (self.timed_group if not tagged else {})

    @property
    def timed_with(self) -> Cell | None:
        """The rank with which this one times its link before the first step; None: with nobody.

        It has the same place in the cell of another worker (``Generation.timed``).
        """
        others = {a: b for pair in self.generation.timed for a, b in (pair, pair[::-1])}
        if self.worker not in others:
            return None
        index = self.cell.index
        return next((one for one in self.cells.ranks_of(others[self.worker]) if one.index == index), None)

    @property
    def timed_group(self) -> dict[str, tuple[int, ...]]:
        """The group of this rank and the one with which it times its link: name -> ranks; empty if there is none."""
        other = self.timed_with
        return groups.timed_group(self.cell.rank, other.rank) if other else {}
