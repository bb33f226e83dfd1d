"""From times to verdicts with evidence, which tell apart slow workers, uneven stages, uneven sequences and all slower.

History in, verdicts out: no state, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from odyssey_megatron.diagnosis.change import FALSE_ALARM_STEPS, RECENT, noise, raised
from odyssey_megatron.diagnosis.fit import Fit, fit
from odyssey_megatron.diagnosis.links import Links
from odyssey_megatron.diagnosis.steps import StepTimes
from odyssey_megatron.diagnosis.timings import Floats, TimedWork, Timings, medians, within

SLOW_WORKER, UNEVEN_STAGE = "slow worker", "uneven stage"
_MUCH = 1.1
"""A stage is uneven if it takes at least this many times as long as the others; with less there is little to win."""
_UNEVEN_SEQUENCES = 0.05
"""The least relative spread between microbatches, beyond what the model explains, that gives a verdict."""
_SAME_CAUSE = 0.9
"""The least correlation of microbatches' forwards and backwards that shows sequences as the cause: both take longer for
a longer sequence. Source: ByteDance's what-if study, arXiv 2505.05713."""
LEAST_STEPS = 3
"""The least number of steps for any verdict."""
_NOBODY: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One thing that makes the job slower."""

    kind: str
    """``slow worker``, ``slow node``, ``uneven stage``, ``uneven sequences`` or ``all slower``."""
    worker: int = -1
    ranks: tuple[int, ...] = ()
    """The ranks of a cell for which its other ranks wait, if they are known."""
    node: int = -1
    layers: tuple[int, int] = (-1, -1)
    factor: float = 1.0
    """Time taken, relative to what it should be."""
    since: int = -1
    """The first slow step."""
    found: int = -1
    """The step that made the verdict certain."""
    evidence: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Diagnosis:
    """The result of a window of steps."""

    def __deepcopy__(self, memo: object) -> Diagnosis:
        """Return itself, as nothing of it changes."""
        return self

    verdicts: tuple[Verdict, ...] = ()
    costs: Mapping[TimedWork, tuple[float, float]]
    """Cost of each piece on a healthy worker; see ``Fit.costs``."""
    factors: Mapping[int, float] = field(default_factory=dict)
    """Worker -> its time relative to the same work elsewhere, by its last measured steps."""
    latest: Mapping[int, float] = field(default_factory=dict)
    """As ``factors``, by the newest step alone."""
    newest: int = -1
    """The newest measured step; -1: none."""
    links: Links = field(default_factory=Links)
    sums: Links = field(default_factory=Links)
    """The diagnosis of gradient sums, over workers that hold the same layers."""
    took: StepTimes = field(default_factory=StepTimes)
    held_up: frozenset[int] = frozenset()
    """The slow workers that do not get their processor."""
    expert_loads: Mapping[int, float] = field(default_factory=dict)
    """Number of ranks of a gang -> tokens of its busiest rank (``cluster/expert_loads.py``)."""

    @property
    def slow(self) -> dict[int, float]:
        """Slow worker -> its speed; 1.0 is healthy."""
        return {v.worker: 1 / v.factor for v in self.verdicts if v.kind == SLOW_WORKER}


def diagnose(
    timings: Timings,
    known: Mapping[TimedWork, tuple[float, float]] | None = None,
    slower: Mapping[int, float] = _NOBODY,
) -> Diagnosis:
    """Return what makes the steps of ``timings`` slower than they need to be.

    Args:
        known: costs of pieces that only slow workers have computed, so that no healthy one can tell.
        slower: ``Diagnosis.slow`` of the diagnosis before.
    """
    if not timings.workers:
        return Diagnosis(costs={})
    much = [worker for worker, speed in slower.items() if speed * _MUCH <= 1.0]
    found = fit(timings, known, much)
    if len(timings.steps) < LEAST_STEPS:
        return Diagnosis(costs=_healthy_costs(timings, found, ()))
    series = _series(timings, found)
    common = _common(series, np.isin(timings.workers, much))
    apart = series - common
    slow = _slow_workers(timings, apart)
    found = replace(found, costs=_healthy_costs(timings, found, {one.worker for one in slow}))
    verdicts = [
        *slow,
        *_uneven_stages(timings, found, {one.worker: one.factor for one in slow}),
        *_uneven_sequences(timings, found),
        *_all_slower(timings, common),
    ]
    recent = zip(timings.workers, (row[~np.isnan(row)][-RECENT:] for row in apart), strict=True)
    return Diagnosis(
        verdicts=tuple(verdicts),
        costs=found.costs,
        factors={worker: math.exp(float(np.median(row))) for worker, row in recent if len(row)},
        latest={
            worker: math.exp(float(value))
            for worker, value in zip(timings.workers, apart[:, -1], strict=True)
            if not math.isnan(value)
        },
        newest=timings.steps[-1],
    )


def slow_nodes(slow: Mapping[int, float], nodes: Mapping[int, int]) -> list[Verdict]:
    """Return a verdict on each node all of whose workers are slow: then something that they share is the cause.

    Args:
        slow: slow worker -> its speed.
        nodes: the node of each living worker.
    """
    on = dict[int, list[int]]()
    for worker, node in nodes.items():
        on.setdefault(node, []).append(worker)
    found = []
    for node, workers in on.items():
        if 1 < len(workers) < len(nodes) and slow.keys() >= set(workers):
            factor = 1 / max(slow[worker] for worker in workers)
            evidence = f"all {len(workers)} workers of node {node} take at least {factor:.2f} times as long as others"
            found.append(Verdict(kind="slow node", node=node, factor=factor, evidence=evidence))
    return found


def _series(timings: Timings, found: Fit) -> Floats:
    """Return the log of each worker's time over what the same work takes elsewhere, for each step.

    All of a worker's work in a step counts together: one that is slow in its forwards alone, as with samples that come
    late, makes steps longer as well. For one piece the median counts, weighted by the piece's cost. Work that all ranks
    do alike only counts if there was nothing else.

    Returns:
        Shape [workers, steps]; NaN where a worker did nothing.
    """
    steps, pieces = len(timings.steps), max(1, len(timings.pieces))
    each = timings.by_worker_and_step * pieces + timings.piece
    groups, log_ratio = medians(found.log_ratio, each)
    costs_s = timings.count * timings.seconds * np.exp(-found.log_ratio)
    cost_s = np.bincount(np.searchsorted(groups, each), costs_s)
    of_worker, size = groups // pieces, len(timings.workers) * steps
    is_layers = np.array([piece.last > piece.first for piece in timings.pieces])[groups % pieces]
    has_layers = np.bincount(of_worker, is_layers, size) > 0
    cost_s *= is_layers | ~has_layers[of_worker]
    took_s = np.bincount(of_worker, cost_s * np.exp(log_ratio), size)
    with np.errstate(invalid="ignore"):
        return np.log(took_s / np.bincount(of_worker, cost_s, size)).reshape(-1, steps)


def _common(series: Floats, is_slow: NDArray[np.bool_]) -> Floats:
    """Return, for each step, what all workers have in common, which is nobody's fault: the lower median.

    So of two workers one may be slow. Workers that are known to be slow do not count, unless there are no others in the
    step. ``series`` has the shape [workers, steps], and ``is_slow`` [workers].
    """
    others = np.where(is_slow[:, None], np.nan, series)
    nobody = np.isnan(others).all(axis=0)
    return np.array([lower_median(column) for column in np.where(nobody, series, others).T])


def _healthy_costs(
    timings: Timings, found: Fit, slow: Collection[int]
) -> dict[TimedWork, tuple[float, float]]:
    """Return the costs by the median of all workers that are not slow, where the fit went by the faster half."""
    healthy = ~np.isin(np.array(timings.workers)[timings.worker], list(slow))
    pieces, levels = medians(found.log_ratio[healthy], timings.piece[healthy])
    factors = dict(zip(pieces.tolist(), np.exp(levels).tolist(), strict=True))
    return {
        piece: (alpha * factors.get(index, 1.0), beta * factors.get(index, 1.0))
        for index, (piece, (alpha, beta)) in enumerate(found.costs.items())
    }


def lower_median(values: Floats) -> float:
    there = np.sort(values[~np.isnan(values)])
    return float(there[(len(there) - 1) // 2])


def _slow_workers(timings: Timings, series: Floats) -> list[Verdict]:
    there = [~np.isnan(row) for row in series]
    usual = noise([row[at] for row, at in zip(series, there, strict=True)])
    verdicts = []
    for worker, row, at in zip(timings.workers, series, there, strict=True):
        scale = max(usual, noise([row[at]]))
        shift = raised(row[at], scale)
        if shift is None or shift.log_ratio <= 0:
            continue
        steps = [step for step, is_there in zip(timings.steps, at, strict=True) if is_there]
        verdicts.append(
            Verdict(
                kind=SLOW_WORKER,
                worker=worker,
                factor=math.exp(shift.log_ratio),
                since=steps[shift.since],
                found=steps[shift.found],
                evidence=(
                    f"takes {math.exp(shift.log_ratio):.2f} times as long as its work does elsewhere, since step "
                    f"{steps[shift.since]}; a step is known to {scale:.1%}, false alarms are at least "
                    f"{FALSE_ALARM_STEPS:.0e} measured steps apart"
                ),
            )
        )
    return verdicts


def _uneven_stages(timings: Timings, found: Fit, slow: Mapping[int, float]) -> list[Verdict]:
    """Return a verdict on the most expensive stage of the last step, if it is uneven, and all pipelines are cut alike.

    Slow workers are not the cause, since costs are those of healthy ones. Nor is a stage uneven if the others are
    shorter on purpose, as all of their workers are slow: ``slow`` has the factors. If workers are visited more than
    once, a stage is all that the same workers compute.
    """
    spans: dict[tuple[int, int], float] = {}
    on: dict[tuple[int, int], set[int]] = {}
    last = timings.step == len(timings.steps) - 1
    for index in np.unique(timings.piece[last]).tolist():
        piece = timings.pieces[index]
        if piece.last > piece.first:
            span = piece.first, piece.last
            spans[span] = spans.get(span, 0.0) + found.costs[piece][0]
            on.setdefault(span, set()).update(timings.worker[last & (timings.piece == index)].tolist())
    if len(spans) < 2 or any(one[1] > other[0] for one, other in pairwise(sorted(spans))):
        return []
    stages: dict[tuple[int, int], float] = {}
    takes: dict[tuple[int, int], float] = {}  # on the fastest of its workers
    for own in {frozenset(workers) for workers in on.values()}:
        visits = [span for span in spans if on[span] == own]
        stage = max(visits, key=lambda one: (spans[one], one))
        stages[stage] = sum(spans[one] for one in visits)
        takes[stage] = stages[stage] * min(slow.get(worker, 1.0) for worker in own)
    if len(stages) < 2:
        return []
    (dearest, most), *rest = sorted(stages.items(), key=lambda one: (-one[1], one[0]))
    others = float(np.median([takes[stage] for stage, _ in rest]))
    if others <= 0 or most < _MUCH * others:
        return []
    alone = any((piece.first, piece.last) == dearest for piece in found.alone)
    who = "on its only worker" if alone else "on all of its workers"
    return [
        Verdict(
            kind=UNEVEN_STAGE,
            layers=dearest,
            factor=most / others,
            evidence=f"takes {most / others:.2f} times as long as the other stages, {who}",
        )
    ]


def _uneven_sequences(timings: Timings, found: Fit) -> list[Verdict]:
    """Return a verdict if microbatches differ more than the model explains, and alike in both directions."""
    rest = found.log_ratio
    for groups in (timings.by_worker_and_piece, timings.by_worker_and_step):
        rest = rest - within(rest, groups)
    spread = 1.4826 * float(np.median(np.abs(rest)))
    if spread < _UNEVEN_SEQUENCES:
        return []
    seen: dict[tuple[int, int, int], list[float]] = {}
    rows = zip(timings.worker.tolist(), timings.step.tolist(), timings.microbatch.tolist(), rest, strict=True)
    for worker, step, microbatch, value in rows:
        if microbatch >= 0:
            seen.setdefault((worker, step, microbatch), []).append(float(value))
    pairs = np.array([both[:2] for both in seen.values() if len(both) >= 2])
    together = float(np.corrcoef(pairs.T)[0, 1]) if len(pairs) > 2 else 0.0
    return [_uneven(spread, together)] if together >= _SAME_CAUSE else []


def with_uneven_sequences(diagnosis: Diagnosis, rows: Collection[tuple[int, float, float]]) -> Diagnosis:
    """Return ``diagnosis`` with uneven sequences, by what ranks have seen of their own microbatches.

    It is used if the times of each microbatch are not known. ``rows`` are (step, relative spread between microbatches,
    correlation of forwards and backwards).
    """
    steps = sorted({step for step, *_ in rows})[-RECENT:]
    if len(steps) < LEAST_STEPS:
        return diagnosis
    recent = np.array([(spread, together) for step, spread, together in rows if step in steps])
    spread, together = (float(one) for one in np.median(recent, axis=0))
    if spread < _UNEVEN_SEQUENCES or together < _SAME_CAUSE:
        return diagnosis
    return replace(diagnosis, verdicts=(*diagnosis.verdicts, _uneven(spread, together)))


def _uneven(spread: float, together: float) -> Verdict:
    return Verdict(
        kind="uneven sequences",
        factor=math.exp(spread),
        evidence=(
            f"microbatches of the same work differ by {spread:.0%}; forward and backward of each do so alike "
            f"(correlation {together:.2f})"
        ),
    )


def _all_slower(timings: Timings, common: Floats) -> list[Verdict]:
    usual = float(np.quantile(common, 0.25))
    shift = raised(common - usual, noise([common]))
    if shift is None or shift.log_ratio <= 0:
        return []
    return [
        Verdict(
            kind="all slower",
            factor=math.exp(shift.log_ratio),
            since=timings.steps[shift.since],
            found=timings.steps[shift.found],
            evidence=f"all workers alike take {math.exp(shift.log_ratio):.2f} times as long as before",
        )
    ]
