"""The latest job of a folder, with its events on one clock.

Hosts' clocks differ, and wall clocks jump, so no time of one host is ever subtracted from another's. ``t_s``
is comparable where ``clock`` is the same. Two clocks are joined by what ranks under both have seen at the
same moment: the end of a generation's agreement, a collective of all its members (``agreed_s``). Its last
message arrives everywhere within milliseconds, and that is how exact differences between two hosts are.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

JournalEvent = dict[str, Any]
Times = NDArray[np.float64]

_AGREED = ("generation_started", "generation_agreed")
"""The events that tell that moment: a member's, and that of the coordinator, whose host may have no member."""

_Shifts = list[tuple[float, float]]
"""(``t_s``, what is to be added to it there), in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobClock:
    """The one clock of a job: the first agent's, with what makes other clocks' times those of it."""

    job: str
    joined: dict[str, _Shifts]
    epoch_s: float
    """What is to be added to the first agent's ``t_s``."""

    def at_s(self, event: JournalEvent) -> float:
        """Return when ``event`` was; NaN if nothing joins its clock."""
        shifts = self.joined.get(event.get("clock", ""))
        return event["t_s"] + _nearest(shifts, event["t_s"]) + self.epoch_s if shifts else math.nan

    def all_at_s(self, clock: str, t_s: Times) -> Times:
        """Return the same of many events that have one clock."""
        if not (shifts := self.joined.get(clock)):
            return np.full_like(t_s, math.nan)
        if len(shifts) == 1:
            return t_s + shifts[0][1] + self.epoch_s
        moments, added = np.array(shifts).T
        behind = np.clip(np.searchsorted(moments, t_s), 0, len(moments) - 1)
        before = np.maximum(behind - 1, 0)
        is_before = np.abs(moments[before] - t_s) <= np.abs(moments[behind] - t_s)
        found: Times = t_s + added[np.where(is_before, before, behind)] + self.epoch_s
        return found


def last_job(events: Sequence[JournalEvent]) -> list[JournalEvent]:
    """Return the events of the latest job of a folder, which may have been used again, in order and with ``at_s``,
    which is set in them: copies would take as much memory again.

    ``at_s`` is in seconds since the epoch. It is counted by the first agent's clock from the job's start on,
    whatever its wall clock does later. It is NaN, and the event comes last, if nothing joins the event's
    clock to that one.
    """
    return clocked(events)[0]


def clocked(events: Sequence[JournalEvent]) -> tuple[list[JournalEvent], JobClock | None]:
    """Return the events of :func:`last_job` and its clock; None: it was written by a version that had wall clocks
    alone.
    """
    starts = [number for number, event in enumerate(events) if event["event"] == "job_started"]
    first = starts[-1] if starts else 0
    head = events[first] if events else {}
    if "job" not in head or "clock" not in head:
        for event in (mine := list(events[first:])):
            event["at_s"] = event["wall_s"]
        return mine, None
    mine = [event for event in events if event.get("job") == head["job"]]
    clock = JobClock(
        job=head["job"], joined=_joined(head["clock"], mine), epoch_s=head["wall_s"] - head["t_s"]
    )
    for event in mine:
        event["at_s"] = clock.at_s(event)
    return sorted(mine, key=lambda one: math.inf if math.isnan(one["at_s"]) else one["at_s"]), clock


def known(times_s: Iterable[float]) -> list[float]:
    """Return the times without those that are on no common clock."""
    return [one for one in times_s if not math.isnan(one)]


def clocks_of(events: Sequence[JournalEvent]) -> int:
    """Return the number of clocks that a job's events were timed by."""
    return len({event.get("clock", "") for event in events})


def _joined(reference: str, events: Sequence[JournalEvent]) -> dict[str, _Shifts]:
    """Return for each clock what makes its times those of ``reference``. A clock may be joined through others."""
    agreed: dict[str, dict[int, float]] = {}
    for event in events:
        if event["event"] in _AGREED and event.get("agreed_s") is not None:
            moments = agreed.setdefault(event.get("clock", ""), {})
            earliest_s = moments.get(event["generation"], math.inf)
            moments[event["generation"]] = min(earliest_s, event["agreed_s"])
    joined, there = {reference: [(0.0, 0.0)]}, agreed.pop(reference, {})
    while agreed:
        clock = max(agreed, key=lambda one: len(agreed[one].keys() & there.keys()))
        moments = agreed.pop(clock)
        if not (both := moments.keys() & there.keys()):
            break
        joined[clock] = sorted((moments[one], there[one] - moments[one]) for one in both)
        for generation, t_s in moments.items():
            there.setdefault(generation, t_s + _nearest(joined[clock], t_s))
    return joined


def _nearest(shifts: _Shifts, t_s: float) -> float:
    """Return the shift at the moment nearest to ``t_s``, as clocks drift apart by a second in a day."""
    place = bisect.bisect(shifts, (t_s, 0.0))
    return min(shifts[max(place - 1, 0) : place + 1], key=lambda one: abs(one[0] - t_s))[1]
