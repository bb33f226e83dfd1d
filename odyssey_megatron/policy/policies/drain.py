"""Some workers are slow: their pipelines stop computing, and the others share the microbatches."""

from __future__ import annotations

from collections.abc import Iterable

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.policies.drop import drop_pipelines
from odyssey_megatron.policy.proposal import Policy, Proposal


class Drain(Policy):
    """A slow worker gives up its microbatches and layers, so that it may leave; the rest of its pipeline still holds
    its layers.
    """

    name, order, always = "drain", 25, True

    def propose(self, case: Case) -> Iterable[Proposal]:
        """Propose it if nobody is lost and some workers are slow."""
        if case.lost or not case.speeds:
            return
        try:
            layout = drop_pipelines(case.previous, case.steady)
        except PlanInfeasible:
            raise PlanInfeasible("every pipeline has a slow worker") from None
        yield Proposal(layout=layout, note="slow pipelines left")


POLICY = Drain()
