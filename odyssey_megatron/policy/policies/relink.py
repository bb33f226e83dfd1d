"""Some links are slow: routes go on by others."""

from __future__ import annotations

from collections.abc import Iterable

from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.links import around, exchanged, waits_s
from odyssey_megatron.policy.proposal import Policy, Proposal


class Relink(Policy):
    """Slow links get no messages, or as few as can be."""

    name, order, always = "relink", 5, True

    def propose(self, case: Case) -> Iterable[Proposal]:
        """Where nobody is lost and messages take slow links."""
        costs = case.profile.costs
        if case.lost or not waits_s(case.previous, costs):
            return
        layout = around(case.previous, costs)
        if layout is not case.previous:
            yield Proposal(layout=layout, note="routes go on by other workers of the next stage")
        if waits_s(layout, costs):
            moved = exchanged(layout, costs)
            if moved is not layout:
                yield Proposal(layout=moved, note="workers in each other's places, off slow links")


POLICY = Relink()
