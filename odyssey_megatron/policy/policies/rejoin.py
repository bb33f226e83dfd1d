"""Workers are back, or as fast as they were: go back towards the layout that the job began with."""

from __future__ import annotations

from collections.abc import Iterable

from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.proposal import Policy, Proposal
from odyssey_megatron.policy.routes.rerouting import reroute


class Rejoin(Policy):
    """The first layout, as far as its workers are alive."""

    name, order, always = "rejoin", 10, True

    def propose(self, case: Case) -> Iterable[Proposal]:
        """Propose it if workers are back or speeds have changed.

        Once all are back, and as fast as they were, nothing else is looked at: the job is what it was.
        """
        home, alive = case.home, case.alive
        if case.lost or home is None or not (case.is_larger or case.rebalances):
            return
        if set(home.workers) <= set(alive):
            note, layout = "back to the first layout", home
        else:
            note = "the first layout without the dead"
            layout = reroute(home, alive, case.profile.costs, case.speeds)
        state = case.state
        is_whole = not (state.dead or case.speeds or state.slow_links or state.slow_sums)
        yield Proposal(layout=layout, note=note, settles=is_whole)


POLICY = Rejoin()
