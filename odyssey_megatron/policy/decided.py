"""What the planner has decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.generation import CandidateRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The plan to go on with now, and the better one to move towards."""

    plan: Plan
    rows: tuple[CandidateRow, ...]
    """Rows of all candidates that were considered."""
    target: Callable[[], Plan] | None = None
    """Makes a plan that is better than ``plan``, for which layers must move first, behind the steps of ``plan``. None
    if there is none.
    """
    is_hasty: bool = False
    """Whether a better plan may be found once nobody waits (``Case.is_hasty``)."""

    @property
    def last(self) -> Plan:
        """The plan that it comes to."""
        return self.target() if self.target else self.plan
