"""Costs of layers and messages: the numbers that the simulator and the search work with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from odyssey_megatron.cluster.state import SlowSums
from odyssey_megatron.inputs import COUNT, Between

COST_S = Annotated[float, Between(0, 1e6)]
SIZE_BYTES = Annotated[int, Between(0, 2**60, whole=True)]
_MORE_OR_LESS_BYTES = Annotated[int, Between(-(2**60), 2**60, whole=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Costs of one layer for one microbatch, on a worker of speed 1."""

    forward_s: COST_S
    input_grad_s: COST_S
    weight_grad_s: COST_S
    activation_bytes: SIZE_BYTES
    """Bytes that are kept from the forward until the input gradient has run."""
    weight_bytes: SIZE_BYTES
    gradient_bytes: SIZE_BYTES
    """Bytes of gradients, which the layer's holders sum. Each holder keeps these and the weights."""
    optimizer_bytes: SIZE_BYTES
    """Bytes of the whole optimizer state, of which each keeper has its slices (``Layout.states``); of a rank's
    stretches of it, if there are ``Costs.stretches``."""
    state_bytes: SIZE_BYTES
    """Bytes of weights and optimizer state: what a new keeper of all of it must be sent."""
    early_bytes: _MORE_OR_LESS_BYTES = 0
    """The part of ``activation_bytes`` that only the input gradient needs, and that is free after it; the rest stays
    until the weight gradient has run. Negative: so many bytes more stay until then, which the input gradient has
    gathered, or computed again without the weight gradient (``policy/costs/estimate.py``).
    """
    expert_bytes: SIZE_BYTES = 0
    """The part of ``weight_bytes`` that are experts spread over ranks."""

    @property
    def compute_s(self) -> float:
        """Time of the forward and both gradients."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    @property
    def kept_bytes(self) -> int:
        """Bytes that a keeper of all of it keeps: weights, gradients and optimizer state."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    def in_stretch(self, stretches: int, of_experts: int) -> Fraction:
        """Return the share of a rank's numbers of this layer that are in a stretch: one of so many ``stretches``, and
        one of so many ``of_experts``.
        """
        experts = Fraction(self.expert_bytes, self.weight_bytes) if self.expert_bytes else Fraction(0)
        return (1 - experts) / stretches + experts / of_experts


Number = TypeVar("Number", int, float)


@lru_cache(maxsize=256, typed=True)
def _added_up(zero: Any, each: tuple[Any, ...]) -> list[Any]:
    """Return the running sums of ``each``.

    Cached, since a search has costs for each number of pipelines, which differ in the bytes of optimizer state only.
    """
    return [*accumulate(each, initial=zero)]


class _Sum(Generic[Number]):
    """The sum of one kind of cost over any layers ``[first, last)``, in constant time."""

    __slots__ = ("_before",)

    def __init__(self, zero: Number, each: Iterable[Number]) -> None:
        self._before: list[Number] = _added_up(zero, tuple(each))

    def __call__(self, first: int, last: int) -> Number:
        return self._before[last] - self._before[first]

    def table(self) -> NDArray[Any]:
        """Return the sums over all spans at once, as an array indexed by [first, last]."""
        before = np.array(self._before)
        table: NDArray[Any] = before - before[:, np.newaxis]
        return table


class _Kept:
    """The bytes of any layers ``[first, last)``, with those of the tied weight if embedding or head is among them."""

    __slots__ = ("_last", "_sum", "_tied")

    def __init__(self, each: Sequence[int], tied: int) -> None:
        self._last, self._sum, self._tied = len(each), _Sum(0, each), tied

    def __call__(self, first: int, last: int) -> int:
        return self._sum(first, last) + self._tied * (first == 0 or last == self._last)

    def table(self) -> NDArray[np.int64]:
        """Return the bytes of all spans, as an array indexed by [first, last]."""
        found: NDArray[np.int64] = self._sum.table()
        found[0] += self._tied
        found[1:, -1] += self._tied
        return found


class Spans:
    """What consecutive layers ``[first, last)`` cost together: ``spans.forward_s(first, last)``."""

    def __init__(self, layers: Sequence[LayerCost], tied: LayerCost | None = None) -> None:
        """``tied``: the cost of the weight that embedding and head share; it counts as the layer behind the head."""
        self.forward_s = _Sum(0.0, (one.forward_s for one in layers))
        self.input_grad_s = _Sum(0.0, (one.input_grad_s for one in layers))
        self.weight_grad_s = _Sum(0.0, (one.weight_grad_s for one in layers))
        self.down_and_up_s = _Sum(0.0, (one.forward_s + one.input_grad_s for one in layers))
        """Time of the forward and the input gradient: a microbatch's way through the layers and back."""
        self.compute_s = _Sum(0.0, (one.compute_s for one in layers))
        self.activation_bytes = _Sum(0, (one.activation_bytes for one in layers))
        self.early_bytes = _Sum(0, (one.early_bytes for one in layers))
        whole = (*layers, tied) if tied else layers
        self.weight_bytes = _Sum(0, (one.weight_bytes for one in whole))
        self.expert_bytes = _Sum(0, (one.expert_bytes for one in whole))
        self.gradient_bytes = _Sum(0, (one.gradient_bytes for one in whole))
        self.state_bytes = _Sum(0, (one.state_bytes for one in whole))
        self.kept_bytes = _Kept([one.kept_bytes for one in layers], tied.kept_bytes if tied else 0)
        """Bytes that a holder of these layers keeps, with the tied weight if it has embedding or head."""
        self.optimizer_bytes = _Kept(
            [one.optimizer_bytes for one in layers], tied.optimizer_bytes if tied else 0
        )
        """The part of :attr:`kept_bytes` that is optimizer state."""
        self.stepped_bytes = _Sum(0, (one.optimizer_bytes for one in whole))
        """Bytes of optimizer state, where the tied weight is a layer of its own."""

    def least_bytes(self, first: int, last: int) -> int:
        """Return the bytes of activations that one microbatch needs to pass the layers and come back."""
        return self.activation_bytes(first, last) + self.grown_bytes(first, last)

    def grown_bytes(self, first: int, last: int) -> int:
        """Return by how many bytes an input gradient adds to what is kept (``LayerCost.early_bytes``)."""
        return max(0, -self.early_bytes(first, last))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """A job's costs, per layer and per message."""

    layers: tuple[LayerCost, ...]
    tied: LayerCost | None = None
    """Cost of the weight that embedding and head share, which is then not counted in ``layers`` (``Layout.tied``)."""
    message_bytes: SIZE_BYTES
    """Bytes of one activation (or its gradient) between two layers."""
    link_latency_s: COST_S
    link_bytes_per_s: Annotated[float, Between(1, math.inf)]
    bucket_bytes: SIZE_BYTES | None = None
    """The least number of bytes of gradients that are summed at once; None: as ``plan/scheduling/reductions.py`` has
    it.
    """
    memory_bytes: SIZE_BYTES | None = None
    """Memory of one worker for weights, gradients, optimizer and activations; None: not known, and no limit."""
    run_again_bytes: SIZE_BYTES = 0
    """Memory besides, for what is run again in a backward (recomputation)."""
    stretches: Annotated[int, COUNT] = 1
    """Number of ranks of a whole cell that share out the optimizer state of what they have alike
    (``plan/placing/stretches.py``), experts that are spread over ranks aside."""
    expert_stretches: Annotated[int, COUNT] = 1
    """The same for these experts."""
    keeps_messages: bool = False
    """Whether a worker keeps what it sends until the step's end, so that an interrupted step can go on."""
    agreement_s: COST_S = 0.0
    """Time in which all workers agree that a step is done, once all have computed and summed; no optimizer runs before
    that.
    """
    optimizer_s_per_byte: COST_S = 0.0
    """Time of a worker's optimizer for each byte of optimizer state that it keeps."""
    slow_links: tuple[tuple[int, int, float], ...] = ()
    """(sender, receiver, seconds): how much longer an activation between these workers takes than others."""
    slow_sums: tuple[SlowSums, ...] = ()
    """Gradient sums that take longer than others."""
    long_optimizers: tuple[tuple[int, float], ...] = ()
    """(worker, factor): how many times as long as a whole cell's the optimizer of a smaller cell takes."""

    @cached_property
    def spans(self) -> Spans:
        """Costs of consecutive layers together."""
        return Spans(self.layers, self.tied)

    @cached_property
    def all_layers(self) -> tuple[LayerCost, ...]:
        """``layers``, followed by the tied weight if there is one; as ``Layout.all_holders``."""
        return (*self.layers, self.tied) if self.tied else self.layers

    def with_layers(self, layers: Iterable[LayerCost]) -> Costs:
        """Return these costs with ``layers`` in the place of ``all_layers``."""
        found = tuple(layers)
        count = len(self.layers)
        return replace(self, layers=found[:count], tied=found[count] if self.tied else None)

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of one worker for plans and for what is run again."""
        return None if self.memory_bytes is None else self.memory_bytes + self.run_again_bytes

    def with_room(self, run_again_bytes: int) -> Costs:
        """Return these costs with ``run_again_bytes`` of the memory that plans may use left for what is run again."""
        known = self.memory_bytes
        left = None if known is None else max(0, known - run_again_bytes)
        return replace(self, memory_bytes=left, run_again_bytes=run_again_bytes)

    def with_stretches(self, number: int, of_experts: int = 1) -> Costs:
        """Return these costs with optimizer state in ``number`` stretches, that ``of_experts`` in so many."""
        before = self.stretches, self.expert_stretches
        if before == (number, of_experts):
            return self
        layers = (
            replace(
                one,
                optimizer_bytes=math.ceil(
                    one.optimizer_bytes * one.in_stretch(number, of_experts) / one.in_stretch(*before)
                ),
            )
            for one in self.all_layers
        )
        return replace(self.with_layers(layers), stretches=number, expert_stretches=of_experts)

    @cached_property
    def moved_bytes(self) -> tuple[int, ...]:
        """For each of ``all_layers``, the bytes of ``state_bytes`` that one rank sends or receives of it."""
        count = self.stretches, self.expert_stretches
        return tuple(math.ceil(one.state_bytes * one.in_stretch(*count)) for one in self.all_layers)

    def message_s(self) -> float:
        """Return the time of one activation message."""
        return self.link_latency_s + self.message_bytes / self.link_bytes_per_s

    @cached_property
    def lags_s(self) -> dict[tuple[int, int], float]:
        """(sender, receiver) -> how much longer than :meth:`message_s` a message between them takes."""
        return {(sender, receiver): longer_s for sender, receiver, longer_s in self.slow_links}

    def sum_factor(self, holders: tuple[int, ...]) -> float:
        """Return the time of the sum over ``holders``, relative to the usual time."""
        return max((one.factor for one in self.slow_sums if one.slows(holders)), default=1.0)

    @cached_property
    def of_alike_workers(self) -> Costs:
        """These costs without slow links, slow sums and long optimizers: what does not depend on which workers take
        part.
        """
        if not (self.slow_links or self.slow_sums or self.long_optimizers):
            return self
        return replace(self, slow_links=(), slow_sums=(), long_optimizers=())

    @cached_property
    def without_ends(self) -> Costs:
        """These costs without agreement and optimizer: what a step takes until all have computed and summed."""
        return replace(self, agreement_s=0.0, optimizer_s_per_byte=0.0)

    @cached_property
    def of_orders(self) -> Costs:
        """The costs that orders and programs depend on.

        They do not depend on which workers take part, nor on how optimizer state is shared out, nor on how a step ends.
        """
        layers = (replace(one, optimizer_bytes=0, state_bytes=0) for one in self.all_layers)
        return self.of_alike_workers.without_ends.with_layers(layers)
