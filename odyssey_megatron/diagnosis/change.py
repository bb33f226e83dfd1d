"""Detection of change points with a stated rate of false alarms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from odyssey_megatron.diagnosis.timings import Floats

FALSE_ALARM_STEPS = 1e9
"""The least mean number of measured steps until a level that has not changed is called changed.

The statistic is Page's sum of log likelihood ratios, reset at zero, and its threshold is ``log(FALSE_ALARM_STEPS)``.
Then the mean time to a false alarm is at least that many steps (Lorden, 1971), for independent steps with normal noise.
The addends are cut off at a third of the threshold, so that two steps alone raise no alarm; this only makes the time
longer.
"""
LEAST = math.log(1.08)
"""The shift that is looked for, as a log ratio. Values above half of it, step after step, add up to an alarm."""
_LEAST_NOISE = 0.004
"""The least relative noise that is assumed: nothing is measured better than that."""
RECENT = 5
"""The number of last steps that say how large a shift is now."""


@dataclass(frozen=True, slots=True)
class LevelShift:
    """A level that has risen by more than half of the shift looked for, and is still up at the end."""

    since: int
    """The index in the series at which it began."""
    found: int
    """The index at which it became certain."""
    log_ratio: float
    """The median of its last ``RECENT`` values."""


def noise(series: list[Floats]) -> float:
    """Return the noise of one step (a standard deviation): that of the median series.

    It is found from differences of neighbouring values, which a shift hardly changes.
    """
    each = [1.4826 * float(np.median(np.abs(np.diff(one)))) / math.sqrt(2) for one in series if len(one) >= 3]
    return max(_LEAST_NOISE, float(np.median(each)) if each else 0.0)


def raised(values: Floats, noise: float, least: float = LEAST) -> LevelShift | None:
    """Return the shift if ``values``, which usually are around zero, end at a level raised by ``least``; else None.

    A level that has come down again is no shift.
    """
    enough = math.log(FALSE_ALARM_STEPS)
    total, since, shift_at, found = 0.0, 0, 0, -1
    for at, value in enumerate(values):
        towards = value - least / 2 if found < 0 else least / 2 - value
        if total <= 0.0:
            since = at
        total = max(0.0, total + min(enough / 3, least / noise**2 * towards))
        if total >= enough:  # the level has risen, or has come down again
            found, shift_at = (at, since) if found < 0 else (-1, at)
            total = 0.0
    if found < 0:
        return None
    recent = values[max(shift_at, len(values) - RECENT) :]
    return LevelShift(since=shift_at, found=found, log_ratio=float(np.median(recent)))
