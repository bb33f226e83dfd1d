"""A worker is lost: others that hold its layers do what it would have done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.proposal import Policy, Proposal
from odyssey_megatron.policy.rerouting import reroute


class Reroute(Policy):
    """Only routes change. Where a shadow begins to compute, the table calls it a takeover."""

    name, order, by_flag = "reroute", 10, True

    def propose(self, case: Case) -> Iterable[Proposal]:
        """After a loss."""
        if case.lost:
            name = "takeover" if _takes_over(case.previous, case.rerouted) else ""
            yield Proposal(layout=case.rerouted, note="layout kept", name=name)
            yield from around_slow(case, "layout kept")


def around_slow(case: Case, note: str) -> Iterable[Proposal]:
    """The same without the slow, where others hold all that they hold: whatever goes through them is late."""
    if case.slow:
        with contextlib.suppress(PlanInfeasible):
            layout = reroute(case.previous, case.steady, case.profile.costs)
            yield Proposal(layout=layout, note=f"{note}, without {len(case.slow)} slow")


def _takes_over(previous: Layout, layout: Layout) -> bool:
    """Whether a worker computes layers of ``layout`` that it only held before: a shadow's."""
    visits, before = ({hop for route in one.routes for hop in route.hops} for one in (layout, previous))
    new = visits - before  # few, where of many workers some are lost
    workers = {hop.worker for hop in new}
    had = {
        (hop.worker, layer) for hop in before if hop.worker in workers for layer in range(hop.first, hop.last)
    }
    return any((hop.worker, layer) not in had for hop in new for layer in range(hop.first, hop.last))


POLICY = Reroute()
