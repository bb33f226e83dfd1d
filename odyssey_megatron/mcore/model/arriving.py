"""Layers, and optimizer state, that others send to this rank: kept apart from what it holds until all of it is here."""

from __future__ import annotations

from collections.abc import Sequence

from odyssey_megatron.mcore.model.layers import HeldLayer
from odyssey_megatron.mcore.model.optimizer import LayerOptimizer
from odyssey_megatron.plan.slices import Span, without


class Arriving:
    """By layer. What a layer that is held already lacks is state only."""

    def __init__(self) -> None:
        self._layers: dict[int, HeldLayer] = {}
        """New ones, until a layout takes them."""
        self._states: dict[int, LayerOptimizer] = {}
        self._lacking: dict[int, list[Span]] = {}
        """Of each state, what has not come."""

    def expect(
        self, layer: HeldLayer, state: LayerOptimizer, lacking: Sequence[Span], *, is_new: bool
    ) -> None:
        """``state`` of ``layer``, but for what is here already; ``is_new``: the layer, too."""
        if is_new:
            self._layers[layer.index] = layer
        self._states[layer.index], self._lacking[layer.index] = state, [*lacking]

    def layer(self, index: int) -> HeldLayer | None:
        """If it is a new one."""
        return self._layers.get(index)

    def state(self, index: int) -> LayerOptimizer | None:
        return self._states.get(index)

    @property
    def states(self) -> dict[int, LayerOptimizer]:
        return self._states

    def came(self, index: int, span: Span) -> None:
        """That ``span`` of it."""
        if index in self._lacking:
            self._lacking[index] = [*without(self._lacking[index], [span])]

    @property
    def lacking(self) -> list[int]:
        """Layers of which not all has come."""
        return [index for index, spans in self._lacking.items() if spans]

    def take_layers(self) -> dict[int, HeldLayer]:
        """The new ones, which are held from now on, be they on their way."""
        layers, self._layers = self._layers, {}
        return layers

    def clear(self) -> None:
        self._layers.clear()
        self._states.clear()
        self._lacking.clear()
