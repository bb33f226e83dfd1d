"""``decide()``: from the state of the cluster to a verified plan. Pure: the same arguments, the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.plan.assemble import assemble
from odyssey_megatron.plan.bound import lower_bound_s
from odyssey_megatron.plan.generation import CandidateRow
from odyssey_megatron.plan.layout import Layout, megatron_layout
from odyssey_megatron.plan.memory import activation_caps, fullest_bytes
from odyssey_megatron.plan.order import Order, order_routes
from odyssey_megatron.plan.plan import Plan, Transfer
from odyssey_megatron.plan.simulate import step_end_s
from odyssey_megatron.plan.transfer import living_holders, plan_transfers, transfer_s, warm_up
from odyssey_megatron.policy.candidates import reroute
from odyssey_megatron.policy.profile import Profile
from odyssey_megatron.policy.score import expected_tokens, mean_time_between_failures_s
from odyssey_megatron.policy.search import Search, Shape, place

_FINALISTS = 6
"""At most so many shapes of a replan are scheduled in full; the others only get the closed-form estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan, and everything that was considered on the way to it."""

    plan: Plan
    candidates: tuple[CandidateRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A layout worked out far enough to be scored."""

    name: str
    layout: Layout
    order: Order
    transfers: tuple[Transfer, ...]
    step_s: float
    transition_s: float
    score: float
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """The arguments of one decision, and what follows from them."""

    job: JobSpec
    state: ClusterState
    previous: Layout
    profile: Profile
    horizon_s: float
    mtbf_s: float

    def score(self, step_s: float, transition_s: float) -> float:
        return expected_tokens(
            tokens_per_step=self.job.tokens_per_step,
            step_s=step_s,
            transition_s=transition_s,
            mtbf_s=self.mtbf_s,
            horizon_s=self.horizon_s,
        )

    @property
    def speeds(self) -> dict[int, float]:
        return {w.worker: w.speed for w in self.state.workers if w.speed != 1.0}


def initial_plan(job: JobSpec, state: ClusterState, profile: Profile) -> Plan:
    """The failure-free plan: Megatron's own layout. Called once, before training, when there is time.

    Raises:
        PlanInfeasible: it does not fit the profile's memory.
    """
    layout = megatron_layout(
        num_layers=job.num_layers,
        pipeline_size=job.pipeline_model_parallel_size,
        num_workers=len(state.workers),
        num_microbatches=job.num_microbatches,
    )
    warm_up()
    speeds = {w.worker: w.speed for w in state.workers if w.speed != 1.0}
    caps = _caps(layout, profile)
    order = order_routes(layout, profile.costs, in_flight_cap=caps, speeds=speeds)
    return _plan("initial", layout, order, (), 0.0, profile, caps, speeds)


def decide(
    *,
    job: JobSpec,
    state: ClusterState,
    previous: Plan,
    profile: Profile,
    config: OdysseyConfig,
    now_s: float,
) -> Decision:
    """The best plan for the workers that are alive.

    Args:
        previous: the plan whose holders are complete and current.
        now_s: on the clock of ``state``'s times.

    Raises:
        LayersLost: some layer has no living holder (I9); names ranks.
        PlanInfeasible: no candidate fits.
    """
    case = _Case(
        job=job,
        state=state,
        previous=previous.layout,
        profile=profile,
        horizon_s=config.horizon_s,
        mtbf_s=mean_time_between_failures_s(state, config.mtbf_s, now_s),
    )
    _check_holders(case)
    found, rows = _candidates(case)
    if not found:
        raise PlanInfeasible(
            f"no plan for {len(state.alive)} living worker(s): " + "; ".join(row.reason for row in rows)
        )
    chosen, why = _choose(found, config.policy, rows)
    rows += [_row(one, one is chosen, why if one is chosen else _lost(one, chosen)) for one in found]
    policy = previous.policy if chosen.name == "keep" else chosen.name
    plan = _plan(
        policy,
        chosen.layout,
        chosen.order,
        chosen.transfers,
        chosen.transition_s,
        profile,
        _caps(chosen.layout, profile),
        case.speeds,
    )
    rows.sort(key=lambda row: (not row.chosen, row.score is None, -(row.score or 0.0), row.name))
    return Decision(plan=plan, candidates=tuple(rows))


def _check_holders(case: _Case) -> None:
    """Raises LayersLost in terms of ranks, which is what people can look for."""
    try:
        living_holders(case.previous, case.state.alive)
    except LayersLost as lost:
        ranks = {w.worker: w.ranks for w in case.state.workers}
        named = tuple(sorted(rank for worker in lost.ranks for rank in ranks.get(worker, (worker,))))
        raise LayersLost(lost.layers, named) from None


def _candidates(case: _Case) -> tuple[list[_Candidate], list[CandidateRow]]:
    """Everything worth scoring, and a row for each thing that cannot be had."""
    alive = case.state.alive
    if set(case.previous.workers) <= set(alive):
        return [_work_out(case, "keep", case.previous, "no member of the layout is lost")], []
    found, rows = [], []
    try:
        layout = reroute(case.previous, alive, case.profile.costs, case.speeds)
        found.append(_work_out(case, "reroute", layout, "layout kept"))
    except PlanInfeasible as error:
        rows.append(_rejected("reroute", error))
    _add_replans(case, found, rows)
    return found, rows


def _add_replans(case: _Case, found: list[_Candidate], rows: list[CandidateRow]) -> None:
    """Ragged pipelines, best estimate first, until no estimate can win any more."""
    costs, alive = case.profile.costs, case.state.alive
    search = Search(costs, costs.memory_bytes)
    ranked = search.ranked(len(alive), case.job.num_microbatches)
    if not ranked:
        rows.append(_rejected("replan", PlanInfeasible(search.why_not(len(alive)))))
    best, tried = 0.0, 0
    for number, (estimate_s, pipelines) in enumerate(ranked):
        shape = search.shape(len(alive), case.job.num_microbatches, pipelines)
        # The estimate leaves out what reductions in colours and messages cost: whoever loses by it has lost.
        if tried and (tried >= _FINALISTS or case.score(estimate_s, case.profile.group_build_s) <= best):
            rows.append(_unscheduled(shape, len(ranked) - number))
            break
        try:
            layout = place(shape, alive, case.previous, costs)
            candidate = _work_out(case, "replan", layout, f"pipelines {shape.lengths}")
        except PlanInfeasible as error:
            rows.append(_rejected("replan", error, f"pipelines {shape.lengths}: "))
            continue
        found.append(candidate)
        best, tried = max(best, candidate.score), tried + 1


def _work_out(case: _Case, name: str, layout: Layout, note: str) -> _Candidate:
    profile, costs = case.profile, case.profile.costs
    caps = _caps(layout, profile)
    order = order_routes(layout, costs, in_flight_cap=caps, speeds=case.speeds)
    transfers = plan_transfers(case.previous, layout, case.state.alive, costs)
    step_s = step_end_s(layout, costs, order.done_s)
    transition_s = profile.group_build_s + transfer_s(transfers, costs)
    return _Candidate(
        name=name,
        layout=layout,
        order=order,
        transfers=transfers,
        step_s=step_s,
        transition_s=transition_s,
        score=case.score(step_s, transition_s),
        note=note,
    )


def _caps(layout: Layout, profile: Profile) -> dict[int, int]:
    """Workers are alike, so where memory is not known each may fill what 1F1B's fullest worker needs."""
    budget = profile.costs.memory_bytes
    if budget is None:
        budget = fullest_bytes(layout, profile.costs)
    return activation_caps(layout, profile.costs, budget_bytes=budget)


def _choose(
    found: list[_Candidate], policy: str, rejected: list[CandidateRow]
) -> tuple[_Candidate, str]:
    """The best score; a forced policy narrows the choice, unless it has nothing to offer."""
    best = max(found, key=lambda one: (one.score, -one.transition_s))
    if policy == "auto" or best.name == "keep":
        return best, f"{best.note}; best score"
    wanted = [one for one in found if one.name == policy]
    if not wanted:
        reasons = "; ".join(row.reason for row in rejected if row.name == policy)
        return best, f"{best.note}; --odyssey-policy {policy} is impossible: {reasons}"
    forced = max(wanted, key=lambda one: (one.score, -one.transition_s))
    return forced, f"{forced.note}; --odyssey-policy {policy}"


def _row(one: _Candidate, chosen: bool, reason: str) -> CandidateRow:
    return CandidateRow(
        name=one.name,
        step_s=one.step_s,
        transition_s=one.transition_s,
        score=one.score,
        chosen=chosen,
        reason=reason,
    )


def _lost(one: _Candidate, chosen: _Candidate) -> str:
    less = 1 - one.score / chosen.score if chosen.score else 0.0
    if less < 0:
        return f"{one.note}; {-less:.1%} more tokens, but not the policy asked for"
    return f"{one.note}; {less:.1%} fewer tokens"


def _unscheduled(shape: Shape, count: int) -> CandidateRow:
    """One row for all the shapes that only got the closed-form estimate; ``shape`` is the best of them."""
    return CandidateRow(
        name="replan",
        step_s=shape.estimate_s,
        transition_s=None,
        score=None,
        chosen=False,
        reason=f"{count} more shape(s), not scheduled: slower by estimate, the best is {shape.lengths}",
    )


def _rejected(name: str, error: PlanInfeasible, prefix: str = "") -> CandidateRow:
    return CandidateRow(
        name=name, step_s=None, transition_s=None, score=None, chosen=False, reason=f"{prefix}{error}"
    )


def _plan(
    policy: str,
    layout: Layout,
    order: Order,
    transfers: tuple[Transfer, ...],
    transition_s: float,
    profile: Profile,
    caps: Mapping[int, int],
    speeds: Mapping[int, float],
) -> Plan:
    """Lowers, verifies and simulates: no plan leaves here unverified (I7)."""
    assembled = assemble(order, layout, profile.costs)
    return Plan(
        policy=policy,
        layout=layout,
        schedule_text=assembled.text,
        transfers=transfers,
        step_s=step_end_s(layout, profile.costs, order.done_s),
        bound_s=lower_bound_s(layout, profile.costs, speeds, caps),
        transition_s=transition_s,
        peak_bytes=assembled.peak_bytes,
    )
