"""The phase of a rank on its way from one generation to the next, and the time that each phase took."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.plan.sending.generation import Generation
from odyssey_megatron.recover import NEXT, Phase


class PhaseClock:
    """Follows the phases of ``recover.py`` and notes the time that each takes."""

    def __init__(self) -> None:
        self.phase = Phase.ABORT
        self._began_s = time.monotonic()
        self._taken_s: dict[Phase, float] = {}

    def enter(self, phase: Phase) -> None:
        """Enter ``phase``. Raises OdysseyError if the transition is not in ``recover.NEXT``."""
        if phase not in NEXT[self.phase]:
            raise OdysseyError(f"{self.phase} does not lead to {phase}: a bug in recover.py")
        now_s = time.monotonic()
        if phase is Phase.ABORT or self.phase is Phase.TRAIN:
            self._taken_s = {}
        elif self.phase is not Phase.ABORT:
            self._taken_s[self.phase] = now_s - self._began_s
        self.phase, self._began_s = phase, now_s

    def note_abort(self, heard_s: float) -> None:
        """Note for how long the old step held this rank after it had heard the news; 0 if it was waiting for them."""
        self._taken_s[Phase.ABORT] = max(0.0, self._began_s - heard_s)

    def taken_s(self, *phases: Phase) -> dict[str, float]:
        """Return the seconds that each of ``phases`` took this time, under the name ``PHASE_s``."""
        return {f"{phase.value}_s": self._taken_s.get(phase, 0.0) for phase in phases}


class WayBack:
    """What the journal says of how this rank went from one generation to the next."""

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.in_groups_s = self.agreed_s = 0.0
        """When this rank was in its groups, and when all had agreed, on its own monotonic clock."""
        self._outcome, self._eager_forwards = "", 0
        self._failure: dict[str, Any] | None = None
        """The failure that the generation at hand goes on from, until it is written down."""

    def goes_on(self, outcome: str, eager_forwards: int) -> None:
        """Note how the interrupted step goes on: ``redo``, ``finish`` or ``resume``."""
        self._outcome, self._eager_forwards = outcome, eager_forwards

    def started(self, generation: Generation) -> None:
        """Note that the generation has its layers, or that they are on their way."""
        self._failure = _failure_before(generation)

    def ended(self) -> Recovered | None:
        """Return the record of a recovery, once, when the first instruction after it is about to run;
        otherwise None.
        """
        if self._failure is None or self.clock.phase is not Phase.TRAIN:
            return None
        failure, self._failure = self._failure, None
        regroup_s = self.clock.taken_s(Phase.ABORT, Phase.GROUPS, Phase.AGREE)
        taken_s = regroup_s | self.clock.taken_s(Phase.TRANSFER)
        return Recovered(
            regroup_s=sum(regroup_s.values()),
            stalled_s=failure["decide_s"] + sum(taken_s.values()),
            record=failure
            | taken_s
            | {
                "in_groups_s": self.in_groups_s,
                "resumed_s": time.monotonic(),
                "outcome": self._outcome,
                "eager_forwards": self._eager_forwards,
            },
        )


class Recovered(NamedTuple):
    """A recovery as one rank has seen it."""

    regroup_s: float
    """Seconds until it was known what to move."""
    stalled_s: float
    """Seconds from the detection of the failure until this rank trained again."""
    record: dict[str, Any]
    """The fields of the journal's event."""


def _failure_before(generation: Generation) -> dict[str, Any] | None:
    """Return what the journal says of the failure that ``generation`` goes on from; None if it began without one."""
    if generation.previous is None or generation.planned:
        return None
    return {
        "dead": list(generation.dead),
        "policy": generation.plan.policy,
        "plan_hash": generation.plan_hash,
        "decide_s": generation.decide_s,
    }
