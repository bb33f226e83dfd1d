"""The choice of ``--odyssey-redundancy auto``: the cost of redundancy against that of failures without it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.scheduling.eager import eager_forwards
from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.score import expected_tokens

MODES = ("off", "state", "compute")

_SIMPLEST = ("state", "off", "compute")
"""Order of preference among modes that score alike."""

_ALIKE = 1e-4
"""A score that is better by this share is not worth a more complex plan. This is a choice, not a measurement: two
searches for the same plan differ by as little, in the order of their instructions.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundantPlan:
    """The failure-free plan with one kind of redundancy, and what a failure would cost under it."""

    mode: str
    job: JobSpec
    plan: Plan
    fatal_share: float
    """Share of the workers whose loss ends in a restart from a checkpoint."""
    redo_s: float
    """Seconds of work that the survivors must do again when one of the other workers is lost, on average."""


def with_mode(job: JobSpec, mode: str) -> JobSpec:
    """Return ``job`` with one mode of redundancy; its ``least_holders`` apply unless the mode is off."""
    least = 0 if mode == "off" else job.least_holders
    return replace(job, least_holders=least, eager_forwards=mode == "compute")


def standing(
    mode: str, job: JobSpec, state: ClusterState, profile: Profile, *, resumes: bool
) -> RedundantPlan:
    """Work out ``mode`` for the failure-free layout.

    Args:
        job: with the ``least_holders`` wanted.
        resumes: whether an interrupted step goes on where it was.

    Raises:
        PlanInfeasible: it does not fit memory.
    """
    wanted = with_mode(job, mode)
    plan = initial_plan(wanted, state, profile)
    workers = plan.layout.workers
    alone = set(plan.layout.alone())
    again_s = _again_s(plan, profile.costs)
    others = [again_s[worker] if resumes else plan.step_s / 2 for worker in workers if worker not in alone]
    return RedundantPlan(
        mode=mode,
        job=wanted,
        plan=plan,
        fatal_share=len(alone) / len(workers),
        redo_s=mean(others) if others else 0.0,
    )


def _again_s(plan: Plan, costs: Costs) -> dict[int, float]:
    """Return worker -> expected seconds by which a step is longer if the worker dies in it.

    At a random moment half of its work is done, and lost. The other holders of its layers do it again between them,
    except for forwards that they have run ahead. It is counted as the cost of the microbatches concerned.
    """
    lost_s = dict.fromkeys(plan.layout.workers, 0.0)
    for route in plan.layout.routes:
        for hop in route.hops:
            work_s = costs.spans.compute_s(hop.first, hop.last)
            lost_s[hop.worker] += len(route.microbatches) * work_s / 2
    # Looked for only if the plan has eager forwards: reading a schedule takes time.
    for one in eager_forwards(plan.schedule, plan.layout, costs) if plan.ahead else ():
        lost_s[one.routed] -= one.saves_s(plan.step_s)
    others: dict[int, set[int]] = {worker: set() for worker in plan.layout.workers}
    for holders in set(plan.layout.holders):
        for worker in holders:
            others[worker].update(holders)
    return {worker: max(0.0, seconds) / max(1, len(others[worker]) - 1) for worker, seconds in lost_s.items()}


def choose(
    standings: Sequence[RedundantPlan],
    among: Collection[str],
    profile: Profile,
    *,
    mtbf_s: float,
    horizon_s: float,
) -> tuple[RedundantPlan, tuple[CandidateRow, ...]]:
    """Return the mode of ``among`` that should train the most tokens until the horizon, and a row with the reason for
    each.

    The score is that of recoveries (``policy/score.py``): a longer step costs always, and a failure after ``mtbf_s`` on
    average. A fatal failure costs the profile's ``restart_s``; another one its detection, new groups, and what is done
    again. Among modes that score alike state wins, which leaves later recoveries free to add shadows, and then off.
    """
    usual_step_s = standings[0].plan.step_s

    def pause_s(one: RedundantPlan) -> float:
        return profile.detect_s + profile.group_build_s + one.redo_s

    def score(one: RedundantPlan) -> float:
        return expected_tokens(
            tokens_per_step=one.job.tokens_per_step,
            step_s=one.plan.step_s,
            transition_s=0.0,
            mtbf_s=mtbf_s,
            horizon_s=horizon_s,
            fatal_share=one.fatal_share,
            restart_s=profile.restart_s,
            pause_s=pause_s(one),
            usual_step_s=usual_step_s,
        )

    def reason(one: RedundantPlan) -> str:
        slower = one.plan.step_s / usual_step_s - 1
        fullest = max(size for _, size in one.plan.peak_bytes)
        parts = [f"step {slower:+.2%}, at most {fullest / 1e9:.3g} GB a worker"]
        if one.fatal_share:
            parts.append(f"{one.fatal_share:.0%} of failures cost {profile.restart_s:.0f} s")
        if one.fatal_share < 1:
            parts.append(f"{'others' if one.fatal_share else 'each failure'} {pause_s(one):.3g} s")
        return "; ".join([*parts, *filter(None, [one.plan.ahead])])

    wanted = [one for one in standings if one.mode in among]
    highest = max(map(score, wanted))
    alike = [one for one in wanted if score(one) >= highest - _ALIKE * abs(highest)]
    best = min(alike, key=lambda one: _SIMPLEST.index(one.mode))
    rows = tuple(
        CandidateRow(
            name=f"redundancy {one.mode}",
            step_s=one.plan.step_s,
            transition_s=None,
            score=score(one),
            chosen=one is best,
            reason=reason(one) + (f"; mean time between failures {mtbf_s:,.0f} s" if one is best else ""),
        )
        for one in standings
    )
    return best, rows


def possible(
    among: Collection[str], job: JobSpec, state: ClusterState, profile: Profile, *, resumes: bool
) -> tuple[list[RedundantPlan], tuple[CandidateRow, ...]]:
    """Return the standings of ``among``, that of off to compare them with, and a row for each mode that is impossible.

    Raises:
        PlanInfeasible: none of ``among`` fits.
    """
    found, rows, why_not = list[RedundantPlan](), list[CandidateRow](), ""
    for mode in ("off", *(one for one in MODES if one in among and one != "off")):
        try:
            if mode == "compute" and not resumes:
                raise PlanInfeasible("needs --odyssey-interrupted-step resume")
            found.append(standing(mode, job, state, profile, resumes=resumes))
        except PlanInfeasible as error:
            why_not = str(error)
            rows.append(
                CandidateRow(
                    name=f"redundancy {mode}",
                    step_s=None,
                    transition_s=None,
                    score=None,
                    chosen=False,
                    reason=str(error),
                )
            )
    if not any(one.mode in among for one in found):
        raise PlanInfeasible(why_not)
    return found, tuple(rows)
