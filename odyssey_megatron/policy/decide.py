"""``decide()``: from the state of the cluster to a verified plan. Pure: the same arguments give the same plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.plan.checking.bound import cluster_bound_s, lower_bound_s
from odyssey_megatron.plan.checking.simulate import step_end_s
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.communicators import Needs, communicators, taken_bytes
from odyssey_megatron.plan.placing.memory import caps_for, per_rank
from odyssey_megatron.plan.placing.transfer import check_living
from odyssey_megatron.plan.plan import Plan, Transfer
from odyssey_megatron.plan.scheduling.assemble import Assembled, assemble
from odyssey_megatron.plan.scheduling.eager import assemble_eager
from odyssey_megatron.plan.scheduling.lean import leaner
from odyssey_megatron.plan.scheduling.order import Order, order_routes
from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.policy.case import MANY_WORKERS, Case, in_cluster, worker_shares, worker_speeds
from odyssey_megatron.policy.contest import best_of
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.options import (
    Candidate,
    Options,
    options,
    options_with_less,
    without_transfers,
)
from odyssey_megatron.policy.reasons import restart_row, row_of, unscored, why
from odyssey_megatron.policy.routes.rerouting import failover_targets
from odyssey_megatron.policy.score import mean_time_between_failures_s

_MOST_VISITS = 2048
"""The most visits of microbatches to workers for which an order that needs less memory is looked for while the job
trains: half a second of CPU at most.
"""

_WAITED_FOR = 0.005
"""A fraction of a step. After a loss, an order that needs less memory is looked for only if this much may be given for
it: ranks would wait for that, 30 to 150 ms for 32 workers where it was not worked out before.
"""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The outcome of :func:`decide`: the best candidate, and everything that was considered.
    Layouts are compared by their fastest schedules. The time that ``JobSpec.slower_for_memory`` trades for memory shows
    in ``plan`` alone.
    """

    case: Case
    options: Options
    best: Candidate
    worked: tuple[Candidate, ...]
    """All candidates that were scheduled."""
    policy: str
    candidates: tuple[CandidateRow, ...]
    bound_s: float
    """A lower bound of the step for any layout over the living workers; ``plan.bound_s`` is that of the
    chosen layout.
    """
    ahead: Assembled | None = None
    """The programs with eager forwards, if the job asks for them; the chosen row's reason says how many there are."""

    @cached_property
    def plan(self) -> Plan:
        """The plan, lowered and verified on first access: of two decisions that are compared, only one may be
        needed.
        """
        best, case = self.best, self.case
        costs, order, step_s = case.profile.costs, best.order, best.step_s
        slower = case.job.slower_for_memory
        is_due = slower >= _WAITED_FOR if case.lost else slower > 0
        if is_due and not self.ahead:  # what runs ahead fills the memory
            found = leaner(
                order,
                best.layout,
                costs,
                best.found.caps,
                longest_s=step_s * (1 + slower),
                most_visits=_MOST_VISITS,
                thorough=case.thorough,
            )
            order, step_s = found or (order, step_s)
        assembled = self.ahead or assemble(order, best.layout, costs)
        return Plan(
            policy=self.policy,
            layout=best.layout,
            programs=assembled.programs,
            transfers=best.transfers,
            step_s=step_s,
            bound_s=best.option.least_step_s,
            transition_s=best.transition_s,
            peak_bytes=per_rank(assembled.peak_bytes, case.shares, best.layout, costs),
            keeps_messages=costs.keeps_messages,
            ahead=assembled.ahead,
        )


def scheduled(
    policy: str,
    layout: Layout,
    transfers: tuple[Transfer, ...],
    state: ClusterState,
    profile: Profile,
    *,
    job: JobSpec | None = None,
    eager: bool = False,
    longest_s: float = 0.0,
) -> Plan:
    """Return the verified plan of a layout that needs no choosing. Raises PlanInfeasible if it does not fit.

    Args:
        job: the one whose communicators are to have room; None: there are none.
        longest_s: if the step is below it, an order is looked for that needs less memory in a step of at most this.
    """
    speeds, shares, profile = worker_speeds(state), worker_shares(state), in_cluster(profile, state)
    taken = taken_bytes(Needs(layout, transfers, beside=True), job) if job else 0
    caps = caps_for(layout, profile.costs, shares, taken)
    order = order_routes(layout, profile.costs, in_flight_cap=caps, speeds=speeds)
    step_s = step_end_s(layout, profile.costs, order.done_s, order.tails())
    if step_s < longest_s:
        found = leaner(order, layout, profile.costs, caps, longest_s=longest_s, thorough=True)
        order, step_s = found or (order, step_s)
    assembled = _assembled(order, layout, profile.costs, caps, speeds, eager)
    return Plan(
        policy=policy,
        layout=layout,
        programs=assembled.programs,
        transfers=transfers,
        step_s=step_s,
        bound_s=lower_bound_s(layout, profile.costs, speeds, caps),
        transition_s=0.0,
        peak_bytes=per_rank(assembled.peak_bytes, shares, layout, profile.costs),
        keeps_messages=profile.costs.keeps_messages,
        ahead=assembled.ahead,
    )


def _assembled(
    order: Order, layout: Layout, costs: Costs, caps: dict[int, int], speeds: dict[int, float], eager: bool
) -> Assembled:
    """Lower and verify: no plan leaves this module unverified (I7)."""
    if not eager or len(layout.workers) > MANY_WORKERS:  # too slow for so many in a recovery
        return assemble(order, layout, costs)
    targets = failover_targets(layout, costs, speeds)
    return assemble_eager(order, layout, costs, targets, caps=caps, speeds=speeds)


def decide(
    *,
    job: JobSpec,
    state: ClusterState,
    previous: Plan,
    profile: Profile,
    config: OdysseyConfig,
    now_s: float,
    among: Collection[str] | None = None,
    home: Layout | None = None,
    thorough: bool = False,
    rebalances: bool = False,
    in_haste: bool = False,
) -> Decision:
    """Return the best plan for the living workers.

    Args:
        previous: the plan whose holders are complete and current.
        now_s: the present, on the clock of ``state``'s times.
        among: names of the options to choose from; None: all.
        home: the failure-free layout, which is possible again if enough workers are back.
        thorough: whether nobody waits for the decision, so that it also works out what later ones look up. With over
            128 workers it also looks at more, and so may be a better one.
        rebalances: see ``Case.rebalances``.
        in_haste: see ``Case.in_haste``. Only then does the plan depend on what was decided on before.

    Raises:
        LayersLost: some layer has no living holder (I9); names ranks.
        PlanInfeasible: no candidate fits.
    """
    case = Case(
        job=job,
        state=state,
        previous=previous.layout,
        usual_step_s=previous.step_s,
        profile=in_cluster(profile, state),
        horizon_s=config.horizon_s,
        mtbf_s=mean_time_between_failures_s(state, config.mtbf_s, now_s),
        home=home,
        thorough=thorough,
        spare_holders=config.least_holders if config.redundancy == "auto" else 0,
        rebalances=rebalances,
        in_haste=in_haste,
        mixes="auto" in (config.rebalance, config.layout),  # else the user is only told what would be gained
    )
    _check_holders(case)
    proposed = options(case)
    if among is not None:
        proposed = replace(proposed, found=tuple(one for one in proposed.found if one.name in among))
    try:
        return _decided(case, proposed, config, previous.policy)
    except PlanInfeasible as error:
        if among is not None or not (job.least_holders or job.optimizer_copies):
            raise
        why_not = str(error)
    # A job with less redundancy than was asked for is better than none.
    case = replace(case, job=replace(job, least_holders=0, eager_forwards=False))
    return _decided(case, options_with_less(case, proposed, why_not), config, previous.policy)


def at_once(direct: Decision, longest_s: float = math.inf) -> Options:
    """Return the options of ``direct``, decided after a loss, for which nothing moves, with steps of at most
    ``longest_s``.
    """
    found = without_transfers(direct.case, direct.options.tried, longest_s)
    return replace(direct.options, found=tuple(found), impossible=())


def decide_at_once(
    direct: Decision, proposed: Options, config: OdysseyConfig, longest_s: float = math.inf
) -> Decision:
    """Decide among ``proposed``, the options that :func:`at_once` returned.

    ``longest_s`` limits the step where the fastest option is the best: under policy ``auto``, if all are equally safe.

    Raises:
        PlanInfeasible: there is no such option.
    """
    # Where some options are safer than others, or a policy was asked for, the best need not be the fastest.
    alike = config.policy == "auto" and len({one.fatal_share for one in proposed.found}) == 1
    longest_s = longest_s if alike else math.inf
    return _decided(direct.case, proposed, config, direct.policy, longest_s, direct.worked)


def _decided(
    case: Case,
    proposed: Options,
    config: OdysseyConfig,
    kept_policy: str,
    longest_s: float = math.inf,
    known: Sequence[Candidate] = (),
) -> Decision:
    job, profile = case.job, case.profile
    worked, rows = best_of(case, proposed.found, config.policy, longest_s, known)
    rows += [unscored(name, None, reason) for name, reason in proposed.impossible]
    if not worked:
        raise _no_plan(case, rows)
    best = worked[0]
    ahead = None
    if job.eager_forwards:
        ahead = _assembled(best.order, best.layout, profile.costs, best.found.caps, case.speeds, True)
    reason = why(best.option, config.policy, rows) + ("; " + ahead.ahead if ahead and ahead.ahead else "")
    if config.uses_nccl:
        plan = Needs(best.layout, best.transfers, beside=not case.lost)
        anew = communicators(plan, job.cell(0), Needs(case.previous))
        reason += f"; at least {anew.connected}" if anew.anew else f"; {anew.connected}"
    rows.append(row_of(case, best, True, reason))
    rows += [restart_row(case, best.score)] if case.state.dead else []
    rows.sort(key=lambda row: (not row.chosen, row.score is None, -(row.score or 0.0), row.name))
    return Decision(
        case=case,
        options=proposed,
        best=best,
        worked=tuple(worked),
        policy=kept_policy if best.option.policy.stays else best.option.name,
        candidates=tuple(rows),
        bound_s=cluster_bound_s(job.num_microbatches, profile.costs, case.alive, case.speeds),
        ahead=ahead,
    )


def _no_plan(case: Case, rows: list[CandidateRow]) -> PlanInfeasible:
    reasons = "; ".join(dict.fromkeys(row.reason for row in rows))
    return PlanInfeasible(f"no plan for {len(case.alive)} living worker(s): {reasons}")


def _check_holders(case: Case) -> None:
    """Raise LayersLost in terms of ranks, which is what people can look for."""
    try:
        check_living(case.previous, case.alive)
    except LayersLost as lost:
        ranks = {w.worker: w.ranks for w in case.state.workers}
        named = tuple(sorted(rank for worker in lost.ranks for rank in ranks.get(worker, (worker,))))
        raise LayersLost(lost.layers, named, num_layers=lost.num_layers, copies=lost.copies) from None
