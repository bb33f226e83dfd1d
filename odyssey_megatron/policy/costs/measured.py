"""What a rank of a running job has measured, and the profile that follows from all ranks' measurements."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.policy.costs.profile import Observation, Profile, calibrate


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Times from one rank to another before the first step, in seconds; half of the fastest of a few round trips."""

    worker: int
    """The other rank's."""
    message_bytes: int
    """Size of one activation."""
    empty_s: float
    message_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSeen:
    """Times of messages to a worker with which this one exchanges activations, once both were there; the fastest of a
    few.
    """

    step: int
    worker: int
    empty_s: float
    message_s: float
    """The time of a message as large as one activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumSeen:
    """The time of a sum as large as one activation over the holders of the same layers, once all were there."""

    step: int
    workers: str
    """In the form of :func:`odyssey_megatron.plan.sending.runs.to_runs`."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """The time of a whole step, with everything that is waited for in it."""

    step: int
    generation: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSeen:
    """The time of a step's end on this rank."""

    step: int
    agreement_s: float
    """From when this rank came to the agreement until it was through. The last one to come waits for nobody."""
    optimizer_s: float
    optimizer_bytes: int
    """Optimizer state that the rank keeps, all of which is stepped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSeen:
    """The time that was computed in a step, by the thread's clock and by the clock on the wall. Only where a CPU
    computes.

    The time in which it waited for cores that the ranks of its node share is left out.
    """

    step: int
    computed_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSeen:
    """How unevenly the experts of a step loaded the ranks over which they are spread."""

    step: int
    loads: tuple[tuple[int, float], ...]
    """(number of ranks of a gang, tokens of its busiest rank), as in ``cluster/expert_loads.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenSeen:
    """How much the microbatches of a step differed that had the same work on this rank."""

    step: int
    spread: float
    """The usual relative distance of a microbatch from the median."""
    together: float
    """Correlation of the microbatches' forwards and backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank publishes. Fields that it has not measured are None or empty."""

    spans: tuple[Observation, ...] = ()
    """Measured in the last few steps that were timed. The other tuples are of the same steps."""
    link: LinkTimes | None = None
    links: tuple[LinkSeen, ...] = ()
    """Links to workers with which this one exchanges activations."""
    sums: tuple[SumSeen, ...] = ()
    """Only the sums of which this is the first worker."""
    steps: tuple[StepSeen, ...] = ()
    """Without the first step of a generation, which takes longer, and steps with fewer microbatches than
    the plan has.
    """
    ends: tuple[EndSeen, ...] = ()
    held: tuple[HeldSeen, ...] = ()
    """Empty where no CPU computes."""
    experts: tuple[ExpertsSeen, ...] = ()
    """Of all gangs, and told by one rank."""
    uneven: tuple[UnevenSeen, ...] = ()
    """Only of steps with enough microbatches."""
    state_bytes: tuple[tuple[int, int], ...] = ()
    """(layer, bytes that a new holder must be sent) of each layer that the rank holds."""
    regroup_s: float | None = None
    """Time for abort, agreement and new groups in the last recovery."""
    incarnation: int = 0
    """Number of processes that were this rank before the one that publishes this."""


def with_measured(
    profile: Profile, published: Collection[Measured], spans: Sequence[Observation] = ()
) -> Profile:
    """Return ``profile`` with everything that the ranks know better; ``profile`` itself if they know nothing.
    Deterministic.

    ``spans``: times on a healthy worker of the spans that ranks have measured.
    """
    profile = calibrate(profile, spans)
    costs = profile.costs
    sizes = {layer: size for one in published for layer, size in one.state_bytes}
    costs = costs.with_layers(
        replace(layer, state_bytes=sizes.get(index, layer.state_bytes))
        for index, layer in enumerate(costs.all_layers)
    )
    timed = [(one.link, one.links) for one in published if one.link is not None]
    if timed:
        links = [link for link, _ in timed]
        latency_s, message_s = _medians_s(links)
        size = max(link.message_bytes for link in links)
        again = [one for link, found in timed for one in found if one.worker == link.worker]
        seen = _medians_s(again or links)
        if not 1 / _FAR <= seen[1] / max(message_s, 1e-12) <= _FAR:
            latency_s, message_s = seen
        costs = replace(
            costs,
            message_bytes=size,
            link_latency_s=latency_s,
            # A message that is hardly slower than an empty one only says that the link is fast, and one without bytes
            # says nothing.
            link_bytes_per_s=size / max(message_s - latency_s, 0.05 * message_s, 1e-9)
            or costs.link_bytes_per_s,
        )
    costs = _with_ends(costs, [seen for one in published for seen in one.ends])
    regroups = [one.regroup_s for one in _of_now(published) if one.regroup_s is not None]
    return replace(profile, costs=costs, group_build_s=max(regroups) if regroups else profile.group_build_s)


def _with_ends(costs: Costs, ends: Sequence[EndSeen]) -> Costs:
    """Return ``costs`` with the agreement and the optimizer as most ranks have measured them.

    In each step the agreement takes as long as it does for the last rank to come to it; so only steps count that as
    many ranks as any have told of.
    """
    waits_s: dict[int, list[float]] = {}
    for one in ends:
        waits_s.setdefault(one.step, []).append(one.agreement_s)
    told = max(map(len, waits_s.values()), default=0)
    of_last_s = [min(own) for own in waits_s.values() if len(own) == told]
    rates = [one.optimizer_s / one.optimizer_bytes for one in ends if one.optimizer_bytes]
    return replace(
        costs,
        agreement_s=statistics.median(of_last_s) if of_last_s else costs.agreement_s,
        optimizer_s_per_byte=statistics.median(rates) if rates else costs.optimizer_s_per_byte,
    )


def _of_now(published: Collection[Measured]) -> list[Measured]:
    """Return those that have measured one of the newest steps, if anybody has measured any.

    The others are dead, and their last recovery may have been one in which somebody was stuck.
    """
    steps = [{span.step for span in one.spans} for one in published]
    newest = max(steps, key=lambda own: max(own, default=-1), default=set[int]())
    return [one for one, own in zip(published, steps, strict=True) if own & newest or not newest]


def _medians_s(links: Sequence[LinkTimes | LinkSeen]) -> tuple[float, float]:
    return statistics.median(one.empty_s for one in links), statistics.median(one.message_s for one in links)


_FAR = 1.5
"""The links that were timed before the job began (``plan/placing/groups.timed_pairs``) count as they are found between
its steps only if that differs by at least this factor. A smaller difference may be noise, and plans stay as they are.
"""
_NOISE = 0.01
"""A fraction of a transformer layer's time: costs that change by less do not make another plan worthwhile."""


def alike(one: Costs, other: Costs) -> bool:
    """Return whether ``other`` differs from ``one`` by noise only, so that plans, and what was worked out for them,
    hold for both.
    """
    noise_s = _NOISE * statistics.median(layer.compute_s for layer in one.layers)
    shortest_s = sum(layer.compute_s for layer in one.layers)  # of a step: the way of one microbatch
    return (
        _without_times(one) == _without_times(other)
        and abs(one.message_s() - other.message_s()) <= noise_s
        and abs(_end_s(one) - _end_s(other)) <= _NOISE * shortest_s
        and all(
            abs(getattr(mine, kind) - getattr(theirs, kind)) <= noise_s
            for kind in ("forward_s", "input_grad_s", "weight_grad_s")
            for mine, theirs in zip(one.layers, other.layers, strict=True)
        )
    )


def _end_s(costs: Costs) -> float:
    """Return the time of the agreement and of an optimizer of all layers."""
    return costs.agreement_s + costs.optimizer_s_per_byte * sum(
        one.optimizer_bytes for one in costs.all_layers
    )


def _without_times(costs: Costs) -> Costs:
    layers = (replace(one, forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0) for one in costs.layers)
    return replace(
        costs,
        layers=tuple(layers),
        link_latency_s=0.0,
        link_bytes_per_s=1.0,
        agreement_s=0.0,
        optimizer_s_per_byte=0.0,
    )
