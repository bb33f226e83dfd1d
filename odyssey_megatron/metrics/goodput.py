"""Where a job's time went: what trained, and what did not, by the buckets of Google's ML Goodput Measurement.

A step is worth the job's ideal step time, or what it took if that is less. All other time is lost, and each
second of it is in one bucket, so that the sum is the time that has passed. The tokens lost are what the lost
time would have trained at the ideal pace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odyssey_megatron.metrics.commits import Commits, Numbers
from odyssey_megatron.metrics.records import LINK_KINDS
from odyssey_megatron.metrics.recoveries import RecoveryRecord, named, on_one_clock
from odyssey_megatron.metrics.switches import Switch
from odyssey_megatron.metrics.timeline import JournalEvent, Times, known

PREPARING = "TRAINING_PREP"
STARTING = "PROGRAM_STARTUP"
RECOVERING = "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"
DONE_AGAIN = "WASTED_PROGRESS_FROM_DISRUPTION"
SAVING = "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"
CHANGING = "CUSTOM_BADPUT_EVENTS.PLAN_CHANGE"
FEWER = "CUSTOM_BADPUT_EVENTS.FEWER_RANKS"
SLOW = "CUSTOM_BADPUT_EVENTS.SLOW_RANKS"
OTHER = "OTHER"
JOINED = "joined"
"""The cause where nothing has failed: ranks are back."""
BUCKETS = {
    PREPARING: "from the launch to the first plan that all ranks have agreed on",
    STARTING: "the first step, beyond an ideal one",
    RECOVERING: "from a failure to the next instruction, and entering a plan in which a rank is back",
    DONE_AGAIN: "work of interrupted steps that was done again",
    SAVING: "steps that waited for a checkpoint",
    CHANGING: "entering another plan between two steps",
    FEWER: "steps with fewer ranks than the job began with",
    SLOW: "steps while a rank was known to be slow",
    OTHER: "all else: steps that were longer than the ideal one, evaluation, the end",
}
"""Google's names (``BadputType`` in AI-Hypercomputer/ml-goodput-measurement), with their prefix for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Time in one bucket that is lost by one cause."""

    bucket: str
    cause: str
    seconds: float
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The job's time: ``productive_s`` and all that was ``lost`` add up to ``elapsed_s``."""

    elapsed_s: float = 0.0
    productive_s: float = 0.0
    ideal_step_s: float | None = None
    tokens: int = 0
    """Tokens that were trained."""
    lost: tuple[Lost, ...] = ()
    """The losses, the largest first."""

    @property
    def share(self) -> float | None:
        """The productive share of the time that has passed."""
        return self.productive_s / self.elapsed_s if self.elapsed_s > 0 else None


class _Slowness:
    """When which ranks were known to be slow."""

    def __init__(self, events: Sequence[JournalEvent]):
        self._since_s, self._ranks = [-math.inf], [""]
        """Moments in order, and the ranks that are slow from each on; "": none."""
        slow: dict[str, None] = {}
        for event in named(events, "slowness"):
            if not event.get("slow_ranks"):
                continue
            whose = _ranks(event["kind"], event["slow_ranks"])
            if event["speed"] < 1.0:
                slow[whose] = None
            else:
                slow.pop(whose, None)
            self._since_s.append(max(self._since_s[-1], event["at_s"]))
            self._ranks.append(next(iter(slow), ""))
        following = itertools.accumulate(
            reversed(range(len(self._ranks))),
            lambda behind, number: number if self._ranks[number] else behind,
            initial=len(self._ranks),
        )
        self._next = np.array([*following][:0:-1], np.int64)
        """For each moment, the first one from it on at which some are slow."""

    def between(self, since_s: Times, until_s: Times) -> Numbers:
        """Return for each span of time a number: of the ranks that were slow first in it (:meth:`ranks`); 0: none."""
        if not any(self._ranks):
            return np.zeros(len(since_s), np.int64)
        first = np.searchsorted(self._since_s, since_s, side="right") - 1
        behind = np.maximum(first + 1, np.searchsorted(self._since_s, until_s, side="left"))
        found = self._next[first]
        return np.where(found < behind, found, 0)

    def ranks(self, number: int) -> str:
        return self._ranks[number]


def goodput(
    events: Sequence[JournalEvent],
    commits: Commits,
    recovered: Sequence[RecoveryRecord],
    switched: Sequence[Switch],
) -> Goodput:
    """Return the job's goodput by the journal alone. What the journal does not time is not counted."""
    starts = known(
        on_one_clock(one, one["launched_s"]) if "launched_s" in one else one["at_s"]
        for one in named(events, "job_started")
    )
    is_timed = ~np.isnan(commits.at_s)
    if not starts or not is_timed.any():
        return Goodput()
    ledger = _Ledger(events, commits, is_timed, recovered, switched)
    begins_s = min(known(one["at_s"] for one in named(events, "generation_started")), default=starts[0])
    ledger.lose(PREPARING, "launch", begins_s - starts[0])
    at_s = commits.at_s[is_timed]
    until_s = np.maximum.accumulate(np.concatenate([[max(begins_s, starts[0])], at_s]))
    took_s = np.maximum(0.0, at_s - until_s[:-1])
    productive_s = float(np.minimum(took_s, ledger.ideal_s).sum())
    ledger.book(until_s[:-1], np.maximum(0.0, took_s - ledger.ideal_s))
    last_s = float(until_s[-1])
    ends_s = max(known(event["at_s"] for event in named(events, "job_finished")), default=last_s)
    ledger.lose(OTHER, "after the last step", ends_s - last_s)
    tokens = np.sort(commits.tokens[is_timed])
    pace = int(tokens[len(tokens) // 2]) / ledger.ideal_s if ledger.ideal_s > 0 else 0.0
    lost = [
        Lost(bucket=bucket, cause=cause, seconds=seconds, tokens=seconds * pace)
        for (bucket, cause), seconds in ledger.lost_s.items()
        if seconds > 0
    ]
    return Goodput(
        elapsed_s=productive_s + sum(ledger.lost_s.values()),
        productive_s=productive_s,
        ideal_step_s=ledger.ideal_s,
        tokens=int(tokens.sum()),
        lost=tuple(sorted(lost, key=lambda one: (-one.seconds, one.bucket, one.cause))),
    )


class _Ledger:
    """What was lost so far, and what is needed to tell the buckets and causes."""

    def __init__(
        self,
        events: Sequence[JournalEvent],
        commits: Commits,
        is_timed: NDArray[np.bool_],
        recovered: Sequence[RecoveryRecord],
        switched: Sequence[Switch],
    ):
        """``is_timed``: which steps are booked."""
        self.lost_s: dict[tuple[str, str], float] = {}
        self._step, self._at_s = commits.step[is_timed], commits.at_s[is_timed]
        self._stalls = stalls(recovered, switched)
        self._redo_s: dict[int, float] = {}
        """The longest redo of each step."""
        for one in recovered:
            self._redo_s[one.step] = max(self._redo_s.get(one.step, 0.0), one.redo_s or 0.0)
        self._saves = saves(events)
        self._has_known = np.isin(self._step, [*self._stalls, *self._saves])
        """Which steps have causes that are known by their number."""
        members = {
            event["generation"]: len(event["members"]) for event in named(events, "generation_started")
        }
        self._whole = max((members[one] for one in sorted(members)[:1]), default=0)
        generations = np.array(sorted(members) or [0], np.int64)
        missing = np.array([self._whole - members.get(int(one), self._whole) for one in generations])
        generation = commits.generation[is_timed]
        which = np.clip(np.searchsorted(generations, generation), 0, len(generations) - 1)
        self._missing: Numbers = np.where(generations[which] == generation, np.maximum(0, missing[which]), 0)
        """For each step, the number of ranks that it lacks."""
        self._slow = _Slowness(events)
        interval_s = commits.interval_s[is_timed]
        has_time = ~np.isnan(interval_s) & (interval_s != 0)
        is_clean = has_time & ~self._has_known
        is_clean &= self._slow.between(self._at_s - interval_s, self._at_s) == 0
        whole_s = _median(interval_s[is_clean & (self._missing == 0)])
        for row in np.flatnonzero(self._has_known):
            interval_s[row] -= self._saves.get(int(self._step[row]), 0.0)
        # A job may save in each step.
        self.ideal_s = whole_s or _median(interval_s[has_time & (interval_s > 0)]) or 0.0
        self._usual_s = np.array(
            [
                _median(interval_s[is_clean & (which == number)]) or self._expected_s(int(missing[number]))
                for number in range(len(generations))
            ]
        )[which]
        """For each step, the median of its generation's in which nothing is known to have gone wrong; if there is none,
        what a step takes where those who are left share the work out evenly."""

    def _expected_s(self, missing: int) -> float:
        return self.ideal_s * self._whole / max(1, self._whole - missing)

    def lose(self, bucket: str, cause: str, seconds: float) -> None:
        if seconds > 0:
            self.lost_s[bucket, cause] = self.lost_s.get((bucket, cause), 0.0) + seconds

    def book(self, began_s: Times, lost_s: Times) -> None:
        """Book ``lost_s`` of each step, which began at ``began_s``, to known causes first."""
        self.lose(STARTING, "first step", float(lost_s[0]))
        lost_s[0] = 0.0
        for row in np.flatnonzero(self._has_known):
            lost_s[row] = self._book_known(int(self._step[row]), float(lost_s[row]))
        more_s = np.maximum(0.0, self._usual_s - self.ideal_s)
        by_fewer_s = np.where(self._missing > 0, np.minimum(lost_s, more_s), 0.0)
        for missing, seconds in enumerate(np.bincount(self._missing, by_fewer_s).tolist()):
            self.lose(FEWER, f"{missing} of {self._whole} ranks missing", seconds)
        slow = self._slow.between(began_s, self._at_s)
        for number, seconds in enumerate(np.bincount(slow, lost_s - by_fewer_s).tolist()):
            if number:
                self.lose(SLOW, self._slow.ranks(number), seconds)
            else:
                self.lose(OTHER, "longer steps", seconds)

    def _book_known(self, step: int, lost_s: float) -> float:
        """Book what one step's stalls and checkpoints cost; return the seconds of ``lost_s`` that are left."""
        failed, most_s = "", 0.0
        for bucket, cause, stall_s in self._stalls.get(step, ()):
            part_s = min(lost_s, stall_s)
            self.lose(bucket, cause, part_s)
            lost_s -= part_s
            if bucket == RECOVERING and cause != JOINED:
                failed, most_s = cause, most_s + self._redo_s.get(step, 0.0)
        saved_s = min(lost_s, self._saves.get(step, 0.0))
        self.lose(SAVING, "checkpoint", saved_s)
        lost_s -= saved_s
        # A failure destroys no more than is done again. The rest is what it is in other steps, evaluation for example.
        again_s = min(lost_s, most_s)
        self.lose(DONE_AGAIN, failed, again_s)
        return lost_s - again_s


def _median(values: Times) -> float | None:
    return float(np.median(values)) if len(values) else None


def saves(events: Iterable[JournalEvent]) -> dict[int, float]:
    """Return step -> the seconds that it waited for checkpoints, of steps that did."""
    found: dict[int, float] = {}
    for event in named(events, "saved"):
        found[event["step"]] = found.get(event["step"], 0.0) + event["save_s"]
    return found


def stalls(
    recovered: Iterable[RecoveryRecord], switched: Iterable[Switch]
) -> dict[int, list[tuple[str, str, float]]]:
    """Return (bucket, cause, seconds) of each stall, by the step that it is part of."""
    found: dict[int, list[tuple[str, str, float]]] = {}
    for one in recovered:
        # Otherwise the stall is part of the next one's.
        if one.stall_s is not None:
            row = RECOVERING, one.cause or "fresh groups", one.stall_s
            found.setdefault(one.step, []).append(row)
    for change in switched:
        bucket, cause = (RECOVERING, JOINED) if change.joined else (CHANGING, change.policy)
        found.setdefault(change.step, []).append((bucket, cause, change.stall_s))
    return found


def _ranks(kind: str, ranks: Sequence[int]) -> str:
    listed = f"rank(s) {', '.join(map(str, ranks))}"
    return f"{kind} of {listed}" if kind in LINK_KINDS else f"{listed} slow"


def by_bucket(lost: Iterable[Lost]) -> Mapping[str, float]:
    """Return the seconds lost in each bucket, 0 where nothing was lost."""
    found = dict.fromkeys(BUCKETS, 0.0)
    for one in lost:
        found[one.bucket] += one.seconds
    return found
