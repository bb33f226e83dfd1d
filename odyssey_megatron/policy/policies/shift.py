"""A worker is lost: its stage gives layers to its neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Hop, Layout, Route
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.proposal import Policy, Proposal
from odyssey_megatron.policy.shapes.cuts import recut
from odyssey_megatron.policy.shapes.pipelines import MANY_WORKERS


class Shift(Policy):
    """Reroutes, and moves the boundaries between stages besides."""

    name, order = "shift", 30

    def propose(self, case: Case) -> Iterable[Proposal]:
        """Propose it after a loss, if the layout can be rerouted."""
        if not case.lost:
            return
        try:
            rerouted = case.rerouted
        except PlanInfeasible:  # reroute gives the reason in the table
            return
        shifted = dict[Layout, None]()
        reasons = []
        # With many workers there are so many microbatches that sharing them out in whole ones makes no difference.
        few = len(case.alive) <= MANY_WORKERS
        for in_whole in (False, True) if few else (False,):
            try:
                shifted[shift_layers(rerouted, case.profile.costs, case.speeds, in_whole=in_whole)] = None
            except PlanInfeasible as error:
                reasons.append(error)
        if not shifted:
            raise reasons[0]
        for layout in shifted:
            yield Proposal(layout=layout, note="rerouted, stage boundaries moved")


def shift_layers(
    rerouted: Layout, costs: Costs, speeds: Mapping[int, float] | None = None, *, in_whole: bool = False
) -> Layout:
    """Return ``rerouted`` with its stage boundaries moved away from the stages that lost workers.

    The routes stay, so only boundary layers are sent, to the workers of the neighbouring stage. The boundaries minimise
    the maximum over stages of work / living speed, and among those move as little as possible. Source: ResiHP's layer
    repartition (arXiv 2605.06374), on top of rerouting.

    ``in_whole``: take a stage to be as fast as the worker in it that has most to do, since microbatches are not
    shared out in parts: two workers take as long for three microbatches as for four.

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
    if in_whole:
        load = Counter[int]()
        for route in rerouted.routes:
            for hop in route.hops:
                load[hop.worker] += len(route.microbatches)
        capacity = [
            rerouted.num_microbatches
            / max(load[worker] / (speeds or {}).get(worker, 1.0) for worker in holders)
            for holders in stages
        ]
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
