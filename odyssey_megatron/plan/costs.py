"""What the layers cost: the numbers that the simulator and the search work with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from odyssey_megatron.cluster.state import SlowSums
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

    @property
    def kept_bytes(self) -> int:
        """Of a keeper: weights, gradients and optimizer state."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


Number = TypeVar("Number", int, float)


@lru_cache(maxsize=256, typed=True)
def _added_up(zero: Any, each: tuple[Any, ...]) -> list[Any]:
    """Known, as a search has costs for each number of pipelines that differ in the optimizer's state alone."""
    return [*accumulate(each, initial=zero)]


class _Sum(Generic[Number]):
    """One kind of cost, over any ``[first, last)`` in no time."""

    __slots__ = ("_before",)

    def __init__(self, zero: Number, each: Iterable[Number]) -> None:
        self._before: list[Number] = _added_up(zero, tuple(each))

    def __call__(self, first: int, last: int) -> Number:
        return self._before[last] - self._before[first]

    def table(self) -> NDArray[Any]:
        """[first, last] -> the same, of all at once."""
        before = np.array(self._before)
        return before - before[:, np.newaxis]


class Spans:
    """What consecutive layers ``[first, last)`` cost together: ``spans.forward_s(first, last)``."""

    def __init__(self, layers: Sequence[LayerCost], tied: LayerCost | None = None) -> None:
        """``tied``: of the weight that embedding and head share; it counts as the layer behind them."""
        self._last, self._tied_bytes = len(layers), tied.kept_bytes if tied else 0
        self.forward_s = _Sum(0.0, (one.forward_s for one in layers))
        self.input_grad_s = _Sum(0.0, (one.input_grad_s for one in layers))
        self.weight_grad_s = _Sum(0.0, (one.weight_grad_s for one in layers))
        self.down_and_up_s = _Sum(0.0, (one.forward_s + one.input_grad_s for one in layers))
        """The way of a microbatch: forward, and input gradient."""
        self.compute_s = _Sum(0.0, (one.compute_s for one in layers))
        self.activation_bytes = _Sum(0, (one.activation_bytes for one in layers))
        self.early_bytes = _Sum(0, (one.early_bytes for one in layers))
        whole = (*layers, tied) if tied else layers
        self.weight_bytes = _Sum(0, (one.weight_bytes for one in whole))
        self.gradient_bytes = _Sum(0, (one.gradient_bytes for one in whole))
        self.state_bytes = _Sum(0, (one.state_bytes for one in whole))
        self._kept_bytes = _Sum(0, (one.kept_bytes for one in layers))

    def kept_bytes(self, first: int, last: int) -> int:
        """Of who holds these layers, with the weight that embedding and head share where it needs that."""
        return self._kept_bytes(first, last) + self._tied_bytes * (first == 0 or last == self._last)

    def kept_bytes_table(self) -> NDArray[np.int64]:
        """[first, last] -> :meth:`kept_bytes`."""
        found = self._kept_bytes.table()
        found[0] += self._tied_bytes
        found[1:, -1] += self._tied_bytes
        return found


@dataclass(frozen=True, kw_only=True)
class Costs:
    """A job's costs, per layer and per message."""

    layers: tuple[LayerCost, ...]
    tied: LayerCost | None = None
    """Of the weight that embedding and head share, which ``layers`` do not count then (``Layout.tied``)."""
    message_bytes: SIZE_BYTES
    """One activation (or its gradient) between two layers."""
    link_latency_s: COST_S
    link_bytes_per_s: Annotated[float, Between(1, math.inf)]
    bucket_bytes: SIZE_BYTES | None = None
    """The least of gradients that is summed at once; None: see ``plan/reductions.py``."""
    memory_bytes: SIZE_BYTES | None = None
    """Of one worker, for weights, gradients, optimizer and activations; None = not known, no limit."""
    keeps_messages: bool = False
    """What a worker sends stays there until the step's end, so that an interrupted step can go on."""
    optimizer_s: COST_S = 0.0
    """The step's end: agreement and optimizer, on the worker that takes longest."""
    slow_links: tuple[tuple[int, int, float], ...] = ()
    """(sender, receiver, seconds): activations between these two workers take so much longer than others."""
    slow_sums: tuple[SlowSums, ...] = ()
    """Of gradients, those that take longer than others."""

    @cached_property
    def spans(self) -> Spans:
        """What several layers cost together."""
        return Spans(self.layers, self.tied)

    @cached_property
    def all_layers(self) -> tuple[LayerCost, ...]:
        """``layers``, and behind them the tied weight: one for each of ``Layout.all_holders``."""
        return (*self.layers, self.tied) if self.tied else self.layers

    def with_layers(self, layers: Iterable[LayerCost]) -> Costs:
        """The same with other ``all_layers``."""
        found = tuple(layers)
        count = len(self.layers)
        return replace(self, layers=found[:count], tied=found[count] if self.tied else None)

    def message_s(self) -> float:
        """Time of one activation message."""
        return self.link_latency_s + self.message_bytes / self.link_bytes_per_s

    @cached_property
    def lags_s(self) -> dict[tuple[int, int], float]:
        """(sender, receiver) -> what a message between them takes longer than :meth:`message_s`."""
        return {(sender, receiver): longer_s for sender, receiver, longer_s in self.slow_links}

    def sum_factor(self, holders: tuple[int, ...]) -> float:
        """How many times its usual time the sum over ``holders`` takes."""
        return max((one.factor for one in self.slow_sums if one.slows(holders)), default=1.0)

    @cached_property
    def without_slow_links(self) -> Costs:
        """What is the same wherever the workers are: itself where no link is slow, and no sum."""
        return replace(self, slow_links=(), slow_sums=()) if self.slow_links or self.slow_sums else self

    @cached_property
    def of_orders(self) -> Costs:
        """What orders and programs are worked out from: the same wherever the workers are, and however optimizer state
        is shared out.
        """
        layers = (replace(one, optimizer_bytes=0, state_bytes=0) for one in self.all_layers)
        return self.without_slow_links.with_layers(layers)
