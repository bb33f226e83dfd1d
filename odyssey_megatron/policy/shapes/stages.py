"""A stage of a pipeline, as the search for pipelines sees it, and the times that follow from its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from odyssey_megatron.cluster.state import WHOLE_CELL, Share
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.scheduling.order import usable_bytes
from odyssey_megatron.policy.shapes.shares import SLACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a pipeline: one worker and its layers."""

    spans: tuple[tuple[int, int], ...]
    """The layers of each of its visits."""
    hop: int
    """The number of the first visit on the route."""
    hops: int
    """Number of visits on the route, to all stages."""
    down_and_up_s: float
    each_s: float
    """Seconds per microbatch that it can sustain."""
    speed: float = 1.0
    share: Share = WHOLE_CELL

    @property
    def first(self) -> int:
        return self.spans[0][0]

    def beside_s(self, costs: Costs) -> float:
        """Return the time of the input gradient beside which it may sum: see ``plan/scheduling/reductions.py``."""
        return sum(costs.spans.input_grad_s(a, b) for a, b in self.spans if not a) / self.speed


def reached_s(costs: Costs, one: Stage) -> float:
    """Return when a pipeline's first microbatch reaches a stage."""
    return costs.spans.forward_s(0, one.first) + one.hop * costs.message_s()


def up_s(costs: Costs, stages: Sequence[Stage], one: Stage) -> float:
    """Return the time down to a stage, and from there up to the end of the first stage's weight gradient."""
    way_s = costs.spans.down_and_up_s(0, one.first) + 2 * one.hop * costs.message_s()
    return way_s + costs.spans.weight_grad_s(*stages[0].spans[0])


class Waiting(NamedTuple):
    """What a stage's memory keeps it from, as in :mod:`odyssey_megatron.plan.checking.bound`: before its first input
    gradient it can only fill its memory, and after the last one only empty it.
    """

    before_s: float
    """The time for which it waits, full, for its first input gradient; 0.0 if other limits bind."""
    head_s: float
    """With ``each_s`` for each microbatch, a lower bound of the time at which the last gradient is through with the
    first stage's weight gradient.
    """
    each_s: float


def waiting(costs: Costs, stages: Sequence[Stage], one: Stage, room_bytes: float) -> Waiting:
    """Return what a stage with room for so many bytes of activations waits for."""
    through_s = up_s(costs, stages, one)
    # The last input gradient of a stage that is visited more than once may be its first hop's.
    if room_bytes == inf or len(one.spans) > 1:
        return Waiting(0.0, through_s, one.down_and_up_s)
    ((first, last),) = one.spans
    spans = costs.spans
    early, whole = spans.early_bytes(first, last), spans.activation_bytes(first, last)
    room = usable_bytes(int(room_bytes), one.spans, costs)
    fills_s = spans.forward_s(first, last) * room / whole if whole else inf
    empties_s = spans.weight_grad_s(first, last) * room / (whole - early) if whole > early else inf
    back_s = spans.down_and_up_s(first, len(costs.layers)) - spans.input_grad_s(first, last)
    back_s += 2 * (one.hops - 1 - one.hop) * costs.message_s()
    work_s = spans.compute_s(first, last) / one.speed
    waits_s = max(0.0, back_s - fills_s / one.speed)
    is_busy = one.each_s <= work_s * SLACK
    return Waiting(waits_s if is_busy else 0.0, through_s + waits_s - empties_s / one.speed, work_s)


def path_s(costs: Costs, stages: Sequence[Stage]) -> float:
    """Return the time of one microbatch alone, to the end of its last weight gradient on the first stage."""
    way_s = costs.spans.down_and_up_s(0, len(costs.layers)) + 2 * (stages[0].hops - 1) * costs.message_s()
    return way_s + costs.spans.weight_grad_s(*stages[0].spans[0])
