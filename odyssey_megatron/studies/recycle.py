"""ReCycle (arXiv 2405.14009): rerouting to data-parallel peers, with failures normalised."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Hop, Layout, Route
from odyssey_megatron.plan.placing.memory import activation_caps
from odyssey_megatron.plan.placing.transfer import assign_seats, plan_transfers, transfer_s
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.policy.routes.rerouting import reroute
from odyssey_megatron.studies.baselines import (
    Running,
    System,
    World,
    megatron_on,
    one_f_one_b_step_s,
    our_step_s,
    sliced,
)
from odyssey_megatron.studies.stagger import staggered_step_s


class ReCycle(System):
    """Rerouting only: layout kept, decoupled backward, staggered optimizer.

    Whichever workers die, workers move until the dead are spread over the stages such that they cost least (failure
    normalisation). So plans depend only on the number of the dead. A healthy step is 1F1B's, and a step with dead
    workers is no faster than that: staggering would shorten both, and the paper claims no more than that failures are
    free. With our scheduler no step is slower than in our order.
    """

    name = "recycle"

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        build_s = world.profile.group_build_s
        dead = len(world.workers) - len(alive)
        if running.layout is None:
            return self.restarted(world, alive, "restart")
        if not dead:
            return replace(self.start(world), downtime_s=build_s)
        costs = world.profile.costs
        try:
            places, staggered_s = normalised(world.job, costs, len(world.workers), dead)
            layout = _seated(places, alive, running.layout, costs)
            moved_s = transfer_s(plan_transfers(running.layout, layout, alive, costs), costs)
        except (PlanInfeasible, LayersLost):
            return self.restarted(world, alive, "a stage lost all its workers")
        healthy = sliced(world.job, megatron_on(world.job, world.workers))
        step_s = max(staggered_s, one_f_one_b_step_s(healthy, costs))
        if self.ours:
            step_s = min(step_s, our_step_s(sliced(world.job, places), world.profile))
        return Running(layout=layout, step_s=step_s, downtime_s=build_s + moved_s, note="rerouted")


@lru_cache(maxsize=1024)
def normalised(job: JobSpec, costs: Costs, workers: int, dead: int) -> tuple[Layout, float]:
    """Return the healthy layout of workers 0 to ``workers`` - 1 without ``dead`` of them, and its staggered step.

    Workers are removed one after the other, each where those left in its stage then have the least to do, so that the
    fullest stage has as little as possible. Of stages that are alike the one nearest to the middle loses a worker:
    failures cost less there than at the ends. ReCycle's planner finds this by dynamic programming and precomputes the
    plans, an MILP for each number of dead. Memory: two microbatches more than 1F1B's, or all that there is.

    Raises:
        PlanInfeasible: some stage would lose all its workers, or memory is too small.
    """
    healthy = megatron_on(job, range(workers))
    stages = [
        (costs.spans.compute_s(hop.first, hop.last), list(healthy.holders[hop.first]))
        for hop in healthy.routes[0].hops
    ]
    middle = (len(stages) - 1) / 2
    for _ in range(dead):
        left = [at for at, (_, holders) in enumerate(stages) if len(holders) > 1]
        if not left:
            raise PlanInfeasible("a stage would lose all its workers")
        at = min(left, key=lambda at: (stages[at][0] / (len(stages[at][1]) - 1), abs(at - middle)))
        stages[at][1].pop()
    alive = {worker for _, holders in stages for worker in holders}
    layout = reroute(healthy, alive, costs)
    cut = sliced(job, layout)
    caps = activation_caps(cut, costs, extra=2, budget_bytes=costs.memory_bytes)
    order = order_routes(cut, costs, in_flight_cap=caps)
    return layout, staggered_step_s(cut, costs, order.done_s)


def _seated(places: Layout, alive: tuple[int, ...], previous: Layout, costs: Costs) -> Layout:
    """Return ``places`` on the living workers, so that the fewest bytes move."""
    held = {worker: previous.held_by(worker) for worker in alive}
    seats = places.workers
    found = assign_seats([places.held_by(seat) for seat in seats], alive, held, costs)
    worker = dict(zip(seats, found, strict=True))
    routes = tuple(
        Route(
            microbatches=route.microbatches,
            hops=tuple(Hop(worker=worker[h.worker], first=h.first, last=h.last) for h in route.hops),
        )
        for route in places.routes
    )
    holders = tuple(tuple(sorted(worker[seat] for seat in held)) for held in places.holders)
    return replace(places, holders=holders, routes=routes).check()
