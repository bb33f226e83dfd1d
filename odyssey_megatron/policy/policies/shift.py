"""A worker is lost: its stage gives layers to its neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Hop, Layout, Route
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.cuts import recut
from odyssey_megatron.policy.proposal import Policy, Proposal


class Shift(Policy):
    """Rerouted, and the boundaries between stages moved besides."""

    name, order = "shift", 30

    def propose(self, case: Case) -> Iterable[Proposal]:
        """After a loss, where the layout can be rerouted."""
        if not case.lost:
            return
        try:
            rerouted = case.rerouted
        except PlanInfeasible:  # as reroute says in the table
            return
        layout = shift_layers(rerouted, case.profile.costs, case.speeds)
        yield Proposal(layout=layout, note="rerouted, stage boundaries moved")


def shift_layers(rerouted: Layout, costs: Costs, speeds: Mapping[int, float] | None = None) -> Layout:
    """``rerouted`` with its stage boundaries moved, away from the stages that lost workers.

    The routes stay, so only boundary layers are sent, to the workers of the neighbouring stage. Boundaries are
    min-max over stages of work / living speed, then as near as possible to where they are. Source: ResiHP's
    layer repartition (papers.md §4.2), on top of rerouting.

    Raises:
        PlanInfeasible: the stages are not the same on all routes, or the boundaries are where they should be.
    """
    cuts = {tuple(hop.last for hop in route.hops) for route in rerouted.routes}
    if len(cuts) != 1:
        raise PlanInfeasible("the pipelines are cut differently, so there are no common boundaries to move")
    (ends,) = cuts
    stages = [rerouted.holders[end - 1] for end in ends]
    if len({worker for holders in stages for worker in holders}) < sum(map(len, stages)):
        raise PlanInfeasible("some worker holds several stages")
    capacity = [sum((speeds or {}).get(worker, 1.0) for worker in holders) for holders in stages]
    moved = recut([layer.compute_s for layer in costs.layers], capacity, ends)
    if moved == ends:
        raise PlanInfeasible("no boundary is better elsewhere")
    starts = (0, *moved[:-1])
    routes = tuple(
        Route(
            microbatches=route.microbatches,
            hops=tuple(
                Hop(worker=hop.worker, first=first, last=last)
                for hop, first, last in zip(route.hops, starts, moved, strict=True)
            ),
        )
        for route in rerouted.routes
    )
    holders = tuple(
        stages[stage]
        for stage, (first, last) in enumerate(zip(starts, moved, strict=True))
        for _ in range(first, last)
    )
    return Layout(holders=holders, routes=routes, tied=rerouted.tied).check()


POLICY = Shift()
