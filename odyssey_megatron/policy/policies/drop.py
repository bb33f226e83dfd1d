"""A worker is lost: its pipeline stops computing, and the whole ones share its microbatches."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import heapify, heapreplace

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.layout import Hop, Layout
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.proposal import Policy, Proposal
from odyssey_megatron.policy.routes.paths import group_routes


class Drop(Policy):
    """Broken pipelines get no microbatches."""

    name, order = "drop", 20

    def propose(self, case: Case) -> Iterable[Proposal]:
        """Propose it after a loss."""
        if case.lost:
            layout = drop_pipelines(case.previous, case.alive)
            yield Proposal(layout=layout, note="broken pipelines dropped")


def drop_pipelines(previous: Layout, alive: Collection[int]) -> Layout:
    """Return ``previous`` without the broken routes, whose microbatches the whole ones share.

    No state moves, and no microbatch changes pipelines in the middle. The workers left in a broken pipeline still hold
    their layers, without microbatches, so that they stay current. ReCoVer and TorchFT drop replicas like this.

    Raises:
        PlanInfeasible: no route is whole.
    """
    there = set(alive)
    whole = [route for route in previous.routes if all(hop.worker in there for hop in route.hops)]
    if not whole:
        raise PlanInfeasible("every pipeline has lost a worker")
    paths: dict[int, tuple[Hop, ...]] = {m: route.hops for route in whole for m in route.microbatches}
    shares = [(len(route.microbatches), i) for i, route in enumerate(whole)]
    heapify(shares)
    for microbatch in range(previous.num_microbatches):
        if microbatch not in paths:
            share, least = shares[0]
            heapreplace(shares, (share + 1, least))
            paths[microbatch] = whole[least].hops
    holders = tuple(tuple(w for w in held if w in there) for held in previous.holders)
    return Layout(holders=holders, routes=group_routes(paths), tied=previous.tied).check()


POLICY = Drop()
