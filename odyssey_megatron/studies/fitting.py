"""What a GPU and its links achieve, fitted to what runs have measured: for models and sizes that no run has had.

A layer takes a fixed time for a microbatch, and a time for each FLOP. This is a line for each kind of work (forward,
input gradient, weight gradient) of transformer layers, and others for embedding and head. One run is one point on each
line, which then goes through it without a fixed part. A second run, with layers of another size, tells the two parts
apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.plan.costs import LayerCost
from odyssey_megatron.policy.costs.profile import Profile, least_squares, load_profile

_FAR = 4.0
"""Layers with this many times the FLOPs of any that were measured, or fewer by this factor, are said to be far from
them. Between runs a line is within a few percent; beyond them it is a guess (``tests/studies/test_fitting.py``).
"""


_ROUNDED = 1e-9
"""A fixed part below this share of the mean time is what rounding has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTime:
    """The time of one kind of work as a linear function of its FLOPs."""

    fixed_s: float = 0.0
    flops_per_s: float = math.inf

    def time_s(self, flops: float) -> float:
        """Return the time of that many FLOPs; no work takes no time."""
        return self.fixed_s + flops / self.flops_per_s if flops else 0.0


Point = tuple[float, float]
"""(FLOPs, seconds)"""
Work = tuple[WorkTime, WorkTime, WorkTime]
"""The lines of forward, input gradient and weight gradient."""


def line_through(points: Sequence[Point]) -> WorkTime:
    """Return the line with the least relative errors and no negative part; a fixed part only if ``points`` show one.

    It goes through 0 for one point, and for several with about as many FLOPs. Measured times are believed to 3 %;
    squared, that is the weight of the expected values (:func:`odyssey_megatron.policy.costs.profile.least_squares`).
    """
    found = [(flops, seconds) for flops, seconds in points if flops > 0 and seconds > 0]
    if not found:
        return WorkTime()
    unit_s, unit = (sum(map(itemgetter(at), found)) / len(found) for at in (1, 0))
    rows = [[unit_s / seconds, flops / unit * (unit_s / seconds)] for flops, seconds in found]
    fixed, each = least_squares(rows, [1.0] * len(rows), [1.0] * len(rows), [0.0, 1.0])
    fixed = fixed if fixed > _ROUNDED else 0.0
    return WorkTime(fixed_s=fixed * unit_s, flops_per_s=unit / (each * unit_s) if each > 0 else math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What runs on one kind of GPU have in common."""

    embedding: Work
    layer: Work
    head: Work
    runs: tuple[Profile, ...]

    def profile(self, estimate: Profile) -> Profile:
        """Return ``estimate``, for a model on any accelerator, with the times, links and memory of the runs; with its
        own memory if no run knows any, as on CPUs.

        Its optimizer is as fast for a byte of state as in the median run, and an agreement takes as long as in any.

        Bytes of layers and messages stay.
        """
        inner = len(estimate.costs.layers) - 2
        works = (self.embedding, *(self.layer,) * inner, self.head)
        link = self._link.costs
        costs = replace(
            estimate.costs,
            layers=tuple(map(_timed, estimate.costs.layers, works, estimate.operations)),
            link_latency_s=link.link_latency_s,
            link_bytes_per_s=link.link_bytes_per_s,
            memory_bytes=min(self._memory_bytes, default=estimate.costs.gpu_bytes),
            agreement_s=max(one.costs.agreement_s for one in self.runs),
            optimizer_s_per_byte=statistics.median(one.costs.optimizer_s_per_byte for one in self.runs),
        ).with_room(estimate.costs.run_again_bytes)
        return replace(
            estimate,
            costs=costs,
            source="fitted",
            samples=sum(one.samples for one in self.runs),
            group_build_s=max(one.group_build_s for one in self.runs),
        )

    @property
    def knows_memory(self) -> bool:
        """Whether a run knows its GPUs' memory, as none does on CPUs."""
        return bool(self._memory_bytes)

    @property
    def _memory_bytes(self) -> list[int]:
        """The memory of the GPUs of each run that knows it."""
        return [size for one in self.runs if (size := one.costs.gpu_bytes) is not None]

    @property
    def _link(self) -> Profile:
        """The run with the largest messages: the times of small messages say little about a rate."""
        return max(self.runs, key=lambda one: one.costs.message_bytes)

    def error(self) -> float:
        """Return the largest relative difference between a transformer layer's time in a run and on the line."""
        ratios = [
            sum(line.time_s(flops) for line, flops in zip(self.layer, operations, strict=True)) / sum(seconds)
            for one in self.runs
            for operations, seconds in _inner(one)
            if sum(seconds) > 0
        ]
        return max((abs(ratio - 1) for ratio in ratios), default=0.0)

    def __str__(self) -> str:
        rates = "/".join(f"{line.flops_per_s / 1e12:.3g}" for line in self.layer)
        fixed = "/".join(f"{line.fixed_s * 1e3:.3g}" for line in self.layer)
        link = self._link.costs
        return (
            f"costs are estimates, fitted to {len(self.runs)} run(s) with {sum(one.samples for one in self.runs)} "
            f"measured microbatches: layers take {fixed} ms and a second for {rates} TFLOPs (forward/input gradient/"
            f"weight gradient), the runs' own within {self.error():.1%}; links {link.link_latency_s * 1e3:.3g} ms and "
            f"{link.link_bytes_per_s / 1e9:.3g} GB/s"
        )

    def far(self, estimate: Profile) -> str:
        """Describe how far the layers of ``estimate`` are from those that were measured; "" if they are not far."""
        measured = [max(1.0, sum(operations)) for one in self.runs for operations, _ in _inner(one)]
        wanted = [max(1.0, sum(operations)) for operations in estimate.operations[1:-1]]
        above, below = max(wanted) / max(measured), min(measured) / min(wanted)
        if max(above, below) < _FAR:
            return ""
        times, what = (above, "more") if above >= below else (below, "fewer")
        return f"layers have {times:.0f} times {what} FLOPs than any that was measured: --fit a run that is nearer"


def fitted(paths: Sequence[str]) -> Fitted:
    """Return what the runs in these folders, or profiles, have measured. Raises ConfigError."""
    runs = [load_profile(path) for path in paths]
    for path, one in zip(paths, runs, strict=True):
        if one.source != "measured":
            raise ConfigError(
                f"--fit {path}: nothing in it was measured, its costs are estimates. Give a run that has trained for "
                "more steps than its --odyssey-profile-steps."
            )
        if not one.operations:
            raise ConfigError(
                f"--fit {path}: the FLOPs of its layers are not in it, as an older version wrote it. Run the job again "
                "for a few steps; for a plan of the same model, --profile needs none."
            )
    ends = ([(one.operations[at], _seconds(one.costs.layers[at])) for one in runs] for at in (0, -1))
    embedding, head = (_lines(found) for found in ends)
    layer = _lines([point for one in runs for point in _inner(one)])
    if all(line == WorkTime() for line in layer):
        raise ConfigError(
            f"--fit {' '.join(paths)}: transformer layers take no time there. Give runs whose ranks have timed them "
            "(profile.json of a run's folder)."
        )
    return Fitted(
        embedding=embedding,
        layer=layer,
        head=head,
        runs=tuple(runs),
    )


Triple = tuple[float, float, float]


def _inner(profile: Profile) -> list[tuple[Triple, Triple]]:
    """Return (FLOPs, mean seconds) for each size of transformer layer: three numbers each, by kind of work."""
    alike: dict[Triple, list[Triple]] = {}
    for operations, layer in zip(profile.operations[1:-1], profile.costs.layers[1:-1], strict=True):
        alike.setdefault(operations, []).append(_seconds(layer))
    return [
        (
            operations,
            (_mean(a for a, _, _ in found), _mean(b for _, b, _ in found), _mean(c for *_, c in found)),
        )
        for operations, found in alike.items()
    ]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _lines(found: Sequence[tuple[Triple, Triple]]) -> Work:
    forward, input_grad, weight_grad = (
        line_through([(operations[kind], seconds[kind]) for operations, seconds in found])
        for kind in range(3)
    )
    return forward, input_grad, weight_grad


def _seconds(layer: LayerCost) -> Triple:
    return layer.forward_s, layer.input_grad_s, layer.weight_grad_s


def _timed(layer: LayerCost, work: Work, operations: Triple) -> LayerCost:
    forward_s, input_grad_s, weight_grad_s = (
        line.time_s(flops) for line, flops in zip(work, operations, strict=True)
    )
    return replace(layer, forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s)
