"""The layout may stay as it is: none of its workers is lost."""

from __future__ import annotations

from collections.abc import Iterable

from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.proposal import Policy, Proposal


class Keep(Policy):
    """Keeps the layout as it is."""

    name, order, always, stays = "keep", 0, True, True

    def propose(self, case: Case) -> Iterable[Proposal]:
        """Propose it if nobody is lost."""
        if not case.lost:
            yield Proposal(layout=case.previous, note="no member of the layout is lost")


POLICY = Keep()
