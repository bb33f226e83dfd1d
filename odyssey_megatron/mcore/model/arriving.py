"""Layers and optimizer state that others send to this rank, kept apart from what it holds until all of it is here."""

from __future__ import annotations

from collections.abc import Sequence

from odyssey_megatron.mcore.model.layers import HeldLayer
from odyssey_megatron.mcore.model.optimizer import LayerOptimizer
from odyssey_megatron.plan.placing.slices import Span, without


class Arriving:
    """What is expected of each layer: the whole layer if it is new here, only optimizer state if it is held already."""

    def __init__(self) -> None:
        self._layers: dict[int, HeldLayer] = {}
        """The new layers, until a layout takes them."""
        self._states: dict[int, LayerOptimizer] = {}
        self._lacking: dict[int, list[Span]] = {}
        """The spans of each state that have not arrived yet."""

    def expect(
        self, layer: HeldLayer, state: LayerOptimizer, lacking: Sequence[Span], *, is_new: bool
    ) -> None:
        """Expect ``state`` of ``layer``, of which only the spans ``lacking`` are still missing; ``is_new``: expect the
        layer, too.
        """
        if is_new:
            self._layers[layer.index] = layer
        self._states[layer.index], self._lacking[layer.index] = state, [*lacking]

    def layer(self, index: int) -> HeldLayer | None:
        """The layer of that ``index`` if it is a new one, else None."""
        return self._layers.get(index)

    def state(self, index: int) -> LayerOptimizer | None:
        return self._states.get(index)

    @property
    def states(self) -> dict[int, LayerOptimizer]:
        return self._states

    def came(self, index: int, span: Span) -> None:
        """Note that ``span`` of the state of layer ``index`` has arrived."""
        if index in self._lacking:
            self._lacking[index] = [*without(self._lacking[index], [span])]

    @property
    def lacking(self) -> list[int]:
        """The layers whose state has not arrived completely."""
        return [index for index, spans in self._lacking.items() if spans]

    def take_layers(self) -> dict[int, HeldLayer]:
        """Hand over the new layers; they count as held from now on, even if their contents are still on their way."""
        layers, self._layers = self._layers, {}
        return layers

    def clear(self) -> None:
        self._layers.clear()
        self._states.clear()
        self._lacking.clear()
