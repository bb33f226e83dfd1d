"""New pipelines over the living workers: layers move, and stages, splits and shares change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.bound import cluster_bound_s
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.scheduling.gathers import least_late_s
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.proposal import Policy, Sketch
from odyssey_megatron.policy.shapes.kinds import Slow, sort_of
from odyssey_megatron.policy.shapes.partition import Partition
from odyssey_megatron.policy.shapes.seating import place


class Replan(Policy):
    """Proposes the best shapes over all living workers, or some of them.

    Each slow worker gets a place that is cut for it (``Case.cut_for``), or is left out. Shapes are also cut as if all
    workers were alike, and then again for what each can do.
    """

    name, order, by_flag, many_shapes = "replan", 40, True, True

    def propose(self, case: Case) -> Iterable[Sketch]:
        """Propose shapes after a loss, and where workers are slow, have been, or are not used yet."""
        if not (case.lost or case.speeds or case.is_larger or case.rebalances):
            return
        search, microbatches, fits = case.search, case.job.num_microbatches, False
        alike: tuple[tuple[int, ...], Mapping[int, Slow]] = (case.alive, {})
        apart = [(case.steady, case.cut_for)] if case.slow and case.steady else []
        leaves_out = _leaves_out(case)
        for workers, slow in [*apart, alike] if leaves_out else [alike, *apart]:
            if leaves_out and fits:
                break
            for found in search.partitions(
                len(workers), microbatches, [*slow.values()], thorough=case.thorough
            ):
                fits = True
                yield _sketch(case, workers, found, slow)
        if not fits:
            raise PlanInfeasible(search.why_not(len(case.alive)))


def _leaves_out(case: Case) -> bool:
    """Whether shapes for equal workers are not proposed if there are others.

    So it is where only one shape is laid out, or in haste. With slow workers as with any others a step takes about as
    long as the slowest of them makes it.
    """
    alive, steady = len(case.alive), len(case.steady)
    slowest = min((one.speed for one in case.slow.values()), default=1.0)
    return (case.is_large or case.cuts_later) and 0 < steady and alive * slowest < steady


def _sketch(case: Case, workers: tuple[int, ...], found: Partition, slow: Mapping[int, Slow]) -> Sketch:
    """Return the sketch for ``found``.

    ``slow`` are workers besides ``workers`` for which places may be cut. If it is empty, all workers are taken to be
    alike.
    """
    costs, search, alive = case.profile.costs, case.search, len(case.alive)
    used = sum(sort_of(kind) >= 0 for kind, _ in found.shares)
    note = f"pipelines {search.lengths(found, len(workers))}"
    if used:
        note += f" cut for {used} slow"
    if without := alive - len(workers) - used:
        note += f" without {without} slow"
    speeds = None if slow else case.speeds
    # The estimate knows neither how much memory the fullest worker of other pipelines leaves, nor slow links.
    is_exact = costs.memory_bytes is not None and (not costs.slow_links or case.goes_by_estimates)
    least_s = (found.estimate_s if is_exact else found.least_s) + costs.agreement_s
    if speeds or not is_exact:
        bound_s = cluster_bound_s(case.job.num_microbatches, costs, case.alive, case.speeds)
        least_s = max(least_s, bound_s)
    late_s = least_late_s(costs, found.number, case.job.optimizer_copies)

    def layout() -> Layout:
        shape = search.shape_of(found, len(workers), case.job.num_microbatches)
        return place(shape, workers, case.previous, costs, speeds, slow)

    return Sketch(
        make=layout,
        note=note,
        least_step_s=least_s + late_s,
        tighter=(lambda: least_s + search.waits_s(found, len(workers))) if late_s else None,
        fatal_share=min(len(workers), search.splits.most_stages) / alive if found.number == 1 else 0.0,
    )


POLICY = Replan()
