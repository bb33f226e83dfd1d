"""A stage of a pipeline, as the search for pipelines sees it, and the times that follow from its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odyssey_megatron.cluster.state import WHOLE_CELL, Share
from odyssey_megatron.plan.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a pipeline: one worker and its layers."""

    spans: tuple[tuple[int, int], ...]
    """The layers of each of its visits."""
    hop: int
    """The number of the first visit on the route."""
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


def path_s(costs: Costs, stages: Sequence[Stage]) -> float:
    """Return the time of one microbatch alone, to the end of its last weight gradient on the first stage."""
    hops = sum(len(one.spans) for one in stages)
    way_s = costs.spans.down_and_up_s(0, len(costs.layers)) + 2 * (hops - 1) * costs.message_s()
    return way_s + costs.spans.weight_grad_s(*stages[0].spans[0])
