"""What each model without Megatron has alike: layers that a rank holds, and that move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import Span
from odyssey_megatron.rebuild.manifest import Tensors
from tests.execute.alone import MICROBATCHES

State = dict[str, list[torch.Tensor]]
"""Of a layer, by the names of its pieces: ``w1`` is tensor-parallel part 1 of its weight, ``e1`` the experts of part 1
of a gang. What there is of each."""


@dataclass
class Outcome:
    losses: dict[str, float]
    grad_norm: float = 0.0
    lr: float = 0.05
    tokens: int = MICROBATCHES
    num_microbatches: int = MICROBATCHES
    skipped: bool = False
    dealt: tuple[float, float] | None = None


class NoLossScale:
    """Implements ``execute.parts.LossScale``."""

    blames_nobody = False

    def state(self) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.float64)


class Held:
    """The layers of a rank, and what of ``execute.parts.Model`` follows from them; the rest as in a cell of one rank
    that keeps all optimizer state.
    """

    cuts_activations = False
    share = 1.0
    loss_scale = NoLossScale()

    @property
    def holdings(self) -> Any:
        """It is all parts of such a model itself; so for those that follow."""
        return self

    transfer = compute = sums = end = holdings

    def __init__(self) -> None:
        self.held: dict[int, State] = {}
        self._incoming: dict[int, State] = {}

    def _names(self, layer: int) -> list[str]:
        """The pieces of it that this rank has."""
        return ["w0"]

    def _of_part(self, layer: int, part: int) -> list[str]:
        """Those of them that move with a part (``Parts.held``)."""
        return self._names(layer)

    def _begun(self, layer: int, name: str) -> list[torch.Tensor]:
        raise NotImplementedError

    def _empty(self, layer: int, name: str) -> list[torch.Tensor]:
        """Room for the same."""
        raise NotImplementedError

    def take_cell(self, cell: Cell) -> None:
        """No experts of it are cut otherwise."""

    def create_layers(self, layers: tuple[int, ...], kept: Mapping[int, tuple[Span, ...]]) -> None:
        for layer in layers:
            self.held.setdefault(layer, {name: self._begun(layer, name) for name in self._names(layer)})

    def moved_bytes(self, layer: int) -> int:
        return sum(one.nbytes for piece in self.held[layer].values() for one in piece)

    def optimizer_bytes(self) -> int:
        return sum(map(self.moved_bytes, self.held))

    def weights_of(self, layer: int, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        return {name: self.held[layer][name][0] for name in self._of_part(layer, part)}

    def tensors_to_send(self, layer: int, part: int, span: Span) -> dict[str, torch.Tensor]:
        return _named(self.held[layer], self._of_part(layer, part))

    def tensors_to_fill(self, layer: int, part: int, span: Span) -> dict[str, torch.Tensor]:
        names = self._of_part(layer, part)
        room = self._incoming.setdefault(layer, {})
        room |= {name: self._empty(layer, name) for name in names if name not in room}
        return _named(room, names)

    def discard_incoming(self) -> None:
        self._incoming.clear()

    def forget(self) -> None:
        self.discard_incoming()
        self.held.clear()

    def take_layout(self, layout: Layout, worker: int) -> None:
        self.held.update(self._incoming)

    def expect(self, kept: Mapping[int, tuple[Span, ...]]) -> None: ...

    def filled(self, layer: int, part: int, span: Span, tensors: Tensors) -> None: ...

    def settled(self) -> None:
        self.held.update(self._incoming)
        self._incoming.clear()

    def take_over(self, totals: torch.Tensor, step: int, scale: torch.Tensor) -> None:
        assert not scale.numel()

    def weights_arrived(self, layer: int, part: int, spans: Sequence[Span], tensors: Tensors) -> None: ...

    def take_sums(self) -> None: ...

    def kept(self, microbatch: int, first: int, last: int) -> None: ...

    def expert_loads(self) -> dict[int, float]:
        return {}

    def timed(self, took_s: object) -> None:
        """All microbatches are alike."""


def _named(state: State, names: Iterable[str]) -> dict[str, torch.Tensor]:
    return {f"{name}.{at}": one for name in names for at, one in enumerate(state[name])}
