"""Where a job's time went: what trained, and what did not, by the buckets of Google's ML Goodput Measurement.

A step is worth the job's ideal step time, or what it took if that is less. All other time is lost, and each
second of it is in one bucket, so that the sum is the time that has passed. The tokens lost are what the lost
time would have trained at the ideal pace.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from odyssey_megatron.metrics.records import LINK_KINDS
from odyssey_megatron.metrics.recoveries import RecoveryRecord, median, named
from odyssey_megatron.metrics.steps import CommittedStep
from odyssey_megatron.metrics.switches import Switch
from odyssey_megatron.metrics.timeline import JournalEvent, known

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

    def between(self, since_s: float, until_s: float) -> str:
        """Return the ranks that were slow first in that time; "": none."""
        first = bisect.bisect_right(self._since_s, since_s) - 1
        behind = max(first + 1, bisect.bisect_left(self._since_s, until_s))
        return next(filter(None, self._ranks[first:behind]), "")


def goodput(
    events: Sequence[JournalEvent],
    steps: Sequence[CommittedStep],
    recovered: Sequence[RecoveryRecord],
    switched: Sequence[Switch],
) -> Goodput:
    """Return the job's goodput by the journal alone. What the journal does not time is not counted."""
    starts = known(event["at_s"] for event in named(events, "job_started"))
    rows = [row for row in steps if row.committed_wall_s == row.committed_wall_s]
    if not starts or not rows:
        return Goodput()
    ledger = _Ledger(events, rows, recovered, switched)
    begins_s = min(known(one["at_s"] for one in named(events, "generation_started")), default=starts[0])
    ledger.lose(PREPARING, "launch", begins_s - starts[0])
    before_s, productive_s = max(begins_s, starts[0]), 0.0
    for row in rows:
        took_s = max(0.0, row.committed_wall_s - before_s)
        productive_s += min(took_s, ledger.ideal_s)
        ledger.book(row, before_s, max(0.0, took_s - ledger.ideal_s), is_first=row is rows[0])
        before_s = max(before_s, row.committed_wall_s)
    ends_s = max(known(event["at_s"] for event in named(events, "job_finished")), default=before_s)
    ledger.lose(OTHER, "after the last step", ends_s - before_s)
    tokens = ledger.tokens_per_step
    pace = tokens / ledger.ideal_s if ledger.ideal_s > 0 else 0.0
    lost = [
        Lost(bucket=bucket, cause=cause, seconds=seconds, tokens=seconds * pace)
        for (bucket, cause), seconds in ledger.lost_s.items()
        if seconds > 0
    ]
    return Goodput(
        elapsed_s=productive_s + sum(ledger.lost_s.values()),
        productive_s=productive_s,
        ideal_step_s=ledger.ideal_s,
        tokens=sum(ledger.tokens.get(row.step, 0) for row in rows),
        lost=tuple(sorted(lost, key=lambda one: (-one.seconds, one.bucket, one.cause))),
    )


class _Ledger:
    """What was lost so far, and what is needed to tell the buckets and causes."""

    def __init__(
        self,
        events: Sequence[JournalEvent],
        rows: Sequence[CommittedStep],
        recovered: Sequence[RecoveryRecord],
        switched: Sequence[Switch],
    ):
        self.lost_s: dict[tuple[str, str], float] = {}
        self.tokens = {
            event["step"]: int(event.get("tokens", 0)) for event in named(events, "step_committed")
        }
        self._stalls = stalls(recovered, switched)
        self._saves: dict[int, float] = {}
        for event in named(events, "saved"):
            self._saves[event["step"]] = self._saves.get(event["step"], 0.0) + event["save_s"]
        self._members = {
            event["generation"]: len(event["members"]) for event in named(events, "generation_started")
        }
        self._whole = max((self._members[one] for one in sorted(self._members)[:1]), default=0)
        self._slow = _Slowness(events)
        self._usual_s = self._usual(rows)
        """For each generation, the median time of steps in which nothing is known to have gone wrong."""
        whole = [row for row in rows if self._members.get(row.generation, self._whole) >= self._whole]
        self.ideal_s = (
            self._usual(whole, whole=True).get(-1)
            or median(row.interval_s for row in rows if row.interval_s)
            or 0.0
        )
        shown = sorted(self.tokens.get(row.step, 0) for row in rows)
        self.tokens_per_step = shown[len(shown) // 2]

    def lose(self, bucket: str, cause: str, seconds: float) -> None:
        if seconds > 0:
            self.lost_s[bucket, cause] = self.lost_s.get((bucket, cause), 0.0) + seconds

    def book(self, row: CommittedStep, before_s: float, lost_s: float, *, is_first: bool) -> None:
        """Book ``lost_s`` of a step that began at ``before_s``, to known causes first."""
        if is_first:
            return self.lose(STARTING, "first step", lost_s)
        failed = ""
        for bucket, cause, stall_s in self._stalls.get(row.step, ()):
            part_s = min(lost_s, stall_s)
            self.lose(bucket, cause, part_s)
            lost_s -= part_s
            failed = cause if bucket == RECOVERING else failed
        saved_s = min(lost_s, self._saves.get(row.step, 0.0))
        self.lose(SAVING, "checkpoint", saved_s)
        lost_s -= saved_s
        if failed and failed != JOINED:
            return self.lose(DONE_AGAIN, failed, lost_s)
        missing = self._whole - self._members.get(row.generation, self._whole)
        if missing > 0:
            usual_s = self._usual_s.get(row.generation, math.inf)
            part_s = min(lost_s, max(0.0, usual_s - self.ideal_s))
            self.lose(FEWER, f"{missing} of {self._whole} ranks missing", part_s)
            lost_s -= part_s
        if ranks := self._slow.between(before_s, row.committed_wall_s):
            self.lose(SLOW, ranks, lost_s)
        else:
            self.lose(OTHER, "longer steps", lost_s)

    def _usual(self, rows: Sequence[CommittedStep], *, whole: bool = False) -> dict[int, float]:
        """Return the median step time of each generation, or with ``whole`` of all together, under -1."""
        clean: dict[int, list[float]] = {}
        for row in rows:
            if row.interval_s and row.step not in self._stalls and row.step not in self._saves:
                if not self._slow.between(row.committed_wall_s - row.interval_s, row.committed_wall_s):
                    clean.setdefault(-1 if whole else row.generation, []).append(row.interval_s)
        return {generation: median(times_s) or 0.0 for generation, times_s in clean.items()}


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
