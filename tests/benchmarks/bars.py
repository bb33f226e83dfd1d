"""Bars that a benchmark must clear, and how every benchmark prints its result.

    bars = [at_most("detect_ms", median(detect_ms), 50), at_least("restart_over_stall", ratio, 20)]
    sys.exit(finish({"ranks": 8, "kills": 12, "detect_ms": summarize(detect_ms)}, bars, as_json=args.json))

The JSON is one object on the last line of stdout, with ``"bars": [{"name", "value", "bar", "ok"}]`` last.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from odyssey_megatron.metrics.steps import CommittedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One measured value beside the value that it is held to. The unit is in the name."""

    name: str
    value: float
    bar: str
    ok: bool


def at_most(name: str, value: float, limit: float) -> Bar:
    """NaN does not clear a bar."""
    return Bar(name=name, value=value, bar=f"<= {limit:g}", ok=value <= limit)


def at_least(name: str, value: float, limit: float) -> Bar:
    return Bar(name=name, value=value, bar=f">= {limit:g}", ok=value >= limit)


def kept(name: str, healthy_s: float, step_s: float, proved_s: float, alive: float, within: float) -> Bar:
    """What is left of a healthy step's rate, beside the share ``alive`` of workers: 0.985 of it, or where that is less,
    what a step comes to that is ``within`` times the least that is proved.
    """
    return at_least(name, healthy_s / step_s, min(0.985 * alive, healthy_s / (within * proved_s)))


def exactly(name: str, value: float, wanted: float) -> Bar:
    return Bar(name=name, value=value, bar=f"== {wanted:g}", ok=value == wanted)


def taken(value: float | None, what: str) -> float:
    """``value``, which was measured. Raises RuntimeError if it was not: nothing stands in for a measurement."""
    if value is None or math.isnan(value):
        raise RuntimeError(f"{what} was not measured, so this benchmark says nothing")
    return value


def largest_difference(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float:
    """Relative to ``theirs``. Infinite where there is nothing to compare, or where a number is missing (also at the
    end), NaN or infinite, on both sides, too: such a run is not known to be the same.
    """
    if not theirs or len(ours) != len(theirs):
        return math.inf
    return max(_difference(one, other) for one, other in zip(ours, theirs, strict=True))


def _difference(one: float | None, other: float | None) -> float:
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(other), 1e-300)


def norm_difference(ours: Sequence[CommittedStep], theirs: Sequence[CommittedStep]) -> float:
    """:func:`largest_difference` of the gradient norms of the steps of ``ours``."""
    known = {step.step: step.grad_norm for step in theirs}
    return largest_difference([step.grad_norm for step in ours], [known.get(step.step) for step in ours])


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Median and spread: a median alone hides the tail."""
    if not values:
        return {"count": 0, "median": math.nan, "min": math.nan, "max": math.nan}
    return {
        "count": len(values),
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def finish(measurements: Mapping[str, Any], bars: Sequence[Bar], *, as_json: bool) -> int:
    """Prints everything; the exit code is 1 if a bar is missed, or if there was none."""
    machine = {"cpus": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 2)}
    if as_json:
        printed = {**measurements, "machine": machine, "bars": [asdict(bar) for bar in bars]}
        # JSON has no NaN, though Python writes one: what was not measured is null.
        print(json.dumps(json.loads(json.dumps(printed), parse_constant=lambda _: None)))
    else:
        for name, value in {**measurements, "machine": machine}.items():
            print(f"{name}: {value}")
        for bar in bars:
            print(f"{'ok    ' if bar.ok else 'MISSED'} {bar.name} = {bar.value:.4g} ({bar.bar})")
    return 0 if bars and all(bar.ok for bar in bars) else 1
