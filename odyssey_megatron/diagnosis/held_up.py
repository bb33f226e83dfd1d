"""Processes that do not get their processor: what they compute takes its usual time of it, and longer on the wall.

By the time of its own thread such a worker is as fast as others; and by the clock on the wall each of several on a
busy machine is slow now and then. So the one is divided by the other, step by step, and compared with what others
have in the same step (what all have in common is the machine's), and with what the worker itself has had before. What
ranks wait for cores that they share is not in it (``execute/timing.py``): as soon as one of them is slow, others
compute beside other ones than before, and wait for them for another time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from odyssey_megatron.diagnosis.change import FALSE_ALARM_STEPS, Shift, noise, raised
from odyssey_megatron.diagnosis.timings import Floats
from odyssey_megatron.diagnosis.verdicts import LEAST_STEPS, SLOW_WORKER, Diagnosis, Verdict, lower_median

LEAST_FACTOR = 1.5
"""That is looked for, so that it is found for certain from twice the time on: in a machine's noise less is nothing."""
_BEFORE = 3
"""So many measured steps must have been as usual, of the one that is called slow: others are no measure of it."""


@dataclass(frozen=True, slots=True)
class HeldUp:
    """What a worker has computed in a step, by two clocks."""

    step: int
    worker: int
    computed_s: float
    wall_s: float


def with_held_up(diagnosis: Diagnosis, rows: Iterable[HeldUp], known: Collection[int]) -> Diagnosis:
    """``diagnosis``, with those who are slow by the wall. ``known``: whom the one before has called so."""
    rows = [one for one in rows if one.computed_s > 0 and one.wall_s > 0]
    steps, workers = sorted({one.step for one in rows}), sorted({one.worker for one in rows})
    if len(steps) < LEAST_STEPS or len(workers) < 2:
        return diagnosis
    series = np.full((len(workers), len(steps)), np.nan)
    for one in rows:
        at = workers.index(one.worker), steps.index(one.step)
        series[at] = math.log(max(1.0, one.wall_s / one.computed_s))
    common = np.array([lower_median(column) for column in series.T])
    apart = series - common
    usual = noise([row[~np.isnan(row)] for row in apart])
    for worker, row in zip(workers, apart, strict=True):
        there = ~np.isnan(row)
        shift = _shift(row[there], usual, is_known=worker in known)
        if shift is not None:
            own = [step for step, is_there in zip(steps, there, strict=True) if is_there]
            latest = float(row[-1]) if there[-1] else None
            diagnosis = _with(diagnosis, worker, shift, own, latest)
    return _with_all_slower(diagnosis, common, steps)


def _shift(own: Floats, usual: float, *, is_known: bool) -> Shift | None:
    """``is_known``: from before the window, perhaps, in which it has then nothing to be compared with but others."""
    least = math.log(LEAST_FACTOR)
    if len(own) < LEAST_STEPS:
        return None
    scale = max(usual, noise([own]))
    shift = raised(
        own - float(np.median(own)), scale, least
    )  # found before most of the window is from after it
    if shift is not None and shift.since >= _BEFORE:
        before = float(np.median(own[: shift.since]))
        found = raised(own - before, scale, least)
        return found if found is not None and found.log_ratio >= least else None
    if is_known:
        shift = raised(own - min(float(np.quantile(own, 0.1)), least), scale, least)
        return shift if shift is not None and shift.log_ratio >= least / 2 else None
    return None


def _with(
    diagnosis: Diagnosis, worker: int, shift: Shift, steps: list[int], latest: float | None
) -> Diagnosis:
    """A worker that is slow by its own time as well is slow by both together."""
    before = next((one for one in diagnosis.verdicts if one.worker == worker), None)
    held = math.exp(shift.log_ratio)
    factor = held * (before.factor if before else 1.0)
    evidence = (
        f"computes for 1/{held:.2f} of the time that it takes on the wall, beside others and itself before step "
        f"{steps[shift.since]}: its process does not get its processor; false alarms are at least "
        f"{FALSE_ALARM_STEPS:.0e} measured steps apart"
    )
    verdict = Verdict(
        kind=SLOW_WORKER,
        worker=worker,
        factor=factor,
        since=steps[shift.since],
        found=max(steps[shift.found], before.found if before else -1),
        evidence=f"{before.evidence}; {evidence}" if before else evidence,
    )
    factors = {**diagnosis.factors, worker: held * diagnosis.factors.get(worker, 1.0)}
    newest = dict(diagnosis.latest)
    if latest is not None:
        newest[worker] = math.exp(latest) * newest.get(worker, 1.0)
    others = tuple(one for one in diagnosis.verdicts if one is not before)
    return replace(
        diagnosis,
        verdicts=(verdict, *others),
        factors=factors,
        latest=newest,
        held_up=diagnosis.held_up | {worker},
    )


def _with_all_slower(diagnosis: Diagnosis, common: Floats, steps: list[int]) -> Diagnosis:
    usual = float(np.quantile(common, 0.25))
    shift = raised(common - usual, noise([common]), math.log(LEAST_FACTOR))
    if shift is None or shift.log_ratio < math.log(LEAST_FACTOR) / 2:
        return diagnosis
    verdict = Verdict(
        kind="all slower",
        factor=math.exp(shift.log_ratio),
        since=steps[shift.since],
        found=steps[shift.found],
        evidence=(
            f"all workers alike get their processors for {math.exp(shift.log_ratio):.2f} times less than before: the "
            "machine is busy with something else"
        ),
    )
    return replace(diagnosis, verdicts=(*diagnosis.verdicts, verdict))
