"""Layers that take more memory than was thought, as ranks have run out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from types import MappingProxyType

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.memory import state_bytes
from odyssey_megatron.plan.plan import Plan

_ROOM, _BLIND_ROOM = 0.85, 0.8
"""A rank that has run out of memory is taken to have needed what there is, divided by this; the second where nobody has
said how much there is. Choices: where that is not enough it runs out once more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heavier:
    """What is known better than the estimates of memory."""

    factors: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Layer -> how many times the activations of a microbatch take what was thought."""
    room_bytes: int | None = None
    """Memory of a rank, where nobody had said how much there is: what the fullest one was to need when one ran out."""

    def applied(self, costs: Costs) -> Costs:
        """Return ``costs`` with it."""
        if not self.factors:
            return costs
        layers = list(costs.layers)
        for at, factor in self.factors.items():
            more = {
                name: ceil(getattr(layers[at], name) * factor) for name in ("activation_bytes", "early_bytes")
            }
            layers[at] = replace(layers[at], **more)
        memory_bytes = self.room_bytes if costs.memory_bytes is None else costs.memory_bytes
        return replace(costs, layers=tuple(layers), memory_bytes=memory_bytes)

    def after(self, plan: Plan, worker: int, costs: Costs) -> Heavier | None:
        """Return what is known when a rank of ``worker`` has run out of memory under ``plan``.

        None if by the plan it keeps no activations: something else has filled its memory. ``costs`` are without what
        was known before.
        """
        peaks, known = dict(plan.peak_bytes), self.applied(costs)
        room = known.memory_bytes or max(peaks.values())
        state = state_bytes(plan.layout, known).get(worker, 0)
        activations = peaks.get(worker, 0) - state
        if activations <= 0:
            return None
        share = _ROOM if costs.memory_bytes is not None else _BLIND_ROOM
        factor = max(room / share - state, 0.0) / activations
        more = {
            layer: self.factors.get(layer, 1.0) * max(factor, 1 / share)
            for layer in plan.layout.held_by(worker)
            if layer < len(costs.layers)
        }
        return Heavier(factors=MappingProxyType({**self.factors, **more}), room_bytes=room)

    def at_least(self, other: Heavier) -> Heavier:
        """Return the larger factor of both for each layer."""
        both = {
            layer: max(self.factors.get(layer, 1.0), other.factors.get(layer, 1.0))
            for layer in {*self.factors, *other.factors}
        }
        return Heavier(factors=MappingProxyType(both), room_bytes=other.room_bytes)
