"""Change points with a stated rate of false alarms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from odyssey_megatron.diagnosis.timings import Floats

FALSE_ALARM_STEPS = 1e9
"""A level that has not changed is called changed after so many measured steps on average, at the least.

The statistic is Page's sum of log likelihood ratios, reset at zero, and its threshold ``log(FALSE_ALARM_STEPS)``: then
the mean time to a false alarm is at least that many steps (Lorden, 1971), for independent steps with normal noise. The
addends are cut off at a third of the threshold, which only makes it longer: no two steps alone raise an alarm.
"""
LEAST = math.log(1.08)
"""The shift that is looked for, a log ratio: more than half of it, step after step, adds up to an alarm."""
_LEAST_NOISE = 0.004
"""Relative; nothing is measured better than that."""
RECENT = 5
"""Steps that say how large a shift is now."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A level that has risen by more than half of what is looked for, and is still up at the end."""

    since: int
    """Where it began: a place in the series."""
    found: int
    """Where that was certain."""
    log_ratio: float
    """The median of its last steps."""


def noise(series: list[Floats]) -> float:
    """Of one step: from the differences of neighbours, which a shift hardly changes; the median series counts."""
    each = [1.4826 * float(np.median(np.abs(np.diff(one)))) / math.sqrt(2) for one in series if len(one) >= 3]
    return max(_LEAST_NOISE, float(np.median(each)) if each else 0.0)


def raised(values: Floats, noise: float, least: float = LEAST) -> Shift | None:
    """Whether ``values``, around zero, end at a level raised by ``least``. One that has come down again is none."""
    enough = math.log(FALSE_ALARM_STEPS)
    total, since, shift_at, found = 0.0, 0, 0, -1
    for at, value in enumerate(values):
        towards = value - least / 2 if found < 0 else least / 2 - value
        if total <= 0.0:
            since = at
        total = max(0.0, total + min(enough / 3, least / noise**2 * towards))
        if total >= enough:  # up, or down again
            found, shift_at = (at, since) if found < 0 else (-1, at)
            total = 0.0
    if found < 0:
        return None
    recent = values[max(shift_at, len(values) - RECENT) :]
    return Shift(since=shift_at, found=found, log_ratio=float(np.median(recent)))
