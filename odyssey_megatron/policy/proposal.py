"""What a policy is, and what it proposes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from odyssey_megatron.plan.layout import Layout

if TYPE_CHECKING:
    from odyssey_megatron.policy.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A layout. Its bounds, and what has to move, follow from it."""

    layout: Layout
    note: str
    """What is special about it, for the table."""
    name: str = ""
    """For the table, where it is not the policy's."""
    settles: bool = False
    """There is no need to look at anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A layout that takes long to make, so that it is only made where its bounds say that it may win."""

    make: Callable[[], Layout]
    """May raise PlanInfeasible."""
    note: str
    least_step_s: float
    """A bound, or an estimate that leaves out what messages and reductions cost."""
    fatal_share: float
    """See :meth:`odyssey_megatron.policy.case.Case.fatal_share`."""
    tighter: Callable[[], float] | None = None
    """A better ``least_step_s``, for which it needs not be made."""
    least_holders: int = 0
    """Each layer gets so many, some without microbatches; 0: as many as the job asks for."""


class Policy:
    """One way to go on after a change of the cluster.

    A file of ``policies/`` with an instance, ``POLICY``, is all that a new one takes: whatever is proposed is given its
    bounds, its transfers and its schedule, verified, scored and put into the table by the others' rules.
    """

    name: str
    """As in the table; its file has the same."""
    order: int = 100
    """Of those that score alike the lower one is taken: what changes less."""
    by_flag: bool = False
    """``--odyssey-policy`` may ask for it."""
    always: bool = False
    """Whatever ``--odyssey-policy`` says: it does not compete with those that can be asked for."""
    stays: bool = False
    """It changes nothing: the plan goes on under the name that it has."""
    many_shapes: bool = False
    """It proposes many of a kind, of which the most promising ones are scheduled, and which share a row if none is."""

    def propose(self, case: Case) -> Iterable[Proposal | Sketch]:
        """Nothing where it does not apply.

        Raises:
            PlanInfeasible: it applies and cannot be had; says why, for the table.
        """
        raise NotImplementedError
