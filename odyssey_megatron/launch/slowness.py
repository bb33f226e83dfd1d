"""What is told of slowness, whoever is slow: in the journal, and to people."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Sequence

from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.diagnosis.steps import Shown, shown
from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.launch.planner import Planner
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.plan.plan import Plan

_log = logging.getLogger(__name__)

OVER = 0.5
"""Of the way from healthy to how slow it was, in logs: nearer to healthy than that it is over."""


class Slowness:
    """Holds verdicts against the time of steps, and tells what is so, what is doubted, and what is over."""

    def __init__(self, planner: Planner, journal: Journal, say: Callable[[str], None]):
        self._planner, self._journal, self.say = planner, journal, say
        self._doubted: set[Hashable] = set()
        """What is slow by its times and not by those of steps: said once."""
        self.lasted_s: list[float] = []
        """How long what is over has lasted."""

    def event(
        self, kind: str, ranks: Sequence[int], speed: float, evidence: str, *, echo: bool = True
    ) -> None:
        """``speed``: 1.0 where it is over; ``echo``: for people, too, who are not looking at a page."""
        self._journal.event("slowness", echo=echo, kind=kind, slow_ranks=ranks, speed=speed, why=evidence)

    def shown(
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

    def doubt(self, what: Hashable, ranks: Sequence[int], evidence: str, seen: Shown) -> None:
        """Says so, once for as long as ``what`` is slow by its times."""
        if what not in self._doubted:
            self._doubted.add(what)
            self.say(f"[odyssey] rank(s) {[*ranks]}: {evidence}; but {seen.why}, so nothing is done about it")

    def doubt_only(self, still: Collection[Hashable]) -> None:
        """Others than ``still`` are not slow by their times any more."""
        self._doubted &= {*still}


def evidence_of(evidence: str, seen: Shown) -> str:
    """With what steps show."""
    return f"{evidence}; {seen.why}" if seen.why else evidence


def ranks_of(state: ClusterState, workers: Collection[int]) -> list[int]:
    """Those of ``workers``, in their order."""
    return [rank for worker in workers for rank in state.workers[worker].ranks]
