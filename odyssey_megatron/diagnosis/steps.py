"""Whether a slowness shows in the time that steps take.

If no step becomes longer nobody is held up; a slowness that should make steps longer, and does not, is none. Times in,
verdict out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from odyssey_megatron.diagnosis.change import RECENT

_ENOUGH = 3
"""With fewer steps from before the slowness, later ones are compared with the plan's simulated step."""
_TOO_LITTLE = 1.05
"""A slowness that should make steps longer by less than this factor cannot be told from their noise, and is believed.
For a larger one, steps must be longer by the square root of this factor, and no more, however much is expected: where
ranks share processors, a slow rank does not hold the others up for as long as it takes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The times of the steps that were measured in one generation."""

    generation: int = -1
    seconds: Mapping[int, float] = field(default_factory=dict)
    """Step -> its wall time, as the median over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Whether steps show a slowness, and the reason."""

    is_so: bool
    why: str = ""
    """The reason; empty if no step was there to compare."""


def shown(steps_s: Mapping[int, float], since: int, without_s: float, with_s: float) -> Shown:
    """Return whether steps have become longer, if a slowness should make them longer.

    Args:
        steps_s: step -> its time, all with the same plan.
        since: the first step of the slowness.
        without_s, with_s: time of the plan's step, simulated without and with the slowness.
    """
    expected = with_s / without_s
    before = [seconds for step, seconds in steps_s.items() if step < since]
    after = [seconds for step, seconds in sorted(steps_s.items()) if step >= since][-RECENT:]
    if not after:
        return Shown(is_so=True)
    if expected < _TOO_LITTLE:
        return Shown(is_so=True, why="too little for steps to show it")
    beside = "as before" if len(before) >= _ENOUGH else "as the plan says without it"
    usual_s = statistics.median(before) if len(before) >= _ENOUGH else without_s
    longer = statistics.median(after) / usual_s
    why = f"steps take {longer:.2f} times as long {beside}, {expected:.2f} times by the plan's simulation"
    return Shown(is_so=longer >= math.sqrt(_TOO_LITTLE), why=why)
