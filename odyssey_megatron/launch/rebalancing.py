"""What the coordinator does about slow workers and links: it knows them, and changes the plan where that pays."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from odyssey_megatron.cluster.state import ClusterState, with_speeds
from odyssey_megatron.diagnosis.lasting import COMPUTE_S, LINK_S, remaining_s
from odyssey_megatron.diagnosis.links import SLOW_SUMS, Link, Links, LinkVerdict
from odyssey_megatron.diagnosis.steps import Shown, shown
from odyssey_megatron.diagnosis.verdicts import SLOW_WORKER, UNEVEN_STAGE, Diagnosis, Verdict, slow_nodes
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.launch.planner import Planner
from odyssey_megatron.launch.slow_ways import (
    Slowed,
    borne_out,
    is_over,
    slowed_by,
    whose,
    with_slow_ways,
)
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.names import layer_names
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.planner import Decided

_log = logging.getLogger(__name__)

LEAST_SLOWNESS = 1.1
"""A worker that takes less than so many times what others take stays where it is."""
_ANOTHER_SPEED = 1.15
"""A slow worker has another speed once it differs by so many times from what was planned for."""
_AGAIN = 2.0
"""What was slow, and is not any more, is slow again from so many times on only, unless something has changed since: so
that what wanders about ``LEAST_FACTOR`` does not flap.
"""
_WORTH_A_LINE = 0.02
_AT_MOST_EVERY_S, _AT_LEAST_EVERY_S = 5.0, 300.0
"""Of how slow each worker is: written when one has moved by so much, and not too often."""
_LEAST_GAIN = 0.03
"""Of the step: what is won by less may be noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """Where to go, between two steps, and why."""

    decided: Decided
    why: str


class Rebalancing:
    """Looks at each diagnosis once. ``acts``: plans change; otherwise it is only said what that would gain. ``seeks``:
    the job began with the best layout by estimated costs, and moves to a better one, if there is one, by measured ones.
    """

    def __init__(
        self,
        planner: Planner,
        journal: Journal,
        say: Callable[[str], None],
        *,
        acts: bool,
        seeks: bool = False,
    ):
        self._planner, self._journal, self._say, self._acts = planner, journal, say, acts
        self._seeks, self._has_sought = seeks, False
        self._seen: Diagnosis | None = None
        self._said: set[tuple[str, tuple[int, int], int, tuple[int, ...]]] = set()
        self._known: dict[int, float] = {}
        """Slow worker -> its speed."""
        self._ways: dict[LinkVerdict, Slowed] = {}
        """What makes links or sums slow -> those."""
        self._ended: dict[tuple[bool, Link], int] = {}
        """(Whether it is a sum, who) -> the step by which it was as fast as others again."""
        self._doubted: set[int | tuple[tuple[int, ...], ...]] = set()
        """Workers, and links, that are slow by their times and not by those of steps: said once."""
        self._began_s: dict[int | LinkVerdict, float] = {}
        """Slow worker, or what makes links slow -> since when that has been known."""
        self._blamed: dict[int, tuple[int, ...]] = {}
        """Slow worker -> its ranks, or those of them by which it is slow."""
        self._written: dict[int, float] = {}
        self._written_s = -math.inf
        self._lasted_s: list[float] = []
        """How long slowness that is over has lasted."""

    def look(
        self, diagnosis: Diagnosis | None, state: ClusterState, live: Plan, now_s: float
    ) -> tuple[ClusterState, Better | None]:
        """``state`` with the speeds that decisions are to go by; and a better plan than ``live``, if there is one to go
        to.
        """
        if diagnosis is None or diagnosis is self._seen:
            return state, None
        self._seen = diagnosis
        self._note_measured(diagnosis, now_s)
        why = self._note_others(diagnosis, live, state)
        before, state = state, state if self._acts else with_speeds(state, self._known)
        changed = changes(state, self._confirmed(diagnosis))
        changed, seen = self._without_doubted(changed, diagnosis, state, live)
        state = with_speeds(state, changed)
        self._known = {one.worker: one.speed for one in state.workers if one.alive and one.speed < 1.0}
        self._forget_gone({*self._known, *changed})
        why += [self._note(worker, speed, diagnosis, seen, state, now_s) for worker, speed in changed.items()]
        of_links = self._look_at_ways(diagnosis.links, diagnosis, state, live, now_s)
        of_links += self._look_at_ways(diagnosis.sums, diagnosis, state, live, now_s)
        state = with_slow_ways(state, self._ways.values(), diagnosis.links)
        is_new, why = bool(changed or of_links), why + of_links
        better = self._compare("; ".join(why), state, live, now_s, is_new=is_new) if why else None
        if not why and self._is_to_seek(diagnosis, state):
            better = self._compare("layers' costs are measured", state, live, now_s, is_new=False, acts=True)
            return before, better
        return (state, better) if self._acts else (before, None)

    def _is_to_seek(self, diagnosis: Diagnosis, state: ClusterState) -> bool:
        """Once, as soon as costs are measured and nobody is slow or dead; once more when all are back."""
        if not self._is_back(state) or diagnosis.slow or diagnosis.links.slow:
            self._has_sought &= self._is_back(state)
            return False
        if not self._seeks or self._has_sought or not diagnosis.factors:
            return False
        self._has_sought = True
        return True

    def _forget_gone(self, still: Collection[int]) -> None:
        """Who has left, or has been replaced, is not slow any more."""
        for worker in [one for one in self._began_s if isinstance(one, int) and one not in still]:
            del self._began_s[worker]
            self._event(SLOW_WORKER, list(self._blamed.pop(worker)), 1.0, "it has left")

    def _without_doubted(
        self, changed: dict[int, float], diagnosis: Diagnosis, state: ClusterState, live: Plan
    ) -> tuple[dict[int, float], Shown]:
        """``changed`` without those who are new in it, where steps do not show that they are slow."""
        new = {
            worker: speed for worker, speed in changed.items() if speed < 1.0 and worker not in self._known
        }
        verdicts = [one for one in diagnosis.verdicts if one.kind == SLOW_WORKER and one.worker in new]
        of_links = (*diagnosis.links.verdicts, *diagnosis.sums.verdicts)
        self._doubted &= {*diagnosis.slow, *(one.links for one in of_links)}
        if not verdicts:
            return changed, Shown(is_so=True)
        since = min(one.since for one in verdicts)
        seen = self._shown(since, state, with_speeds(state, new), diagnosis, live)
        if seen.is_so:
            return changed, seen
        for one in verdicts:
            self._doubt(one.worker, list(state.workers[one.worker].ranks), one.evidence, seen)
        return {worker: speed for worker, speed in changed.items() if worker not in new}, seen

    def _shown(
        self, since: int, before: ClusterState, after: ClusterState, diagnosis: Diagnosis, live: Plan
    ) -> Shown:
        """Whether steps show what is slow ``after`` and not ``before``."""
        if diagnosis.took.generation != before.generation:
            return Shown(is_so=True)
        try:
            without_s, with_s = (self._planner.step_s(state, live) for state in (before, after))
        except OdysseyError as error:
            _log.warning("no step of the live plan can be simulated: %s", error)
            return Shown(is_so=True)
        return shown(diagnosis.took.seconds, since, without_s, with_s)

    def _doubt(
        self, what: int | tuple[tuple[int, ...], ...], ranks: list[int], evidence: str, seen: Shown
    ) -> None:
        if what not in self._doubted:
            self._doubted.add(what)
            self._say(f"[odyssey] rank(s) {ranks}: {evidence}; but {seen.why}, so nothing is done about it")

    def _look_at_ways(
        self, found: Links, diagnosis: Diagnosis, state: ClusterState, live: Plan, now_s: float
    ) -> list[str]:
        """What has changed of links, or sums. What no message takes any more, and what is not summed, stays as it was
        when it was measured last.
        """
        why, of_sums = list[str](), found is diagnosis.sums
        own = [one for one in self._ways if (one.kind == SLOW_SUMS) == of_sums]
        for one in [known for known in own if is_over(known, found)]:
            own.remove(one)
            del self._ways[one]
            self._ended |= {(of_sums, link): found.newest for link in one.links}
            self._lasted_s.append(now_s - self._began_s.pop(one))
            ranks = _ranks_of(state, one.workers)
            self._event(one.kind, ranks, 1.0, "it takes no longer than others of the kind, or than before")
            why.append(f"{whose(one, ranks)} as fast as others again")
        for one in found.verdicts:
            known = {link for other in own for link in self._ways[other].all}
            is_old = all(one.since <= self._ended.get((of_sums, link), -2) for link in one.links)
            if known >= set(one.links) or not borne_out(one, found) or (is_old and one.factor < _AGAIN):
                continue
            slowed = slowed_by(one, found, state)
            before, after = (
                with_slow_ways(state, ways, diagnosis.links)
                for ways in (self._ways.values(), (*self._ways.values(), slowed))
            )
            seen = self._shown(one.since, before, after, diagnosis, live)
            ranks = _ranks_of(state, one.workers)
            if not seen.is_so:
                self._doubt(one.links, ranks, one.evidence, seen)
                continue
            is_told = False
            for less in [less for less in own if set(less.links) <= set(one.links)]:
                own.remove(less)
                del self._ways[less], self._began_s[less]  # part of something larger
                # a link's other direction
                is_told |= (less.kind, {*less.workers}) == (one.kind, {*one.workers})
            self._ways[one], self._began_s[one] = slowed, now_s
            own.append(one)
            if not is_told:
                self._event(one.kind, ranks, 1 / one.factor, _joined(one.evidence, seen))
            why.append(f"{whose(one, ranks)} slow, {one.factor:.2f} times the time")
        return why

    def _confirmed(self, diagnosis: Diagnosis) -> dict[int, float]:
        """The slow whose slowness a second look bears out: a step that was measured after the verdict, by itself."""
        return {
            one.worker: 1 / one.factor
            for one in diagnosis.verdicts
            if one.kind == SLOW_WORKER
            and (
                one.worker in self._known
                or (one.found < diagnosis.newest and diagnosis.latest.get(one.worker, 1.0) >= LEAST_SLOWNESS)
            )
        }

    def _compare(
        self,
        why: str,
        state: ClusterState,
        live: Plan,
        now_s: float,
        *,
        is_new: bool,
        acts: bool = False,
    ) -> Better | None:
        """``is_new``: some worker has another speed than before; ``acts``: in any case."""
        known = {*self._known, *self._ways}
        self._began_s = {one: since_s for one, since_s in self._began_s.items() if one in known}
        ages_s = [now_s - since_s for since_s in self._began_s.values()]
        mean_s = COMPUTE_S if self._known else LINK_S
        lasts_s = remaining_s(min(ages_s), self._lasted_s, mean_s) if ages_s else math.inf
        try:
            found = self._planner.rebalance(state, live, now_s, lasts_s, anew=not is_new)
        except OdysseyError as error:
            _log.warning("no plan for the speeds of now: %s", error)
            return None
        is_back = is_new and self._is_back(state)
        if is_back:  # so that a heavy stage is looked at once more
            self._said = {said for said in self._said if said[0] != UNEVEN_STAGE}
        if found.decided.plan.layout == live.layout or (found.gain < _LEAST_GAIN and not is_back):
            self._say(f"[odyssey] {why}: the plan stays, as no other is {_LEAST_GAIN:.0%} faster")
            return None
        gain = f"steps {found.gain:.0%} faster" if found.gain >= _LEAST_GAIN else "as before"
        if not (self._acts or acts):
            policy = found.decided.plan.policy
            self._say(f"[odyssey] {why}: with --odyssey-rebalance auto, {policy} would make {gain}")
            return None
        return Better(decided=found.decided, why=f"{why}: {gain}")

    @staticmethod
    def _is_back(state: ClusterState) -> bool:
        """Nobody is slow or dead any more: the first plan is as good as any, and the one that the user has chosen."""
        whole = all(worker.alive and worker.pace == 1.0 for worker in state.workers)
        return whole and not state.slow_links and not state.slow_sums

    def _note(
        self,
        worker: int,
        speed: float,
        diagnosis: Diagnosis,
        seen: Shown,
        state: ClusterState,
        now_s: float,
    ) -> str:
        ranks = list(state.workers[worker].ranks)
        if speed == 1.0:
            blamed = self._blamed.pop(worker, tuple(ranks))
            evidence = "its work takes no longer than elsewhere"
            why = f"rank(s) {ranks} as fast as others again"
            if worker in self._began_s:
                self._lasted_s.append(now_s - self._began_s.pop(worker))
        else:
            verdict = next(one for one in diagnosis.verdicts if one.worker == worker)
            is_new = worker not in self._began_s
            evidence = _joined(verdict.evidence, seen) if is_new else verdict.evidence
            why = f"rank(s) {ranks} slow, {verdict.factor:.2f} times the time"
            self._began_s.setdefault(worker, now_s)
            blamed = self._blamed.setdefault(worker, verdict.ranks or tuple(ranks))
        self._event(SLOW_WORKER, list(blamed), speed, evidence)
        return why

    def _note_others(self, diagnosis: Diagnosis, live: Plan, state: ClusterState) -> list[str]:
        """Each once for those who live: nobody is to be told all the time of what does not change. What layers could be
        moved for.
        """
        nodes = {worker.worker: worker.node for worker in state.workers if worker.alive}
        found, together = list[str](), slow_nodes(diagnosis, nodes)
        for over in {said for said in self._said if said[2] not in (-1, *(one.node for one in together))}:
            self._said.remove(over)
            self._event(over[0], _ranks_on(state, over[2]), 1.0, "not all of its workers are slow any more")
        for one in (*diagnosis.verdicts, *together):
            key = one.kind, one.layers, one.node, state.alive
            if one.worker >= 0 or key in self._said:
                continue
            self._said = {said for said in self._said if said[-1] == state.alive} | {key}
            where = _where(one, live)
            self._event(one.kind, _ranks_on(state, one.node), 1 / one.factor, where + one.evidence)
            if one.kind == UNEVEN_STAGE:
                found.append(f"{where}{one.factor:.2f} times the time of other stages")
        return found

    def _note_measured(self, diagnosis: Diagnosis, now_s: float) -> None:
        """For those who look on, as often as it changes."""
        factors = {worker: round(factor, 3) for worker, factor in diagnosis.factors.items()}
        known = self._written
        moved = factors.keys() != known.keys() or any(
            abs(factor - known[worker]) >= _WORTH_A_LINE for worker, factor in factors.items()
        )
        age_s = now_s - self._written_s
        if factors and (age_s >= _AT_LEAST_EVERY_S or (moved and age_s >= _AT_MOST_EVERY_S)):
            self._written, self._written_s = factors, now_s
            costs = [
                [piece.first, piece.last, piece.kind, alpha]
                for piece, (alpha, _) in diagnosis.costs.items()
                if piece.last > piece.first
            ]
            self._journal.event("measured", factors=list(factors.items()), costs=costs)

    def _event(self, kind: str, ranks: list[int], speed: float, evidence: str) -> None:
        self._journal.event("slowness", echo=True, kind=kind, slow_ranks=ranks, speed=speed, why=evidence)


def _joined(evidence: str, seen: Shown) -> str:
    return f"{evidence}; {seen.why}" if seen.why else evidence


def _ranks_on(state: ClusterState, node: int) -> list[int]:
    return [rank for worker in state.workers if worker.node == node for rank in worker.ranks]


def _ranks_of(state: ClusterState, workers: Collection[int]) -> list[int]:
    return [rank for worker in workers for rank in state.workers[worker].ranks]


def _where(verdict: Verdict, live: Plan) -> str:
    layers = list(range(*verdict.layers))
    return f"{layer_names(layers, live.layout.num_layers)}: " if layers else ""


def changes(state: ClusterState, slow: Mapping[int, float]) -> dict[int, float]:
    """Worker -> speed, of the living that are to have another one; little is nothing, so that plans do not flap.

    ``slow``: beside workers that are whole cells; a smaller one is healthy if it is as fast as its share of one.
    """
    found = {}
    for worker in state.workers:
        speed = slow.get(worker.worker, worker.share) / worker.share
        if not worker.alive or worker.worker in state.fresh:
            continue
        if speed != 1.0 and max(speed, 1 / speed) < LEAST_SLOWNESS:
            continue  # too little to begin with, or not certainly over
        apart = max(speed / worker.speed, worker.speed / speed)
        if apart >= _ANOTHER_SPEED or (speed != worker.speed and 1.0 in (speed, worker.speed)):
            found[worker.worker] = speed
    return found
