"""Committed steps in columns: of a long job there are a million, and what is known of each is a few numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from odyssey_megatron.metrics.timeline import JobClock, JournalEvent, Times

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Commits:
    """Steps, ascending, each as it was in the last generation in which it was committed."""

    step: Numbers
    generation: Numbers
    at_s: Times
    """The time of the first report of each in that generation; NaN: on no common clock."""
    first_s: Times
    """The time of the first report of each in any generation: where the rank that reports has died, the next one
    reports the last step again.
    """
    tokens: Numbers

    def __len__(self) -> int:
        return len(self.step)

    @property
    def interval_s(self) -> Times:
        """The time since the previous step's commit; NaN where it is not known."""
        passed_s = np.diff(self.at_s, prepend=np.nan)
        passed_s[np.diff(self.step, prepend=-2) != 1] = np.nan
        return passed_s

    def and_of(self, events: Sequence[JournalEvent]) -> Commits:
        """Return these and those in ``events``, which have ``at_s``."""
        reports = [event for event in events if event["event"] == "step_committed"]
        at_s = np.array([one["at_s"] for one in reports], np.float64)
        newer = _latest(
            step=np.array([one["step"] for one in reports], np.int64),
            generation=np.array([one["generation"] for one in reports], np.int64),
            at_s=at_s,
            first_s=at_s,
            tokens=np.array([one.get("tokens", 0) for one in reports], np.int64),
        )
        return _latest(
            step=np.concatenate([self.step, newer.step]),
            generation=np.concatenate([self.generation, newer.generation]),
            at_s=np.concatenate([self.at_s, newer.at_s]),
            first_s=np.concatenate([self.first_s, newer.first_s]),
            tokens=np.concatenate([self.tokens, newer.tokens]),
        )


def _latest(*, step: Numbers, generation: Numbers, at_s: Times, first_s: Times, tokens: Numbers) -> Commits:
    """Return one row for each step: of several reports, the first of the last generation; the least of ``first_s``."""
    if (np.diff(step) > 0).all():  # the usual, which needs no sorting
        return Commits(step=step, generation=generation, at_s=at_s, first_s=first_s, tokens=tokens)
    order = np.lexsort((at_s, -generation, step))  # NaN is last
    rows = np.flatnonzero(np.diff(step[order], prepend=-2))
    first_s = np.fmin.reduceat(first_s[order], rows)
    order = order[rows]
    return Commits(
        step=step[order],
        generation=generation[order],
        at_s=at_s[order],
        first_s=first_s,
        tokens=tokens[order],
    )


@dataclass(slots=True)
class _Reports:
    """Reports of steps by processes with one clock, in the order in which they were read."""

    step: array[int] = field(default_factory=lambda: array("q"))
    generation: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    t_s: array[float] = field(default_factory=lambda: array("d"))

    def add(self, event: JournalEvent) -> None:
        self.step.append(event["step"])
        self.generation.append(event["generation"])
        self.tokens.append(event.get("tokens", 0))
        self.t_s.append(event["t_s"])


class OldReports:
    """Reports of old steps of one job: a few numbers of each are kept."""

    def __init__(self) -> None:
        self._by_clock: dict[str, _Reports] = {}

    def add(self, event: JournalEvent) -> None:
        self._by_clock.setdefault(event["clock"], _Reports()).add(event)

    def commits(self, clock: JobClock) -> Commits:
        """Return the steps, on the job's one clock."""
        if not self._by_clock:
            return NO_COMMITS
        step, generation, tokens = (
            np.concatenate([np.array(getattr(one, name), np.int64) for one in self._by_clock.values()])
            for name in ("step", "generation", "tokens")
        )
        at_s = np.concatenate(
            [clock.all_at_s(name, np.array(one.t_s)) for name, one in self._by_clock.items()]
        )
        return _latest(step=step, generation=generation, at_s=at_s, first_s=at_s, tokens=tokens)


NO_COMMITS = _latest(
    step=np.array([], np.int64),
    generation=np.array([], np.int64),
    at_s=np.array([], np.float64),
    first_s=np.array([], np.float64),
    tokens=np.array([], np.int64),
)
