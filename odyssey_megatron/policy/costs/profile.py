"""The costs of a job: estimated before it runs, and corrected by what it measures."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from odyssey_megatron.codec import from_json, to_json
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import COUNT, Between, read_text
from odyssey_megatron.plan.costs import COST_S, Costs

MAX_LAYERS = 1002
"""The most layers in a profile; the deepest model that was planned for has 128 transformer layers."""
OPERATIONS = Annotated[float, Between(0, 1e30)]
_LEAST_S = 1e-9
"""The least time of all layers for one microbatch: clocks are not finer, and a rate is one over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Times that a running job measured: one microbatch through layers ``[first, last)``, in seconds."""

    first: int
    last: int
    samples: int
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    step: int = -1
    """The step of which the times are medians; -1: of several steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of the job and of changing its layout."""

    costs: Costs
    source: str = "estimated"
    """``estimated`` (from FLOPs), ``measured``, or ``fitted``: estimated by what runs of other sizes have measured."""
    samples: Annotated[int, COUNT] = 0
    """Number of microbatches behind the measured times."""
    detect_s: COST_S = 0.02
    """Time from a death to the decision's start. Measured: 12 ms with 8 ranks, whose agent hears it by pidfd."""
    group_build_s: COST_S = 0.1
    """Time for abort, agreement and new groups, which every change of membership costs."""
    restart_s: Annotated[float, Between(0, 1e9)] = 300.0
    """Time of a restart from a checkpoint, with the work lost since: what losing a layer's last holder costs. The
    default is between Megatron-LM's 80 s with 32 GPUs and 300 s with 1,024, as TrainMover (OSDI 2026) has measured, and
    minutes of lost steps.
    """
    operations: tuple[tuple[OPERATIONS, OPERATIONS, OPERATIONS], ...] = ()
    """For each layer, one rank's FLOPs for forward, input gradient and weight gradient of a microbatch, as estimates
    count them, whatever time they take; for the embedding, bytes. From them ``odyssey plan --fit`` learns what a GPU
    achieves. Empty: not known.
    """

    @property
    def without_messages(self) -> Profile:
        """The same profile for plans that keep no messages."""
        return replace(self, costs=replace(self.costs, keeps_messages=False))

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, all of it or nothing. Raises OSError."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            unfinished.write_text(to_json(self) + "\n")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def load_profile(path: str | Path) -> Profile:
    """Read what :meth:`Profile.save` wrote; if ``path`` is a run's folder, the profile in it.

    Raises:
        ConfigError: it is missing, or not a profile.
    """
    if os.path.isdir(path):  # where Path.is_dir raises OSError for a name that is too long
        path = Path(path) / "profile.json"
    try:
        return _plausible(from_json(Profile, read_text(path)))
    except ValueError as error:
        raise ConfigError(
            f"the profile {path}: {error}. Give a profile.json that a run has written."
        ) from error


def _plausible(profile: Profile) -> Profile:
    """Return ``profile`` if plans can be made with it. Raises ValueError."""
    layers = profile.costs.layers
    if not 3 <= len(layers) <= MAX_LAYERS:
        raise ValueError(
            f"it has {len(layers)} layer(s), and embedding, transformer layers and head are 3 to {MAX_LAYERS:,}"
        )
    if len(profile.operations) not in (0, len(layers)):
        raise ValueError(f"it counts the FLOPs of {len(profile.operations)} layers, and has {len(layers)}")
    total_s = sum(layer.compute_s for layer in layers)
    if total_s < _LEAST_S:
        raise ValueError(
            f"its layers take {total_s:g} s for a microbatch, and at least {_LEAST_S:g} s is expected"
        )
    return profile


_PRIOR_WEIGHT = 1e-3
"""Weight of the scaled prior relative to one mean observation: it decides only what nobody measured."""

_LEAST_SHARE = 0.1
"""Fraction of its scaled prior that a transformer layer takes at least. Where spans of few sizes were measured, and
noise says that the longer one takes less, all time would otherwise go to the embedding or the head, and none to the
layers between.
"""

_SPREAD = 0.1
"""If a span's time differs by more than this from what shared layer costs explain, its layers get their own."""

_KINDS = ("forward_s", "input_grad_s", "weight_grad_s")


def calibrate(profile: Profile, observations: Sequence[Observation]) -> Profile:
    """Return ``profile`` with layer times fitted to what was measured; bytes and links stay.

    For each kind of work the unknowns are the times of the embedding, of one transformer layer of each size, and of the
    head. They are found by non-negative least squares on the spans, weighted by samples and pulled weakly to the old
    times (scaled, since an estimate may be off by a common factor). If a span still deviates by more than 10 %, the
    deviation goes to its own layers. Deterministic; without observations the result is ``profile`` itself.
    """
    useful = [one for one in observations if one.samples > 0 and one.last > one.first]
    if not useful:
        return profile
    times = {kind: _fit(profile.costs, useful, kind) for kind in _KINDS}
    layers = tuple(
        replace(
            layer,
            forward_s=times["forward_s"][i],
            input_grad_s=times["input_grad_s"][i],
            weight_grad_s=times["weight_grad_s"][i],
        )
        for i, layer in enumerate(profile.costs.layers)
    )
    return replace(
        profile,
        costs=replace(profile.costs, layers=layers),
        source="measured",
        samples=sum(one.samples for one in useful),
    )


def _fit(costs: Costs, observations: Sequence[Observation], kind: str) -> list[float]:
    """Return the seconds of each layer for one ``kind`` of work."""
    prior = [float(getattr(layer, kind)) for layer in costs.layers]
    total = sum(one.samples for one in observations)
    weights = [one.samples / total for one in observations]
    seen = [max(0.0, float(getattr(one, kind))) for one in observations]
    expected = [sum(prior[one.first : one.last]) for one in observations]
    explained = sum(w * e for w, e in zip(weights, expected, strict=True))
    measured = sum(w * s for w, s in zip(weights, seen, strict=True))
    if explained > 0:
        prior = [value * measured / explained for value in prior]
    last = len(prior) - 1
    alike: dict[int, list[int]] = {}
    for layer in range(1, last):  # layers of one size share their time: those with experts, and those without
        alike.setdefault(costs.layers[layer].weight_bytes, []).append(layer)
    groups = [[0], *alike.values(), [last]] if last > 1 else [[i] for i in range(len(prior))]
    start = [sum(prior[i] for i in group) / len(group) for group in groups]
    counts = [
        [float(sum(one.first <= layer < one.last for layer in group)) for group in groups]
        for one in observations
    ]
    least = [
        0.0 if group[0] in (0, last) else _LEAST_SHARE * value
        for group, value in zip(groups, start, strict=True)
    ]
    shared = least_squares(counts, seen, weights, start, least)
    fitted = [0.0] * len(prior)
    for group, value in zip(groups, shared, strict=True):
        for layer in group:
            fitted[layer] = value
    return _spread(fitted, observations, seen)


def least_squares(
    rows: list[list[float]],
    seen: list[float],
    weights: list[float],
    start: list[float],
    least: list[float] | None = None,
) -> list[float]:
    """Return the argmin over x >= least, or 0, of sum w (row x - seen)^2 + prior weight * |x - start|^2. ``seen`` and
    ``start`` should be about as large.
    """
    # Imported here, so that a profile can be read without SciPy.
    from scipy.optimize import nnls

    if least is not None:
        above = [
            value - sum(n * x for n, x in zip(row, least, strict=True))
            for row, value in zip(rows, seen, strict=True)
        ]
        found = least_squares(rows, above, weights, [a - b for a, b in zip(start, least, strict=True)])
        return [a + b for a, b in zip(found, least, strict=True)]
    unit = max(*seen, *start) or 1.0  # the solver's tolerance is absolute
    pull = math.sqrt(_PRIOR_WEIGHT)
    left = [[math.sqrt(w) * value for value in row] for row, w in zip(rows, weights, strict=True)]
    left += [[pull * (j == k) for k in range(len(start))] for j in range(len(start))]
    right = [math.sqrt(w) * value / unit for value, w in zip(seen, weights, strict=True)]
    right += [pull * value / unit for value in start]
    return [float(value) * unit for value in nnls(left, right)[0]]


def _spread(fitted: list[float], observations: Sequence[Observation], seen: list[float]) -> list[float]:
    """Scale the layers of spans that the shared costs explain badly; overlapping spans count by their samples."""
    factors = [[0.0, 0.0] for _ in fitted]
    for one, value in zip(observations, seen, strict=True):
        model = sum(fitted[one.first : one.last])
        ratio = value / model if model > 0 else 1.0
        ratio = ratio if abs(ratio - 1) > _SPREAD else 1.0
        for layer in range(one.first, one.last):
            factors[layer][0] += ratio * one.samples
            factors[layer][1] += one.samples
    return [
        value * (total / samples if samples else 1.0)
        for value, (total, samples) in zip(fitted, factors, strict=True)
    ]
