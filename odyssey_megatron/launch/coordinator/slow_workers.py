"""Keeps track of which workers are slow, for decisions to go by."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from odyssey_megatron.cluster.state import ClusterState, with_speeds
from odyssey_megatron.diagnosis.steps import Shown
from odyssey_megatron.diagnosis.verdicts import SLOW_WORKER, Diagnosis
from odyssey_megatron.launch.coordinator.slowness import OVER, Slowness, evidence_of
from odyssey_megatron.plan.plan import Plan

LEAST_SLOWNESS = 1.1
"""Factor of the time of others from which a worker counts as slow; for less nothing is changed."""
_ANOTHER_SPEED = 1.15
"""Factor between speeds from which a slow worker gets another one than was planned with."""


class SlowWorkers:
    """The workers that are slow now."""

    def __init__(self, told: Slowness):
        self._told = told
        self.speeds: dict[int, float] = {}
        """Slow worker -> its speed."""
        self.began_s: dict[int, float] = {}
        """Slow worker -> the time since which that has been known."""
        self._blamed: dict[int, tuple[int, ...]] = {}
        """Slow worker -> its ranks, or those that make it slow if they are known."""

    def look(
        self, diagnosis: Diagnosis, state: ClusterState, live: Plan, now_s: float
    ) -> tuple[ClusterState, list[str]]:
        """Return ``state`` with the speeds of now, and a reason for each worker that has another speed than before."""
        slow = self._still_slow(diagnosis, state) | self._confirmed(diagnosis)
        changed, seen = self._shown(changes(state, slow), diagnosis, state, live)
        state = with_speeds(state, changed)
        self.speeds = {one.worker: one.speed for one in state.workers if one.alive and one.speed < 1.0}
        self._forget_gone({*self.speeds, *changed})
        return state, [self._note(*one, diagnosis, seen, state, now_s) for one in changed.items()]

    @staticmethod
    def _still_slow(diagnosis: Diagnosis, state: ClusterState) -> dict[int, float]:
        """Return slow worker -> speed, for workers whose last steps are nearer to how slow they were than to healthy.

        These stay slow even without a verdict: if times have become noisier nothing is certain, so nothing is over.
        """
        return {
            one.worker: one.speed * one.usual_pace
            for one in state.workers
            if one.alive
            and one.speed < 1.0
            and diagnosis.factors.get(one.worker, 1.0) * one.usual_pace >= one.speed**-OVER
        }

    def _confirmed(self, diagnosis: Diagnosis) -> dict[int, float]:
        """Return slow worker -> speed, for workers whose slowness a step measured after the verdict confirms by
        itself.
        """
        return {
            one.worker: 1 / one.factor
            for one in diagnosis.verdicts
            if one.kind == SLOW_WORKER
            and (
                one.worker in self.speeds
                or (one.found < diagnosis.newest and diagnosis.latest.get(one.worker, 1.0) >= LEAST_SLOWNESS)
            )
        }

    def _shown(
        self, changed: dict[int, float], diagnosis: Diagnosis, state: ClusterState, live: Plan
    ) -> tuple[dict[int, float], Shown]:
        """Return ``changed`` without newly slow workers if steps do not show that they are slow, and what steps
        show.
        """
        new = {one: speed for one, speed in changed.items() if speed < 1.0 and one not in self.speeds}
        verdicts = [one for one in diagnosis.verdicts if one.kind == SLOW_WORKER and one.worker in new]
        if not verdicts:
            return changed, Shown(is_so=True)
        since = min(one.since for one in verdicts)
        seen = self._told.shown(since, state, with_speeds(state, new), diagnosis, live)
        if seen.is_so:
            return changed, seen
        for one in verdicts:
            self._told.doubt(one.worker, state.workers[one.worker].ranks, one.evidence, seen)
        return {one: speed for one, speed in changed.items() if one not in new}, seen

    def _forget_gone(self, still: Collection[int]) -> None:
        """Report that slow workers that have left, or have been replaced, are not slow any more."""
        for worker in [one for one in self.began_s if one not in still]:
            del self.began_s[worker]
            self._told.event(SLOW_WORKER, list(self._blamed.pop(worker)), 1.0, "it has left")

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
            if worker in self.began_s:
                self._told.lasted_s.append(now_s - self.began_s.pop(worker))
        else:
            verdict = next(one for one in diagnosis.verdicts if one.worker == worker)
            is_new = worker not in self.began_s
            evidence = evidence_of(verdict.evidence, seen) if is_new else verdict.evidence
            why = f"rank(s) {ranks} slow, {verdict.factor:.2f} times the time"
            self.began_s.setdefault(worker, now_s)
            blamed = self._blamed.setdefault(worker, verdict.ranks or tuple(ranks))
        self._told.event(SLOW_WORKER, list(blamed), speed, evidence)
        return why


def changes(state: ClusterState, slow: Mapping[int, float]) -> dict[int, float]:
    """Return worker -> speed for the living workers whose speed changes.

    Small changes do not count, so that plans do not flap.

    Args:
        slow: Slow worker -> speed relative to a whole cell. A smaller cell is healthy if it is as fast as the turns
            that it takes make it.
    """
    found = {}
    for worker in state.workers:
        speed = slow.get(worker.worker, worker.usual_pace) / worker.usual_pace
        if not worker.alive or worker.worker in state.fresh:
            continue
        if speed != 1.0 and max(speed, 1 / speed) < LEAST_SLOWNESS:
            continue  # too little to count as slow, or as certainly over
        apart = max(speed / worker.speed, worker.speed / speed)
        if apart >= _ANOTHER_SPEED or (speed != worker.speed and 1.0 in (speed, worker.speed)):
            found[worker.worker] = speed
    return found
