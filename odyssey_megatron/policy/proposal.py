"""The interface of policies, and of the layouts that they propose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from odyssey_megatron.plan.layout import Layout

if TYPE_CHECKING:
    from odyssey_megatron.policy.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A layout that a policy proposes. Its bounds, and what has to move, follow from it."""

    layout: Layout
    note: str
    """What is special about it, for the table of candidates."""
    name: str = ""
    """Its name in the table, if it is not the policy's."""
    settles: bool = False
    """Whether it is taken, if it fits, without looking at anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A proposed layout that takes long to make, so that it is made only if its bounds say that it may win."""

    make: Callable[[], Layout]
    """Makes the layout; may raise PlanInfeasible."""
    note: str
    least_step_s: float
    """A lower bound of the step, or an estimate that leaves out what messages and reductions cost."""
    fatal_share: float
    """See :meth:`odyssey_megatron.policy.case.Case.fatal_share`."""
    tighter: Callable[[], float] | None = None
    """Computes a better ``least_step_s`` without making the layout; None if there is no better one."""
    least_holders: int = 0
    """The least number of holders of each layer, shadows included; 0: as many as the job asks for."""


class Policy:
    """One way to go on after a change of the cluster.

    To add a policy, add a file to ``policies/`` with an instance ``POLICY``. Every proposal is given its bounds,
    transfers and schedule, verified, scored, and put into the table of candidates by the same rules.
    """

    name: str
    """Its name in the table, and that of its file."""
    order: int = 100
    """Position among the policies. Of options that score alike the one with the lower order is taken, which should be
    the one that changes less.
    """
    by_flag: bool = False
    """Whether ``--odyssey-policy`` may ask for it."""
    always: bool = False
    """Whether it counts as asked for whatever ``--odyssey-policy`` says: it does not compete with the policies of that
    flag.
    """
    stays: bool = False
    """Whether it changes nothing, so that the plan keeps the policy name that it has."""
    many_shapes: bool = False
    """Whether it proposes many shapes. The most promising ones are scheduled; the others share one row of the table."""

    def propose(self, case: Case) -> Iterable[Proposal | Sketch]:
        """Return the policy's proposals; none where it does not apply.

        Raises:
            PlanInfeasible: the policy applies, but is impossible; the message is the reason in the table.
        """
        raise NotImplementedError
