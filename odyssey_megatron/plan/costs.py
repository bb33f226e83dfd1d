"""What the layers cost: the numbers that the simulator and the search work with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One layer, one microbatch, on a worker of speed 1."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    activation_bytes: int
    """Kept from the forward until the weight gradient has run."""
    weight_bytes: int
    gradient_bytes: int
    """What the layer's holders sum. Each keeps these and the weights."""
    optimizer_bytes: int
    """Of each keeper (``Layout.states``)."""
    state_bytes: int
    """Weights and optimizer state: what a new keeper must be sent."""
    early_bytes: int = 0
    """Of ``activation_bytes``, what only the input gradient needs, so that it is free after it."""

    @property
    def compute_s(self) -> float:
        """Forward and both gradients."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A job's costs, per layer and per message."""

    layers: tuple[LayerCost, ...]
    message_bytes: int
    """One activation (or its gradient) between two layers."""
    link_latency_s: float
    link_bytes_per_s: float
    memory_bytes: int | None = None
    """Of one worker, for weights, gradients, optimizer and activations; None = not known, no limit."""
    keeps_messages: bool = False
    """What a worker sends stays there until the step's end, so that an interrupted step can go on."""
    optimizer_s: float = 0.0
    """The step's end: agreement and optimizer, on the worker that takes longest."""

    def message_s(self) -> float:
        """Time of one activation message."""
        return self.link_latency_s + self.message_bytes / self.link_bytes_per_s
