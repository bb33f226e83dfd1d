"""Decides what a job is offered between two steps: ranks that have joined get a place, and layers move."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from odyssey_megatron.cluster.state import ClusterState, without
from odyssey_megatron.diagnosis.verdicts import SLOW_WORKER, Diagnosis
from odyssey_megatron.errors import LayersLost, OdysseyError
from odyssey_megatron.launch.coordinator.aside import Aside
from odyssey_megatron.launch.coordinator.planner import Planner
from odyssey_megatron.launch.coordinator.reactions import JobState
from odyssey_megatron.launch.coordinator.rebalancing import Rebalancing
from odyssey_megatron.launch.coordinator.replacing import Leaving, Named, Replacing
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.policy.decided import Decided

_log = logging.getLogger(__name__)

_MOVED = "the layers have moved"
_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPlan:
    """The next plan to offer, and the rows of the candidates it was chosen from, if there were any."""

    plan: Plan
    why: str
    rows: tuple[CandidateRow, ...] = ()
    leaving: frozenset[int] = frozenset()
    """Workers that are to leave and to come back, as whole or smaller cells or as fresh processes."""
    without: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Leaving worker -> the ranks that its cell is to come back without, if any."""


class Offers:
    """Keeps the target plan of a job, and works out the next plan on the way there."""

    def __init__(self, planner: Planner, rebalancing: Rebalancing, replacing: Replacing):
        self._planner, self._rebalancing, self._replacing = planner, rebalancing, replacing
        self._aside = Aside(planner)
        self._target: Callable[[], Plan] | None = None
        self._why = _MOVED
        self._anew = False
        """Whether a target is to be looked for: a recovery was decided on in haste, or kept the routes and has cut off
        the way to the target before.
        """
        self._looked_s = -math.inf
        self._stuck: tuple[object, ...] = ()
        """A state in which cells that could be whole cannot leave: plan, living workers, fresh workers, and those
        cells.
        """

    def aim(self, target: Callable[[], Plan] | None, why: str = _MOVED) -> None:
        """Set the plan to go to from the live one. None: there is no better plan."""
        self._target, self._why, self._anew = target, why, False

    def recovered(self, decided: Decided, live: Plan | None) -> None:
        """Take over the target of what is ``decided`` in a recovery.

        A target is looked for anew behind a decision in haste, and if the job keeps its routes without a target, though
        it was on its way elsewhere: the worker that has died may have had a part in that.
        """
        was_going = self._target is not None or self._anew
        stays = live is not None and decided.plan.layout.routes == live.layout.routes
        self.aim(decided.target)
        self._anew = decided.is_hasty or (was_going and stays and decided.target is None)

    def copied(self, *shared: object) -> Offers:
        """Return a copy of this and of all its accounts, which has the planner and what is ``shared`` in common."""
        return copy.deepcopy(self, {id(one): one for one in (*shared, self._planner)})

    def is_due(self, job: JobState, diagnosis: Diagnosis | None, now_s: float) -> bool:
        """Whether :meth:`following` might have anything to do. Accounts of slow and smaller cells can wait a while."""
        if not job.may_offer_at(now_s):
            return False
        if self._anew or self._target or job.cluster.fresh or self._rebalancing.is_new(diagnosis):
            return True
        return now_s >= self._looked_s + _EVERY_S and (
            self._replacing.is_open(now_s)
            or any(one.alive and (one.missing or one.speed != 1.0) for one in job.cluster.workers)
        )

    def missed(self, diagnosis: Diagnosis | None) -> None:
        """Take note that the look at ``diagnosis`` led to nothing, as the job has changed: the next one is of its new
        steps.
        """
        self._rebalancing.missed(diagnosis)

    def following(
        self, job: JobState, diagnosis: Diagnosis | None, now_s: float
    ) -> tuple[JobState, NextPlan | None]:
        """Return the job with the speeds of its workers as they are known by now, and what to offer it, if anything."""
        live, self._looked_s = job.live_plan, now_s
        if live is None or not job.may_offer_at(now_s):
            return job, None
        cluster, better = self._rebalancing.look(diagnosis, job.cluster, live, now_s)
        job, rows, named = replace(job, cluster=cluster), tuple[CandidateRow, ...](), _named(diagnosis)
        leaving, whole_why = self._aside.may_be_whole(
            cluster, live, now_s, lambda: self._target is None or self._target().layout == live.layout
        )
        if self._stuck == (live, cluster.alive, cluster.fresh, leaving):
            leaving = frozenset()
        if leaving or cluster.fresh:
            if (proposal := self._entering(cluster, live, leaving, whole_why, now_s)) is not None:
                return job, proposal
            if cluster.fresh:
                return replace(job, tries=job.tries.after_failure(now_s, for_now=True)), None
        if self._anew:
            rows = self._look_anew(cluster, live, now_s)
        if better is not None:
            target, why = better.decided.plan, better.why
            rows = (*better.decided.rows, *self._replacing.row(cluster, target, now_s, named))
            self.aim(lambda: target, why)
        elif (found := self._replacing.look(cluster, live, now_s, named)) is not None:
            return job, self._leaves(found, cluster, live, now_s)
        elif self._target is None or (target := self._target()).layout == live.layout:
            self._target = None
            return job, None
        else:
            why = self._why
        return job, NextPlan(plan=self._planner.towards(cluster, live, target), why=why, rows=rows)

    def _look_anew(self, cluster: ClusterState, live: Plan, now_s: float) -> tuple[CandidateRow, ...]:
        """Aim at the best plan for the living workers; return the rows of all candidates."""
        self._anew = False
        try:
            found = self._planner.rebalance(cluster, live, now_s, math.inf).decided
        except OdysseyError as error:
            _log.warning("the job stays as it is: %s", error)
            return ()
        self.aim(lambda: found.plan)
        return found.rows

    def _entering(
        self, cluster: ClusterState, live: Plan, leaving: frozenset[int], whole_why: str, now_s: float
    ) -> NextPlan | None:
        """Propose a plan in which fresh ranks get a place, and cells that can be whole leave.

        The cells leave all at once if there is a plan for that, else one after the other. Cells that alone have some
        layers first give these away.
        """
        failed = dict[str, None]()
        for group, gives in _ways(leaving, bool(cluster.fresh)):
            why = _why_entering(cluster, group, whole_why)
            try:
                if gives:
                    freed = self._planner.freeing(cluster, live, group, now_s)
                    why += ", once others have the layers that they alone have"
                    return self._behind_steps(freed, cluster, live, why)
                decided = self._planner.decide(without(cluster, group), live, now_s)
            except OdysseyError as error:
                if group and isinstance(error, LayersLost):
                    continue  # next they are to give away what they alone have
                stays = ". They stay smaller until there is one" * bool(group)
                failed[f"no plan, though {why}: {error}{stays}"] = None
                continue
            if not group:
                return self._behind_steps(decided, cluster, live, why)
            self.aim(decided.target)
            return NextPlan(plan=decided.plan, why=why, rows=decided.rows, leaving=group)
        for reason in failed:
            _log.warning("%s", reason)
        self._stuck = live, cluster.alive, cluster.fresh, leaving
        return None

    def _behind_steps(
        self, found: Decided | Leaving, cluster: ClusterState, live: Plan, why: str, then: str = _MOVED
    ) -> NextPlan:
        """Aim at the plan that is found, and propose the first one on the way there; ``then`` is the reason for the
        next.
        """
        self.aim(lambda: found.plan, then)
        plan = self._planner.towards(cluster, live, found.plan)
        return NextPlan(plan=plan, why=why, rows=found.rows)

    def _leaves(self, found: Leaving, cluster: ClusterState, live: Plan, now_s: float) -> NextPlan:
        if found.gives_first:
            return self._behind_steps(found, cluster, live, found.why, then=found.why)
        self.aim(None)
        without = {found.worker: found.without} if found.without else {}
        for worker, ranks in without.items():
            self._aside.note(worker, ranks, now_s)
        leaves = frozenset([found.worker])
        return NextPlan(plan=found.plan, why=found.why, rows=found.rows, leaving=leaves, without=without)


def _ways(leaving: frozenset[int], has_fresh: bool) -> list[tuple[frozenset[int], bool]]:
    """Return (workers that leave, whether they first give away layers that they alone have) pairs, best first."""
    groups = [leaving]
    if len(leaving) > 1:
        groups += [frozenset([one]) for one in sorted(leaving)]
    ways = [(group, gives) for gives in (False, True) for group in groups if group or not gives]
    return [*ways, (frozenset[int](), False)] if leaving and has_fresh else ways


def _why_entering(cluster: ClusterState, leaving: frozenset[int], whole_why: str) -> str:
    if not leaving:
        return f"rank(s) {list(cluster.fresh_ranks)} joined"
    cells = [list(cluster.workers[one].ranks) for one in sorted(leaving)]
    why = f"the cell(s) of rank(s) {cells} can be whole again, and leave for that"
    return f"{why}: {whole_why}" if whole_why else why


def _named(diagnosis: Diagnosis | None) -> Named:
    """Return the slow ranks of the slow cells for which they are known."""
    if diagnosis is None:
        return {}
    return {one.worker: one.ranks for one in diagnosis.verdicts if one.kind == SLOW_WORKER and one.ranks}
