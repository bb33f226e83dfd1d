"""A worker is lost: other holders of its layers do its work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.proposal import Policy, Proposal
from odyssey_megatron.policy.routes.rerouting import reroute


class Reroute(Policy):
    """Only routes change. If a shadow begins to compute, the table calls it a takeover."""

    name, order, by_flag = "reroute", 10, True

    def propose(self, case: Case) -> Iterable[Proposal]:
        """Propose it after a loss."""
        if case.lost:
            name = "takeover" if _takes_over(case.previous, case.rerouted) else ""
            yield Proposal(layout=case.rerouted, note="layout kept", name=name)
            yield from around_slow(case, "layout kept")


def around_slow(case: Case, note: str) -> Iterable[Proposal]:
    """Propose the same without slow workers, if others hold all their layers: microbatches that go through them are
    late.
    """
    if case.slow:
        with contextlib.suppress(PlanInfeasible):
            layout = reroute(case.previous, case.steady, case.profile.costs)
            yield Proposal(layout=layout, note=f"{note}, without {len(case.slow)} slow")


def _takes_over(previous: Layout, layout: Layout) -> bool:
    """Return whether a worker computes layers of ``layout`` that it only held before, as a shadow."""
    stays = {id(route.hops) for route in previous.routes}  # most stay, if few of many workers are lost
    new = {
        (hop.worker, hop.first, hop.last)
        for route in layout.routes
        if id(route.hops) not in stays
        for hop in route.hops
    }
    had: dict[int, set[int]] = {worker: set() for worker, *_ in new}
    for route in previous.routes:
        for hop in route.hops:
            if hop.worker in had:
                had[hop.worker].update(range(hop.first, hop.last))
    return any(not had[worker].issuperset(range(first, last)) for worker, first, last in new)


POLICY = Reroute()
