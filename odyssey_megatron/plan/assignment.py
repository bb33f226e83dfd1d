"""What a generation asks of one rank: its own part of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from odyssey_megatron.cluster.cell import Cell, Shapes
from odyssey_megatron.plan import groups
from odyssey_megatron.plan.generation import Generation
from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.reductions import buckets_of
from odyssey_megatron.plan.schedule import Program
from odyssey_megatron.plan.slices import Span
from odyssey_megatron.plan.smaller import StepPlan, smaller
from odyssey_megatron.plan.transfer import needed_at_once


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Of the rank whose ``cell`` it is."""

    generation: Generation
    cell: Cell

    @property
    def number(self) -> int:
        """Of the generation."""
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

    @property
    def shapes(self) -> Shapes:
        return dict(self.generation.shapes)

    @property
    def is_first(self) -> bool:
        """No generation came before: nobody has any layers."""
        return self.generation.previous is None

    @property
    def is_fresh(self) -> bool:
        """This rank has come in the place of one that was lost, and holds nothing yet."""
        return self.cell.rank in self.generation.fresh

    @cached_property
    def program(self) -> Program:
        """Of this rank's worker, for the largest step."""
        return self.plan.program(self.worker)

    def step(self, microbatches: int, program: Program | None = None) -> StepPlan:
        """Of the first so many microbatches: what is carried out of ``program``, by default all of the worker's."""
        return smaller(self.layout, self.program if program is None else program, microbatches)

    @cached_property
    def kept(self) -> Mapping[int, tuple[Span, ...]]:
        """Layer -> the spans of its optimizer state that this worker keeps."""
        return self.layout.spans_kept_by(self.worker)

    @cached_property
    def buckets(self) -> tuple[Block, ...]:
        """The blocks of this rank's worker, cut as it sums their gradients; so do all their holders."""
        buckets = buckets_of([self.program], self.layout)
        return tuple(one for one in buckets if self.worker in one.holders)

    @property
    def held(self) -> tuple[int, ...]:
        """Layers that this worker holds under the plan."""
        return self.layout.held_by(self.worker)

    @property
    def held_before(self) -> tuple[int, ...]:
        """Layers that this worker has as the generation begins."""
        before = None if self.is_fresh else self.generation.previous
        return before.held_by(self.worker) if before is not None else ()

    @property
    def needed_at_once(self) -> set[int]:
        """Layers that must be here before the generation's first step; others may come while it computes."""
        return needed_at_once(self.layout, self.worker, self.program, self.held_before)

    def groups(self, *, tagged: bool) -> dict[str, tuple[int, ...]]:
        """The groups that this rank is in, with their ranks.

        Args:
            tagged: messages between two workers go through the group of all, told apart by tags; else through a group
                of the two. Then the first generation has groups of two more, in which links are timed.
        """
        named = groups.group_members(
            self.plan,
            self.generation.members,
            self.cell,
            self.shapes,
            tagged=tagged,
            beside=self.generation.planned,
        )
        return named | (self.timed_pair if self.is_first and not tagged else {})

    @property
    def timed_pair(self) -> dict[str, tuple[int, ...]]:
        """The group of this rank and the one that it times its link with; empty if it is left over."""
        return groups.pair(self.generation.members, self.cell.rank)
