"""What the layers cost: the numbers that the simulator and the search work with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from odyssey_megatron.inputs import Between

COST_S = Annotated[float, Between(0, 1e6)]
SIZE_BYTES = Annotated[int, Between(0, 2**60, whole=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One layer, one microbatch, on a worker of speed 1."""

    forward_s: COST_S
    input_grad_s: COST_S
    weight_grad_s: COST_S
    activation_bytes: SIZE_BYTES
    """Kept from the forward until the weight gradient has run."""
    weight_bytes: SIZE_BYTES
    gradient_bytes: SIZE_BYTES
    """What the layer's holders sum. Each keeps these and the weights."""
    optimizer_bytes: SIZE_BYTES
    """Of each keeper (``Layout.states``)."""
    state_bytes: SIZE_BYTES
    """Weights and optimizer state: what a new keeper must be sent."""
    early_bytes: SIZE_BYTES = 0
    """Of ``activation_bytes``, what only the input gradient needs, so that it is free after it."""

    @property
    def compute_s(self) -> float:
        """Forward and both gradients."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A job's costs, per layer and per message."""

    layers: tuple[LayerCost, ...]
    message_bytes: SIZE_BYTES
    """One activation (or its gradient) between two layers."""
    link_latency_s: COST_S
    link_bytes_per_s: Annotated[float, Between(1, math.inf)]
    memory_bytes: SIZE_BYTES | None = None
    """Of one worker, for weights, gradients, optimizer and activations; None = not known, no limit."""
    keeps_messages: bool = False
    """What a worker sends stays there until the step's end, so that an interrupted step can go on."""
    optimizer_s: COST_S = 0.0
    """The step's end: agreement and optimizer, on the worker that takes longest."""

    def message_s(self) -> float:
        """Time of one activation message."""
        return self.link_latency_s + self.message_bytes / self.link_bytes_per_s
