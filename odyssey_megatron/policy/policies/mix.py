"""Take routes apart, where there are few microbatches and layers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.bound import cluster_bound_s
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.redundancy import with_keepers, with_shadows
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.policies import replan
from odyssey_megatron.policy.proposal import Policy, Sketch
from odyssey_megatron.policy.routes.mixing import Mixing, judged_by
from odyssey_megatron.policy.shapes.seating import seated


class Mix(Policy):
    """Each microbatch takes its own route through the workers that hold the layers."""

    name, order = "mix", 50

    def propose(self, case: Case) -> Iterable[Sketch]:
        """Propose it in small jobs, if nobody waits for the decision: it takes a second."""
        if not (case.rebalances and case.mixes and case.job.revisits):
            return
        costs, job = case.profile.costs, case.job
        mixing = Mixing(
            workers=case.alive,
            microbatches=job.num_microbatches,
            costs=costs,
            speeds=case.speeds,
            least_holders=min(max(2, job.optimizer_copies), min(map(len, case.previous.holders))),
            judge=judged_by(costs, case.speeds, case.shares, lambda layout: _kept(case, layout)),
            tied=job.is_tied,
        )
        if not mixing.is_small:
            return

        def make() -> Layout:
            found = mixing.better(_starts(case))
            if found is None:
                raise PlanInfeasible("no routes that take pipelines apart are worth it")
            if costs.slow_links:  # it was found for these workers
                return found
            return seated(found, case.alive, case.previous, costs, case.speeds)

        yield Sketch(
            make=make,
            note="microbatches go their own ways",
            least_step_s=cluster_bound_s(job.num_microbatches, costs, case.alive, case.speeds),
            fatal_share=0.0,
        )


def _starts(case: Case) -> list[Layout]:
    """Return layouts to start from: the previous one unless a worker is lost, and those of the best pipelines."""
    found = [] if case.lost else [case.previous]
    for sketch in islice(replan.POLICY.propose(case), 2):
        with suppress(PlanInfeasible):
            found.append(sketch.make())
    return found


def _kept(case: Case, layout: Layout) -> Layout:
    nodes, job = case.nodes, case.job
    layout = with_shadows(
        layout, case.previous, nodes, job.least_holders, case.profile.costs, shares=case.shares
    )
    return with_keepers(layout, case.previous, nodes, job.optimizer_copies)


POLICY = Mix()
