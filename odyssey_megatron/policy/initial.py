"""The plan that a job begins with: Megatron's own layout, or the best one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.layout import Layout, megatron_layout
from odyssey_megatron.plan.placing.redundancy import with_keepers, with_shadows
from odyssey_megatron.plan.placing.spread import spread
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.policy.case import worker_shares, worker_speeds
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import scheduled
from odyssey_megatron.policy.preparing import prepare_for
from odyssey_megatron.policy.routes.mixing import Mixing, judged_by
from odyssey_megatron.policy.shapes.divide import divided
from odyssey_megatron.policy.shapes.pipelines import ALIKE, WORTH
from odyssey_megatron.policy.shapes.search import search_for
from odyssey_megatron.policy.shapes.seating import place, seated
from odyssey_megatron.policy.shapes.slide import slid

_LEANER = 0.98
"""A fraction of the memory of the best layout: another layout must need less than that to be worth it."""

_TRIED, _MOST_TRIED = 2, 8
"""The number of partitions, the most promising ones, that are scheduled; and with those that then do not fit."""


def initial_plan(job: JobSpec, state: ClusterState, profile: Profile) -> Plan:
    """Return the failure-free plan: Megatron's own layout, or the best one. Called once before training, when there is
    time.

    Raises:
        PlanInfeasible: it does not fit the profile's memory.
    """
    own = megatron_layout(
        num_layers=job.num_layers,
        pipeline_size=job.pipeline_model_parallel_size,
        num_workers=len(state.workers),
        num_microbatches=job.num_microbatches,
        stage_layers=job.stage_layers,
        tied=job.is_tied,
    )
    if not job.chooses_layout:
        return _leanest([_healthy(own, job, state, profile)], job, state, profile)
    plans, reasons = list[Plan](), list[str]()
    for layout, holders in _layouts(own, job, state, profile, plans):
        try:
            plans.append(_healthy(layout, job, state, profile, holders))
        except PlanInfeasible as error:
            reasons.append(str(error))
    if not plans:
        raise PlanInfeasible(reasons[0])

    def wanted_s(plan: Plan) -> float:
        worth = WORTH if plan.layout.revisits else 1.0
        return plan.step_s / worth * (1 - ALIKE * (plan is plans[0]))

    return _leanest(sorted(plans, key=wanted_s), job, state, profile)


def best_plan(job: JobSpec, state: ClusterState, profile: Profile) -> Plan | None:
    """Return the plan that ``job`` would begin with if it chose its layout; None if by ``profile`` it does not fit.

    To be called beside decisions, which go first in the part that takes long.
    """
    job = replace(job, best_layout=True, spreads_replicas=True)
    prepare_for(len(state.workers), job, profile)
    try:
        return initial_plan(job, state, profile)
    except PlanInfeasible:
        return None


def beside_launch_line(
    best: Plan, job: JobSpec, state: ClusterState, profile: Profile
) -> tuple[CandidateRow, ...]:
    """Return rows that compare ``best``, which ``job`` begins with, with the launch line's layout.

    None if the job did not choose, or if by ``profile`` the launch line's does not fit.
    """
    if not job.chooses_layout:
        return ()
    try:
        own = initial_plan(replace(job, best_layout=False, virtual_stages=1), state, profile)
    except PlanInfeasible:
        return ()
    faster = f"pipelines {best.layout.lengths}; {own.step_s / best.step_s:.2f} times as fast"
    is_own = best.layout == own.layout
    rows = [] if is_own else [("layout", best, True, faster)]
    rows.append(("launch line", own, is_own, "its stages and pipelines"))
    return tuple(
        CandidateRow(
            name=name, step_s=plan.step_s, transition_s=0.0, score=None, chosen=chosen, reason=reason
        )
        for name, plan, chosen, reason in rows
    )


def _leanest(plans: Sequence[Plan], job: JobSpec, state: ClusterState, profile: Profile) -> Plan:
    """Return the plan that needs least memory, among ``plans``, the best of which comes first, and other orders of
    their layouts.

    Its step may be longer than the best by a fraction of ``JobSpec.slower_for_memory``.
    """
    if not job.slower_for_memory or job.eager_forwards:  # eager forwards fill the memory
        return plans[0]
    longest_s = plans[0].step_s * (1 + job.slower_for_memory)

    def fullest(plan: Plan) -> float:
        bytes_of_all = max(size for _, size in plan.peak_bytes)
        return bytes_of_all / (1 if plan.layout == plans[0].layout else _LEANER)

    near = (one for one in plans if one.step_s <= longest_s)
    leaner = (
        scheduled("initial", one.layout, (), state, profile, job=job, longest_s=longest_s) for one in near
    )
    return min(leaner, key=fullest)


def _layouts(
    own: Layout, job: JobSpec, state: ClusterState, profile: Profile, plans: Sequence[Plan]
) -> Iterator[tuple[Layout, int]]:
    """Yield the layouts to choose from, each with the number of holders that its layers are to have at least.

    ``plans``: those of the layouts so far; it grows meanwhile.
    """
    yield own, 0
    if job.virtual_stages > 1:
        yield from ((layout, 0) for layout in _turned(own, job, profile))
    if job.best_layout:
        # If the launch line's layout survives the loss of a worker, or of as many as copies of optimizer state were
        # asked for against, only layouts that do so are tried, if one of them fits: with as many pipelines, or with
        # fewer that have shadows.
        holders = min(map(len, own.holders))
        for least in dict.fromkeys(min(one, holders) for one in (max(2, job.optimizer_copies), 2, 1)):
            for fewest in dict.fromkeys((least, 1)):
                for layout in _better(own, job, profile, fewest, plans):
                    if fewest == least or min(map(len, layout.holders)) < least:
                        yield layout, least
            yield from ((layout, least) for layout in _apart(own, job, state, profile, least, plans))
            if plans:
                break


def _turned(own: Layout, job: JobSpec, profile: Profile) -> Iterator[Layout]:
    """Yield the launch line's pipelines with routes that visit workers more than once, for its virtual stages."""
    costs, workers = profile.costs, own.workers
    search = search_for(costs, costs.memory_bytes, job.optimizer_copies, revisits=job.revisits)
    for other in search.revisiting:
        if other.splits.most_stages < job.pipeline_model_parallel_size:
            continue
        try:
            shape = other.shape(len(workers), job.num_microbatches, len(own.routes))
        except PlanInfeasible:
            continue
        yield place(shape, workers, own, costs)


def _better(
    own: Layout, job: JobSpec, profile: Profile, least: int, plans: Sequence[Plan]
) -> Iterator[Layout]:
    """Yield layouts of the same workers with at least ``least`` pipelines, the best one first.

    ``plans``: see :func:`_layouts`. What turns out not to fit does not count as tried.
    """
    costs, workers = profile.costs, own.workers
    search = search_for(costs, costs.memory_bytes, job.optimizer_copies, revisits=job.revisits)
    good = (
        one
        for one in search.partitions(len(workers), job.num_microbatches, thorough=True)
        if one.number >= least and one.shares
    )
    wanted = len(plans) + _TRIED
    for found in itertools.islice(good, _MOST_TRIED):
        if len(plans) < wanted:
            yield place(search.shape_of(found, len(workers), job.num_microbatches), workers, own, costs)
    if job.revisits:
        for shape in divided(search, len(workers), job.num_microbatches, least):
            yield place(shape, workers, own, costs)
        gap = slid(search, len(workers), job.num_microbatches)
        if gap is not None and min(map(len, gap.layout.holders)) >= least:
            yield seated(gap.layout, workers, own, costs)


def _apart(
    own: Layout, job: JobSpec, state: ClusterState, profile: Profile, least: int, plans: Sequence[Plan]
) -> Iterator[Layout]:
    """Yield a layout in which microbatches go their own ways, if the job is small and that is worth it beside
    ``plans``.
    """
    mixing = Mixing(
        workers=own.workers,
        microbatches=job.num_microbatches,
        costs=profile.costs,
        speeds=worker_speeds(state),
        least_holders=least,
        judge=judged_by(
            profile.costs,
            worker_speeds(state),
            worker_shares(state),
            lambda layout: _held(layout, job, state, profile),
        ),
        tied=job.is_tied,
    )
    if job.revisits and mixing.is_small:
        found = mixing.better([one.layout for one in plans])
        if found is not None:
            yield found


def _healthy(
    layout: Layout, job: JobSpec, state: ClusterState, profile: Profile, least_holders: int = 0
) -> Plan:
    if job.spreads_replicas:
        # More nodes than survive the loss of one are slower to sum between: only who asks for it has them.
        layout = spread(layout, state.nodes, job.optimizer_copies, widely=not job.best_layout)
    layout = _held(layout, job, state, profile, least_holders)
    return scheduled("initial", layout, (), state, profile, job=job, eager=job.eager_forwards)


def _held(
    layout: Layout, job: JobSpec, state: ClusterState, profile: Profile, least_holders: int = 0
) -> Layout:
    """Return ``layout`` with the holders, and the keepers of optimizer state, that the job asks for, and at least
    ``least_holders`` of each layer.
    """
    nodes, least = state.nodes, max(job.least_holders, least_holders)
    layout = with_shadows(layout, None, nodes, least, profile.costs, eager=job.eager_forwards)
    return with_keepers(layout, None, nodes, job.optimizer_copies)
