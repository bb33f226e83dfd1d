"""Some links are slow: routes take other links, and sums are made elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.proposal import Policy, Proposal
from odyssey_megatron.policy.routes.links import around, exchanged, side_by_side, sums_wait_s, waits_s


class Relink(Policy):
    """Slow links carry no messages, or as few as possible."""

    name, order, always = "relink", 5, True

    def propose(self, case: Case) -> Iterable[Proposal]:
        """Propose it if nobody is lost, and messages or sums take slow links."""
        costs = case.profile.costs
        if case.lost:
            return
        if sums_wait_s(case.previous, costs):
            moved = side_by_side(case.previous, costs)
            if moved is not case.previous:
                yield Proposal(layout=moved, note="who holds the same layers side by side, off slow sums")
        if not waits_s(case.previous, costs):
            return
        layout = around(case.previous, costs)
        if layout is not case.previous:
            yield Proposal(layout=layout, note="routes go on by other workers of the next stage")
        if waits_s(layout, costs):
            moved = exchanged(layout, costs)
            if moved is not layout:
                yield Proposal(layout=moved, note="workers in each other's places, off slow links")


POLICY = Relink()
