"""New pipelines over the workers that are there: layers move, and stages, splits and shares change."""

from __future__ import annotations

from collections.abc import Iterable

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.partition import Partition
from odyssey_megatron.policy.proposal import Policy, Sketch
from odyssey_megatron.policy.search import place


class Replan(Policy):
    """The best shapes over all living workers, or some of them, and, if some are slow, over the others alone."""

    name, order, by_flag, many_shapes = "replan", 40, True, True

    def propose(self, case: Case) -> Iterable[Sketch]:
        """After a loss, and where workers are slow, have been, or are not used yet."""
        if not (case.lost or case.speeds or case.is_larger or case.rebalances):
            return
        alive, fits = case.alive, False
        for workers in sorted(filter(None, {alive, case.steady}), reverse=True):
            for found in case.search.partitions(len(workers), case.job.num_microbatches):
                fits = True
                yield _sketch(case, workers, found)
        if not fits:
            raise PlanInfeasible(case.search.why_not(len(alive)))


def _sketch(case: Case, workers: tuple[int, ...], found: Partition) -> Sketch:
    costs, search, alive = case.profile.costs, case.search, len(case.alive)
    without = f" without {alive - len(workers)} slow" if len(workers) < alive else ""

    def layout() -> Layout:
        shape = search.shape_of(found, len(workers), case.job.num_microbatches)
        return place(shape, workers, case.previous, costs, case.speeds)

    return Sketch(
        make=layout,
        note=f"pipelines {search.lengths(found, len(workers))}{without}",
        least_step_s=found.estimate_s + costs.optimizer_s,
        fatal_share=min(len(workers), search.most_stages) / alive if found.number == 1 else 0.0,
    )


POLICY = Replan()
