"""A job's planner: its profile, kept up to date with what the ranks measure, and the decisions based on it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState, with_speeds, without, without_fresh
from odyssey_megatron.codec import from_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.errors import ConfigError, LayersLost, PlanInfeasible
from odyssey_megatron.plan.placing.transfer import check_living, warm_up
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.policy import messages, redundancy, replacing
from odyssey_megatron.policy.case import worker_shares
from odyssey_megatron.policy.costs.known import KnownCosts
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide, scheduled
from odyssey_megatron.policy.decided import Decided
from odyssey_megatron.policy.heavier import Shortages
from odyssey_megatron.policy.initial import beside_launch_line, best_plan, initial_plan
from odyssey_megatron.policy.redundancy import RedundantPlan
from odyssey_megatron.policy.rehearsing import rehearse
from odyssey_megatron.policy.replacing import Smaller, WithoutThem
from odyssey_megatron.policy.score import mean_time_between_failures_s, restart_cost_s
from odyssey_megatron.policy.shapes.turns import TURNS
from odyssey_megatron.policy.two_speed import rows as rows_of
from odyssey_megatron.policy.two_speed import towards, two_speed

_log = logging.getLogger(__name__)

_WORTH_SAYING = 0.01
"""Gain in throughput from which on the best layout is named to a job that does not choose its own."""
_MOST_COMPARED = 256
"""The most workers for which it is worked out beside a job."""
_GIVES_ALL = 1e-3
"""The speed that is assumed of a worker that is to leave: any other worker is a better place for its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalanced:
    """A better plan for the same workers, whose speeds have changed."""

    decided: Decided
    gain: float
    """How much faster steps are than with the layout as it is; 0.5 means as many steps in two thirds of the time."""


class PolicyPlanner:
    """Makes decisions with ``policy.decide`` and the job's profile, which is kept up to date with what the ranks
    measure.

    It is the coordinator's ``Planner``; ``launch/coordinator/planner.py`` says what its methods do.
    """

    def __init__(self, config: OdysseyConfig, *, must_fit: bool = False):
        """``must_fit``: a job that does not fit is an error; otherwise it starts without regard to memory."""
        self._config, self._must_fit = config, must_fit
        self._home: Plan | None = None
        self._standings: list[RedundantPlan] = []
        """The modes of redundancy to choose from, or to compare with, under ``--odyssey-redundancy compute`` and
        ``auto``.
        """
        self._among: tuple[str, ...] = ()
        self._start_s: float | None = None
        """The time from the job's start until it trained; None until somebody has measured anything."""
        self._shortages = Shortages()
        self._messages = messages.Worth()
        """What rehearsals by the costs in use have found."""
        self._compares = config.layout != "auto"
        """Whether it is yet to be said what the best layout would gain."""

    @property
    def job(self) -> JobSpec:
        """The job, with the layout and the redundancy that were chosen for it."""
        return self._job

    def start(self, job: JobSpec, state: ClusterState, profile_json: str) -> Decided:
        warm_up()  # a rank may die before anything is rehearsed
        layout = self._config.layout
        given = _checked(from_json(Profile, profile_json), job)
        self._job = job = replace(
            job,
            best_layout=layout == "auto",
            spreads_replicas=layout != "megatron",
            aside_bytes=_aside_bytes(self._config, given.costs.gpu_bytes),
        )
        costs = given.costs.with_stretches(*job.stretches)
        given = replace(given, costs=replace(costs, keeps_messages=self._config.resumes_steps))
        self.known = KnownCosts(
            Path(self._config.run_dir) / "profile.json",
            given,
            job.cell_size,
            spreads_experts=job.experts_of_one > 0,
            packs_sequences=job.packs_sequences,
        )
        job.check(len(state.workers) * job.cell_size)
        decided = self._first_plan(job, state)
        self._home = decided.plan
        holders, level = min(map(len, decided.plan.layout.holders)), self._config.redundancy_level
        if 1 < level and holders < job.optimizer_copies:
            _log.warning(
                "--odyssey-redundancy-level %d asks for %d copies of each slice of optimizer state, but some layers "
                "have %d holder(s), which keep as many: more data parallelism gives them more",
                level,
                job.optimizer_copies,
                holders,
            )
        return decided

    def _first_plan(self, job: JobSpec, state: ClusterState) -> Decided:
        try:
            return self._weighed(job, state)
        except PlanInfeasible as error:
            if self._must_fit or self.known.given.costs.memory_bytes is None:
                raise
            # The estimate may be wrong, and the user has chosen this layout: it decides over plans, not over jobs.
            _log.warning(
                "by the estimate the job does not fit, so plans are made without regard to memory: %s", error
            )
            self._compares = False  # the best layout might not fit, either
            self.known.without_memory_limit()
            # Leave out what is not necessary: messages for interrupted steps, forwards run ahead, what auto would add.
            self.known.without_messages()
            mode = {"compute": "state", "auto": "off"}.get(self._config.redundancy, self._config.redundancy)
            self._job, self._standings = redundancy.with_mode(job, mode), []
            return Decided(plan=initial_plan(self._job, state, self.known.given), rows=())

    def _weighed(self, job: JobSpec, state: ClusterState) -> Decided:
        """Return the first plan, with the redundancy asked for, or under ``auto`` the best. Raises PlanInfeasible."""
        asked = self._config.redundancy
        if asked in ("off", "state"):
            mtbf_s = mean_time_between_failures_s(state, self._config.mtbf_s, state.started_s)
            plan, _ = messages.planned_with_or_without(
                lambda costs: initial_plan(job, state, costs), self.known.given, mtbf_s
            )
            if plan.keeps_messages != self.known.given.costs.keeps_messages:
                self._keep_no_messages()
            return Decided(plan=plan, rows=beside_launch_line(plan, job, state, self.known.given))
        self._among = redundancy.MODES if asked == "auto" else (asked,)
        self._standings, impossible = redundancy.possible(
            self._among, job, state, self.known.given, resumes=self._config.resumes_steps
        )
        chosen, rows = self._chosen(state, state.started_s)
        return Decided(plan=chosen.plan, rows=(*rows, *impossible))

    def _keep_no_messages(self) -> None:
        self.known.without_messages()
        _log.warning(
            "messages are not kept until a step's end, since the memory for them costs more than it saves: a step in "
            "which a rank is lost is done again (--odyssey-interrupted-step redo)"
        )

    def _chosen(self, state: ClusterState, now_s: float) -> tuple[RedundantPlan, tuple[CandidateRow, ...]]:
        """Choose among the standings by the present rate of failures; the job goes on with the choice."""
        mtbf_s = mean_time_between_failures_s(state, self._config.mtbf_s, now_s)
        profile = self._priced(self.known.given, state, self._standings[0].plan.step_s, now_s)
        chosen, rows = redundancy.choose(
            self._standings, self._among, profile, mtbf_s=mtbf_s, horizon_s=self._config.horizon_s
        )
        self._job = chosen.job
        return chosen, rows

    def learn(
        self, state: ClusterState, current: Plan, observations: Sequence[str], now_s: float
    ) -> Diagnosis:
        if self._start_s is None and any(observations):
            steps_s = self._config.profile_steps * current.step_s
            self._start_s = max(0.0, now_s - state.started_s - steps_s)
        # Measurements of ranks that a smaller cell does without do not count: their last processes may have been slow.
        gone = {rank: -1 for worker in state.workers for rank in worker.missing}
        incarnations = dict(state.incarnations) | gone
        return self.known.learn(observations, incarnations, state.nodes)

    def rehearse(self, state: ClusterState, current: Plan, now_s: float) -> None:
        found = rehearse(
            self._job,
            state,
            current,
            self.known.newest(),
            now_s,
            mtbf_s=lambda left: mean_time_between_failures_s(left, self._config.mtbf_s, now_s),
            decide=lambda left, profile: self._going_on(
                left, current, profile, now_s, home=self._home, thorough=True
            ),
        )
        if found.without_messages:
            self._keep_no_messages()
        # Once all that goes by it is worked out:
        self.known.used, self._messages = found.profile, found.worth
        self._compare(state, current, found.profile)

    def _compare(self, state: ClusterState, current: Plan, profile: Profile) -> None:
        """Say once, when costs are measured and nobody is missing, how much faster the best layout would be."""
        home, number = self._home, len(state.workers)
        is_whole = home is not None and current.layout == home.layout and not state.dead
        if not (self._compares and is_whole and profile.source == "measured" and number <= _MOST_COMPARED):
            return
        self._compares = False
        own_s, best = self.step_s(state, current), best_plan(self._job, state, profile)
        if best is not None and (gain := own_s / best.step_s - 1) >= _WORTH_SAYING:
            _log.warning(
                "by measured costs a step takes %.3g s in this job's layout, and %.3g s in the best one (pipelines "
                "%s): %.1f %% more throughput if it starts with --odyssey-layout auto",
                own_s,
                best.step_s,
                best.layout.lengths,
                100 * gain,
            )

    def _with_shortages(self, profile: Profile) -> Profile:
        """Return ``profile`` with what is known by ranks that have run out of memory."""
        heavier = self._shortages.known
        return replace(profile, costs=heavier.applied(profile.costs)) if heavier.factors else profile

    def adopt(self, observations: Sequence[str]) -> None:
        self.known.adopt(observations)

    def rebalance(
        self, state: ClusterState, current: Plan, now_s: float, lasts_s: float, *, anew: bool = False
    ) -> Rebalanced:
        """Return the best plan for the speeds in ``state``, which are expected to last ``lasts_s``.

        ``anew``: plan by what layers cost, without regard to the layout that the job began with. Raises PlanInfeasible.
        """
        decided = self._going_on(
            without_fresh(state),
            current,
            self.known.newest(),
            now_s,
            home=None if anew else self._home,
            horizon_s=lasts_s,
            rebalances=True,
            # What the job began with survives as many losses as its launch line, and so is what it moves to.
            least_holders=self._survives(current) if anew and self._config.layout == "auto" else 0,
        )
        chosen = next(row for row in decided.rows if row.chosen)
        kept = next((row for row in decided.rows if row.name == "keep"), None)
        if kept is None or not chosen.step_s:
            return Rebalanced(decided=decided, gain=0.0)
        kept_s = kept.step_s
        if kept_s is None or kept.score is None:  # None or a bound: it was not scheduled
            kept_s = self.step_s(state, current)
        return Rebalanced(decided=decided, gain=kept_s / chosen.step_s - 1)

    def _survives(self, plan: Plan) -> int:
        """Return the number of holders of each layer that ``plan`` has at least, of those that a start asks for."""
        return min(max(2, self._job.optimizer_copies), *map(len, plan.layout.holders))

    def step_s(self, state: ClusterState, plan: Plan) -> float:
        return scheduled("keep", plan.layout, (), state, self.known.newest(), job=self._job).step_s

    def slowed_s(self, state: ClusterState, live: Plan, whole: Collection[int] = ()) -> tuple[float, float]:
        """Return the step as it is, and the step as it would be if nobody were slow and the cells ``whole``
        were whole.
        """
        well = with_speeds(state, dict.fromkeys(state.alive, 1.0))
        made_whole = (one.whole if one.worker in whole else one for one in well.workers)
        well = replace(well, workers=tuple(made_whole))
        plans = [live]
        if self._home is not None and set(self._home.layout.workers) <= set(state.alive):
            plans.append(self._home)
        return self.step_s(state, live), min(self.step_s(well, plan) for plan in plans)

    def smaller(
        self, state: ClusterState, live: Plan, worker: int, without: Sequence[int], now_s: float
    ) -> Smaller:
        if self._config.shrink == "off":
            raise PlanInfeasible("--odyssey-shrink off")
        cell = state.workers[worker]
        size = replacing.size_without(self._job, cell, len(without))
        left = replace(cell.smaller(size), speed=1.0)
        workers = tuple(left if one.worker == worker else one for one in state.workers)
        decided = self._going_on(
            without_fresh(replace(state, workers=workers)),
            live,
            self.known.newest(),
            now_s,
            home=self._home,
            rebalances=True,
        )
        step_s = next(row.step_s for row in decided.rows if row.chosen)
        assert step_s is not None
        return Smaller(without=tuple(without), size=size, step_s=step_s)

    def without_slow(
        self,
        state: ClusterState,
        live: Plan,
        worker: int,
        now_s: float,
        whole: Collection[int] = (),
    ) -> WithoutThem:
        kept_s, healthy_s = self.slowed_s(state, live, whole)
        away_s = replacing.away_s(self._start_s or 0.0, kept_s)
        left, gives_first = without(state, [worker]), False
        try:
            decided = self._going_on(
                left, live, self.known.newest(), now_s, home=self._home, horizon_s=away_s
            )
        except LayersLost:
            decided, gives_first = self.freeing(state, live, [worker], now_s), True
        restart_s = self._priced(self.known.newest(), left, live.step_s, now_s).restart_s
        mtbf_s = mean_time_between_failures_s(left, self._config.mtbf_s, now_s)
        price = replacing.Price(
            healthy_s=healthy_s,
            kept_s=kept_s,
            without_s=decided.plan.step_s,
            away_s=away_s,
            pause_s=(3 if gives_first else 2) * self.known.newest().group_build_s,
            risk_s=replacing.risk_s(left, live.layout, decided.plan.layout, restart_s, mtbf_s, away_s),
        )
        return WithoutThem(price=price, plan=decided.plan, rows=decided.rows, gives_first=gives_first)

    def freeing(self, state: ClusterState, live: Plan, workers: Collection[int], now_s: float) -> Decided:
        slow = with_speeds(state, dict.fromkeys(workers, _GIVES_ALL))
        decided = self._going_on(slow, live, self.known.newest(), now_s, home=None, rebalances=True)
        try:
            check_living(decided.plan.layout, set(state.alive) - set(workers))
        except LayersLost as error:
            raise PlanInfeasible(f"they alone have {error.lost}, and nobody else has room for that") from None
        return decided

    def ran_out(self, plan: Plan, worker: int, state: ClusterState) -> None:
        self._shortages.add(plan, worker, self.known.used.costs, worker_shares(state))

    def decide(self, state: ClusterState, previous: Plan, now_s: float) -> Decided:
        if TURNS.gives_way:  # nobody waits for it
            return self._decide(state, previous, now_s)
        return TURNS.run(lambda: self._decide(state, previous, now_s), yields=False)

    def _decide(self, state: ClusterState, previous: Plan, now_s: float) -> Decided:
        before = self._job
        weighed: tuple[CandidateRow, ...] = ()
        if self._standings:
            weighed = self._chosen(state, now_s)[1]
        if self._job == before:
            weighed = ()  # the rows were given before
        waits = not TURNS.gives_way
        if self._shortages and waits:  # they are for the recovery that has noted them
            return self._with_less(state, previous, now_s)

        def decided(profile: Profile) -> Decided:
            return self._going_on(
                state, previous, profile, now_s, home=self._home, weighed=weighed, in_haste=waits
            )

        try:
            return self._fitting(state, decided)
        except PlanInfeasible:
            if not waits or not self._shortages.known.factors:
                raise
            # How much more memory layers take is a guess: the job tries without it, rather than to end by it.
            self._shortages = Shortages()
            return self._fitting(state, decided)

    def _fitting(self, state: ClusterState, decided: Callable[[Profile], Decided]) -> Decided:
        """Return what is ``decided`` for ``state`` by the costs in use, or, if that is better, without messages that
        are kept. Raises PlanInfeasible.
        """
        used, pays = self.known.used, self._messages.known(len(state.alive))
        found, profile = messages.decided_with_or_without(decided, used, self._job, state, pays)
        if profile is not used:
            self._keep_no_messages()
        return found

    def _with_less(self, state: ClusterState, previous: Plan, now_s: float) -> Decided:
        """Return the plan for ranks that have run out of memory. Raises PlanInfeasible: see ``Planner.ran_out``."""
        with self._shortages.mended() as check:
            found = self._fitting(
                state,
                lambda profile: self._going_on(
                    state, previous, profile, now_s, home=self._home, rebalances=True
                ),
            )
            check(found.plan.layout, previous.layout, state.alive)
        return found

    def _priced(self, profile: Profile, state: ClusterState, step_s: float, now_s: float) -> Profile:
        """Return ``profile`` with what a restart would cost by now, if that is known."""
        given_s, start_s, save_steps = self._config.restart_s, self._start_s, self._job.save_steps
        if not given_s and (start_s is None or save_steps is None):
            return profile
        trained_s = max(0.0, now_s - state.started_s - (start_s or 0.0))
        cost_s = restart_cost_s(start_s or 0.0, save_steps or 0, step_s, trained_s, given_s)
        return replace(profile, restart_s=cost_s)

    def _going_on(
        self,
        state: ClusterState,
        previous: Plan,
        profile: Profile,
        now_s: float,
        *,
        home: Plan | None,
        weighed: tuple[CandidateRow, ...] = (),
        thorough: bool = False,
        rebalances: bool = False,
        in_haste: bool = False,
        horizon_s: float = math.inf,
        least_holders: int = 0,
    ) -> Decided:
        horizon_s = min(horizon_s, self._config.horizon_s)
        decision = decide(
            job=replace(self._job, least_holders=max(least_holders, self._job.least_holders)),
            state=state,
            previous=previous,
            profile=self._priced(self._with_shortages(profile), state, previous.step_s, now_s),
            config=replace(self._config, horizon_s=horizon_s),
            now_s=now_s,
            home=home.layout if home else None,
            thorough=thorough,
            rebalances=rebalances,
            in_haste=in_haste,
        )
        rows = (*decision.candidates, *weighed)
        if not set(previous.layout.workers) <= set(state.alive):  # after a loss
            both = two_speed(decision, self._config)
            if both is not None and both.tokens > both.direct_tokens:
                return Decided(
                    plan=both.now,
                    rows=rows_of(both, rows),
                    target=lambda: decision.plan,
                    is_hasty=decision.case.is_hasty,
                )
        # Smaller cells, or ranks that have run out of memory, may lack it for the first plan's order. With slow workers
        # it is kept: otherwise nobody would go back to it once they are as fast as others again.
        is_whole = not (state.dead or decision.case.shares or self._shortages.known.factors)
        if home is not None and is_whole and decision.best.layout == home.layout:
            plan = replace(home, transfers=decision.best.transfers)
            return Decided(plan=plan, rows=rows, is_hasty=decision.case.is_hasty)
        return Decided(plan=decision.plan, rows=rows, is_hasty=decision.case.is_hasty)

    def towards(self, state: ClusterState, current: Plan, target: Plan) -> Plan:
        profile = self._with_shortages(self.known.newest())
        return towards(target, current=current, state=state, profile=profile, job=self._job)

    def keep(self) -> None:
        self.known.keep()

    def finish(self, observations: Sequence[str]) -> None:
        self.known.finish(observations)


def _aside_bytes(config: OdysseyConfig, memory_bytes: int | None) -> int | None:
    """Return ``JobSpec.aside_bytes`` of a job whose plans may use ``memory_bytes`` of each GPU."""
    percent = config.memory_headroom_percent
    return memory_bytes * percent // (100 - percent) if config.uses_nccl and memory_bytes else None


def _checked(profile: Profile, job: JobSpec) -> Profile:
    """Return ``profile`` if it is of the job's model. Raises ConfigError otherwise."""
    costs = profile.costs
    if (len(costs.layers), costs.tied is not None) != (job.num_layers, job.is_tied):
        kinds = ("an embedding and a head of their own", "embedding and head tied")
        raise ConfigError(
            f"the profile is of a model of {len(costs.layers) - 2} transformer layers with "
            f"{kinds[costs.tied is not None]}, and the job's has {job.num_layers - 2} with {kinds[job.is_tied]}. Give "
            "--odyssey-profile a file that a run of this model has written, or leave it out."
        )
    return profile
