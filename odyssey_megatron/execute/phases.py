"""Where a rank stands between two generations, and how long each phase took it."""

from __future__ import annotations

import time
from typing import Any

from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.plan.generation import Generation
from odyssey_megatron.recover import NEXT, Phase


class PhaseClock:
    """Follows the phases of ``recover.py``."""

    def __init__(self) -> None:
        self.phase = Phase.ABORT
        self._began_s = time.monotonic()
        self._taken_s: dict[Phase, float] = {}

    def enter(self, phase: Phase) -> None:
        """Raises OdysseyError if the transition is not in ``recover.NEXT``."""
        if phase not in NEXT[self.phase]:
            raise OdysseyError(f"{self.phase} does not lead to {phase}: a bug in recover.py")
        now_s = time.monotonic()
        if phase is Phase.ABORT or self.phase is Phase.TRAIN:
            self._taken_s = {}
        elif self.phase is not Phase.ABORT:
            self._taken_s[self.phase] = now_s - self._began_s
        self.phase, self._began_s = phase, now_s

    def note_abort(self, heard_s: float) -> None:
        """How long the old step held on after this rank had heard the news; 0 if it was waiting for them."""
        self._taken_s[Phase.ABORT] = max(0.0, self._began_s - heard_s)

    def taken_s(self, *phases: Phase) -> dict[str, float]:
        """``NAME_s`` of each: how long it took, this time."""
        return {f"{phase.value}_s": self._taken_s.get(phase, 0.0) for phase in phases}


def recovery_record(generation: Generation) -> dict[str, Any] | None:
    """What the journal says of the failure that ``generation`` goes on from; None if it began otherwise."""
    if generation.previous is None or generation.planned:
        return None
    return {
        "dead": list(generation.dead),
        "policy": generation.plan.policy,
        "plan_hash": generation.plan_hash,
        "decide_s": generation.decide_s,
    }
