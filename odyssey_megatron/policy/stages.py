"""A worker of a pipeline, as the search for pipelines sees it."""

from __future__ import annotations

from dataclasses import dataclass

from odyssey_megatron.plan.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A worker of a pipeline."""

    spans: tuple[tuple[int, int], ...]
    """The layers of each of its visits."""
    hop: int
    """The number of the first of them on the route."""
    down_and_up_s: float
    each_s: float
    """Seconds a microbatch that it can sustain."""
    speed: float = 1.0
    share: float = 1.0
    """See ``Slow``."""

    @property
    def first(self) -> int:
        return self.spans[0][0]

    def beside_s(self, costs: Costs) -> float:
        """The input gradient beside which it may sum: see ``plan/reductions.py``."""
        return sum(costs.spans.input_grad_s(a, b) for a, b in self.spans if not a) / self.speed
