"""Committed steps out of a journal: losses, pace, and the proof that every sample was used exactly once."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odyssey_megatron.metrics.recoveries import named
from odyssey_megatron.metrics.timeline import JournalEvent, known
from odyssey_megatron.names import step_name

_PROBLEMS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """One optimizer step that took effect, in the last generation in which it was committed."""

    step: int
    generation: int
    losses: dict[str, float]
    """The losses by the names that the user's loss function gives them. The first one is plotted."""
    grad_norm: float | None
    step_s: float | None
    """The time of the committed attempt alone; None if no rank that timed it survived."""
    interval_s: float | None
    """The time since the previous step's commit, with aborted attempts and recovery."""
    committed_wall_s: float
    """The time of the commit, by the first agent's clock."""
    is_left_out: bool = False
    """The step took samples, and trained on none of them: it is one of ``--iterations-to-skip``."""

    @property
    def loss(self) -> float:
        return next(iter(self.losses.values()), math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDifference:
    """How far all named losses of a run are from those of a run without failures."""

    steps: int
    """Number of steps that both runs committed."""
    max_absolute: float
    max_relative: float
    at_step: int
    """The step of ``max_relative``."""
    only_here: tuple[int, ...]
    only_in_reference: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCheck:
    """Invariant I1, checked on what the committed attempts have consumed."""

    samples: int
    first: int
    last: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems and self.samples > 0


def committed_steps(events: Sequence[JournalEvent]) -> tuple[CommittedStep, ...]:
    """Return the committed steps, ascending.

    Several ranks may report a step; the time of its commit is that of the first report.
    """
    latest: dict[int, list[JournalEvent]] = {}
    for event in named(events, "step_committed"):
        reports = latest.setdefault(event["step"], [])
        if reports and event["generation"] > reports[0]["generation"]:
            reports.clear()
        if not reports or event["generation"] == reports[0]["generation"]:
            reports.append(event)
    rows: list[CommittedStep] = []
    for step, reports in sorted(latest.items()):
        at_s = min(known(event["at_s"] for event in reports), default=math.nan)
        took_s = at_s - rows[-1].committed_wall_s if rows and rows[-1].step == step - 1 else math.nan
        rows.append(
            CommittedStep(
                step=step,
                generation=reports[0]["generation"],
                losses=reports[0]["loss"],
                grad_norm=reports[0].get("grad_norm"),
                step_s=max((event["step_s"] for event in reports if event["step_s"] >= 0), default=None),
                interval_s=None if math.isnan(took_s) else took_s,
                committed_wall_s=at_s,
                is_left_out=reports[0].get("num_microbatches") == 0,
            )
        )
    return tuple(rows)


def loss_difference(run: Sequence[CommittedStep], reference: Sequence[CommittedStep]) -> LossDifference:
    """Return the difference over the steps that both committed. NaN in only one of them is an infinite difference."""
    ours, theirs = ({row.step: row.losses for row in rows} for rows in (run, reference))
    absolute: dict[int, float] = {}
    relative: dict[int, float] = {}
    for step in sorted(set(ours) & set(theirs)):
        gaps = [
            _gap(ours[step].get(name, math.nan), theirs[step].get(name, math.nan))
            for name in sorted(ours[step].keys() | theirs[step].keys())
        ]
        absolute[step] = max((gap for gap, _ in gaps), default=0.0)
        relative[step] = max((gap for _, gap in gaps), default=0.0)
    return LossDifference(
        steps=len(absolute),
        max_absolute=max(absolute.values(), default=0.0),
        max_relative=max(relative.values(), default=0.0),
        at_step=max(relative, key=lambda step: relative[step], default=-1),
        only_here=tuple(sorted(set(ours) - set(theirs))),
        only_in_reference=tuple(sorted(set(theirs) - set(ours))),
    )


def _gap(ours: float, theirs: float) -> tuple[float, float]:
    """Return the absolute and the relative difference."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0, 0.0
    gap = abs(ours - theirs)
    return (math.inf, math.inf) if math.isnan(gap) else (gap, gap / max(abs(theirs), 1e-300))


def check_samples(events: Sequence[JournalEvent], steps: Sequence[CommittedStep]) -> SampleCheck:
    """Check that the samples of the committed steps, in order of step and microbatch, are consecutive.

    An aborted attempt may have fetched samples, too. What counts is the last generation, up to that of the
    commit, that fetched any for the step. (A step that was agreed on before the failure is finished and not
    redone, so its commit may carry a later generation than its samples.) The samples of a step that is left
    out are missing.
    """
    problems: list[str] = []
    runs = [array("q")]
    fetched: dict[int, list[JournalEvent]] = {}
    for event in named(events, "samples"):
        fetched.setdefault(event["step"], []).append(event)
    for before, row in zip((None, *steps), steps, strict=False):
        if before is not None and row.step != before.step + 1:
            problems.append(f"iterations {before.step + 2} to {row.step} were never committed")
        if row.is_left_out:
            runs.append(array("q"))
            continue
        attempts = [one for one in fetched.get(row.step, ()) if one["generation"] <= row.generation]
        if not attempts:
            problems.append(f"{step_name(row.step)}: no samples in the journal")
            continue
        newest = max(one["generation"] for one in attempts)
        counted = [one for one in attempts if one["generation"] == newest]
        runs[-1].extend(_one_step(row.step, counted, problems))
    consumed = np.concatenate([np.array(run, np.int64) for run in runs])
    expected = np.concatenate([np.arange(len(run)) + (run[0] if run else 0) for run in runs])
    wrong = np.flatnonzero(expected != consumed)
    if again := np.count_nonzero(np.diff(np.sort(consumed)) == 0):
        problems.append(f"{again} samples were used more than once")
    if len(wrong):
        want, got = expected[wrong[0]], consumed[wrong[0]]
        problems.append(f"sample {got} stands where {want} should ({len(wrong)} out of place)")
    return SampleCheck(
        samples=len(consumed),
        first=int(consumed.min()) if len(consumed) else -1,
        last=int(consumed.max()) if len(consumed) else -1,
        problems=_shortened(problems),
    )


def _one_step(step: int, events: list[JournalEvent], problems: list[str]) -> list[int]:
    by_microbatch: dict[int, list[int]] = {}
    for event in events:
        for microbatch, samples in zip(event["microbatches"], event["samples"], strict=True):
            if microbatch in by_microbatch:
                problems.append(f"{step_name(step)}: microbatch {microbatch} was used twice")
            by_microbatch[microbatch] = list(samples)
    if sorted(by_microbatch) != list(range(len(by_microbatch))):
        problems.append(f"{step_name(step)}: microbatches {sorted(by_microbatch)} are not 0, 1, 2, …")
    return [sample for _, samples in sorted(by_microbatch.items()) for sample in samples]


def _shortened(problems: list[str]) -> tuple[str, ...]:
    if len(problems) <= _PROBLEMS_SHOWN:
        return tuple(problems)
    return (*problems[:_PROBLEMS_SHOWN], f"… and {len(problems) - _PROBLEMS_SHOWN} more")
