"""What a rank of a running job has measured, and the profile that follows from all ranks' measurements."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.policy.profile import Observation, Profile, calibrate


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """One way between two ranks, in seconds; half of the fastest of a few round trips."""

    message_bytes: int
    """Of one activation."""
    empty_s: float
    message_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSeen:
    """Messages to a worker with which this one exchanges activations, once both were there: the fastest of a few."""

    step: int
    worker: int
    empty_s: float
    message_s: float
    """Of one activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumSeen:
    """A sum as large as one activation over those who hold the same layers, once all were there."""

    step: int
    workers: str
    """As :func:`odyssey_megatron.plan.runs.to_runs` has them."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """How long a step took, with all that is waited for in it."""

    step: int
    generation: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSeen:
    """What was computed in a step, by the thread's own clock and by that on the wall, without what it has waited for
    cores that the ranks of its node share. Where a CPU computes.
    """

    step: int
    computed_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenSeen:
    """How unlike the microbatches of a step were, that had the same work on this rank."""

    step: int
    spread: float
    """How far one usually is from their median, relative."""
    together: float
    """Correlation of their forwards and backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank publishes. Fields that it has not measured are None or empty."""

    spans: tuple[Observation, ...] = ()
    """Of the last few steps that were measured."""
    link: LinkTimes | None = None
    links: tuple[LinkSeen, ...] = ()
    """Of the same steps."""
    sums: tuple[SumSeen, ...] = ()
    """Of the same; only those of which this is the first worker."""
    steps: tuple[StepSeen, ...] = ()
    """The same, but for the first of a generation, which takes longer, and those with fewer microbatches than the plan
    has."""
    held: tuple[HeldSeen, ...] = ()
    """Of the same."""
    uneven: tuple[UnevenSeen, ...] = ()
    """Of the same, where there were enough microbatches."""
    state_bytes: tuple[tuple[int, int], ...] = ()
    """(layer, bytes that a new holder must be sent) of the layers held."""
    regroup_s: float | None = None
    """Abort, agreement and new groups in the last recovery."""
    incarnation: int = 0
    """How many processes were this rank before the one that says so."""


def with_measured(
    profile: Profile, published: Collection[Measured], spans: Sequence[Observation] = ()
) -> Profile:
    """``profile`` with everything that the ranks know better; deterministic, and itself if they know nothing.

    ``spans``: what those that the ranks have measured take on a healthy worker.
    """
    profile = calibrate(profile, spans)
    costs = profile.costs
    sizes = {layer: size for one in published for layer, size in one.state_bytes}
    costs = costs.with_layers(
        replace(layer, state_bytes=sizes.get(index, layer.state_bytes))
        for index, layer in enumerate(costs.all_layers)
    )
    links = [one.link for one in published if one.link is not None]
    if links:
        latency_s, message_s = _medians_s(links)
        size = max(link.message_bytes for link in links)
        seen = _medians_s([link for one in published for link in one.links] or links)
        if not 1 / _FAR <= seen[1] / max(message_s, 1e-12) <= _FAR:
            latency_s, message_s = seen
        costs = replace(
            costs,
            message_bytes=size,
            link_latency_s=latency_s,
            # A message that is hardly slower than an empty one says only that the link is fast, and one without bytes
            # nothing.
            link_bytes_per_s=size / max(message_s - latency_s, 0.05 * message_s, 1e-9)
            or costs.link_bytes_per_s,
        )
    regroups = [one.regroup_s for one in _of_now(published) if one.regroup_s is not None]
    return replace(profile, costs=costs, group_build_s=max(regroups) if regroups else profile.group_build_s)


def _of_now(published: Collection[Measured]) -> list[Measured]:
    """Those who have measured one of the newest steps, if anybody has measured any. Others are dead, and their last
    recovery may have been one in which somebody was stuck.
    """
    steps = [{span.step for span in one.spans} for one in published]
    newest = max(steps, key=lambda own: max(own, default=-1), default=set[int]())
    return [one for one, own in zip(published, steps, strict=True) if own & newest or not newest]


def _medians_s(links: Sequence[LinkTimes | LinkSeen]) -> tuple[float, float]:
    return statistics.median(one.empty_s for one in links), statistics.median(one.message_s for one in links)


_FAR = 1.5
"""Links between neighbours in a pipeline count, where they take so many times more or less than those between
consecutive ranks, which were timed once, before the job began: by less it may be noise, and plans stay as they are.
"""
_NOISE = 0.01
"""Of a transformer layer: costs that have moved by less make no other plan worth its while."""


def alike(one: Costs, other: Costs) -> bool:
    """Whether ``other`` is ``one`` but for noise, so that plans, and what was worked out for them, hold for both."""
    noise_s = _NOISE * statistics.median(layer.compute_s for layer in one.layers)
    return (
        _without_times(one) == _without_times(other)
        and abs(one.message_s() - other.message_s()) <= noise_s
        and all(
            abs(getattr(mine, kind) - getattr(theirs, kind)) <= noise_s
            for kind in ("forward_s", "input_grad_s", "weight_grad_s")
            for mine, theirs in zip(one.layers, other.layers, strict=True)
        )
    )


def _without_times(costs: Costs) -> Costs:
    layers = (replace(one, forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0) for one in costs.layers)
    return replace(costs, layers=tuple(layers), link_latency_s=0.0, link_bytes_per_s=1.0)
