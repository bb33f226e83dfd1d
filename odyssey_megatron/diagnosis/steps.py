"""Whether a slowness shows in the time that steps take: what makes no step longer holds nobody up, and what is said to
make them longer, and does not, is none. Times in, verdict out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from odyssey_megatron.diagnosis.change import RECENT

_ENOUGH = 3
"""With fewer steps from before, those since are held against the plan's simulation itself."""
_TOO_LITTLE = 1.05
"""A slowness that should make steps longer by less than this cannot be told from their noise, and is believed. Others
want half of it (of its logarithm) and no more, however much is expected: where ranks share processors, one that is slow
does not hold the others up for as long as it takes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Of the steps that were measured in one generation."""

    generation: int = -1
    seconds: Mapping[int, float] = field(default_factory=dict)
    """Step -> on the wall, the median of its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Whether steps show a slowness, and why that is said."""

    is_so: bool
    why: str = ""
    """Empty where there was nothing to hold it against."""


def shown(steps_s: Mapping[int, float], since: int, without_s: float, with_s: float) -> Shown:
    """Whether steps have become longer, where a slowness should make them longer.

    Args:
        steps_s: step -> what it took, all with one plan.
        since: the first step of the slowness.
        without_s, with_s: the plan's step, simulated without and with it.
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
