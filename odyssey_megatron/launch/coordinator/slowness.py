"""Reports slowness of workers and links: in the journal, and to people."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Sequence

from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.diagnosis.steps import Shown, shown
from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.launch.coordinator.planner import Planner
from odyssey_megatron.launch.coordinator.said import Events
from odyssey_megatron.plan.plan import Plan

_log = logging.getLogger(__name__)

OVER = 0.5
"""Fraction of the way, in logarithms, from healthy to how slow it was: a slowness below it is over."""


class Slowness:
    """Compares verdicts with the time of steps, and reports those that are confirmed, doubted or over."""

    def __init__(self, planner: Planner, journal: Events, say: Callable[[str], None]):
        self._planner, self._journal, self.say = planner, journal, say
        self._doubted: set[Hashable] = set()
        """Workers or links that are slow by their own times, but not by those of steps; the user was told once."""
        self.lasted_s: list[float] = []
        """How long each slowness that is over has lasted."""

    def event(
        self, kind: str, ranks: Sequence[int], speed: float, evidence: str, *, echo: bool = True
    ) -> None:
        """Write to the journal that ``ranks`` are slow, or with ``speed`` 1.0 that this is over; with ``echo`` print
        it, too.
        """
        self._journal.event("slowness", echo=echo, kind=kind, slow_ranks=ranks, speed=speed, why=evidence)

    def shown(
        self, since: int, before: ClusterState, after: ClusterState, diagnosis: Diagnosis, live: Plan
    ) -> Shown:
        """Return whether the times of steps show the slowness that ``after`` has and ``before`` has not."""
        if diagnosis.took.generation != before.generation:
            return Shown(is_so=True)
        try:
            without_s, with_s = (self._planner.step_s(state, live) for state in (before, after))
        except OdysseyError as error:
            _log.warning("no step of the live plan can be simulated: %s", error)
            return Shown(is_so=True)
        return shown(diagnosis.took.seconds, since, without_s, with_s)

    def doubt(self, what: Hashable, ranks: Sequence[int], evidence: str, seen: Shown) -> None:
        """Tell the user that steps do not show the slowness of ``what``, once for as long as it is slow by its own
        times.
        """
        if what not in self._doubted:
            self._doubted.add(what)
            self.say(f"[odyssey] rank(s) {[*ranks]}: {evidence}; but {seen.why}, so nothing is done about it")

    def doubt_only(self, still: Collection[Hashable]) -> None:
        """Forget doubts about all but ``still``: the others are not slow by their own times any more."""
        self._doubted &= {*still}


def evidence_of(evidence: str, seen: Shown) -> str:
    """Return ``evidence`` with what steps show."""
    return f"{evidence}; {seen.why}" if seen.why else evidence


def ranks_of(state: ClusterState, workers: Collection[int]) -> list[int]:
    """Return the ranks of ``workers``, in the order of ``workers``."""
    return [rank for worker in workers for rank in state.workers[worker].ranks]
