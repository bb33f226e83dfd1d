"""Finding processes that do not get their processor: work takes its usual CPU time, but longer on the wall.

By the CPU time of its thread such a worker is as fast as others; and by wall time each worker on a busy machine is slow
now and then. So wall time is divided by CPU time, step by step, and compared with the other workers' ratios in the same
step (what all have in common is the machine's), and with the worker's own before. Time that ranks wait for cores which
they share does not count (``execute/timing.py``): as soon as one rank is slow, others compute beside different ranks
than before, and wait for another length of time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from odyssey_megatron.diagnosis.change import FALSE_ALARM_STEPS, LevelShift, noise, raised
from odyssey_megatron.diagnosis.timings import Floats
from odyssey_megatron.diagnosis.verdicts import LEAST_STEPS, SLOW_WORKER, Diagnosis, Verdict, lower_median

LEAST_FACTOR = 1.5
"""The factor that is looked for, so that twice the time is found for certain. Less is lost in a machine's noise."""
_BEFORE = 3
"""The number of measured steps in which a worker must have been as usual before it is called slow: other workers alone
are no measure for it."""


@dataclass(frozen=True, slots=True)
class HeldUp:
    """A worker's time of computing in a step, by two clocks: its thread's CPU time, and wall time."""

    step: int
    worker: int
    computed_s: float
    wall_s: float


def with_held_up(diagnosis: Diagnosis, rows: Iterable[HeldUp], known: Collection[int]) -> Diagnosis:
    """Return ``diagnosis`` with the workers that are slow by wall time.

    ``known`` are those that were so in the diagnosis before.
    """
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


def _shift(own: Floats, usual: float, *, is_known: bool) -> LevelShift | None:
    """Return the shift in a worker's log ratios ``own``; None if there is none.

    ``is_known``: the worker was slow before, perhaps for the whole window, so that it is compared with others only.
    """
    least = math.log(LEAST_FACTOR)
    if len(own) < LEAST_STEPS:
        return None
    scale = max(usual, noise([own]))
    shift = raised(
        own - float(np.median(own)), scale, least
    )  # works as long as most of the window is from before the shift
    if shift is not None and shift.since >= _BEFORE:
        before = float(np.median(own[: shift.since]))
        found = raised(own - before, scale, least)
        return found if found is not None and found.log_ratio >= least else None
    if is_known:
        shift = raised(own - min(float(np.quantile(own, 0.1)), least), scale, least)
        return shift if shift is not None and shift.log_ratio >= least / 2 else None
    return None


def _with(
    diagnosis: Diagnosis, worker: int, shift: LevelShift, steps: list[int], latest: float | None
) -> Diagnosis:
    """Return ``diagnosis`` with a verdict on ``worker``, with both factors if its CPU time is slow as well."""
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
