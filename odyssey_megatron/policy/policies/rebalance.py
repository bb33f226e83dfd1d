"""Some workers are slow: they get as much as they can do in the time that others take."""

from __future__ import annotations

from collections.abc import Iterable

from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.policies.reroute import around_slow
from odyssey_megatron.policy.proposal import Policy, Proposal


class Rebalance(Policy):
    """Microbatches move off slow workers, to other holders of the same layers."""

    name, order, always = "rebalance", 20, True

    def propose(self, case: Case) -> Iterable[Proposal]:
        """Propose it if nobody is lost and some workers are slow."""
        if case.speeds and not case.lost:
            yield Proposal(layout=case.rerouted, note="microbatches moved off slow workers")
            yield from around_slow(case, "microbatches moved")


POLICY = Rebalance()
