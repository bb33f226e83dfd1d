"""Which part of its layers a rank has, and its place among those that have the same: the first one speaks for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from odyssey_megatron.cluster.state import Cell
from odyssey_megatron.mcore.model.experts import is_spread
from odyssey_megatron.mcore.model.layers import HeldLayer
from odyssey_megatron.plan.layout import Layout


@dataclass(frozen=True, slots=True)
class Place:
    """Of one rank, under a layout."""

    layout: Layout
    worker: int
    cell: Cell

    def among(self, layer: int, *, spread: bool = False) -> int:
        """Those that hold this rank's part of ``layer``, those that keep its optimizer state first; of the experts of
        it, if they are ``spread`` over ranks.
        """
        keepers, holders = self.layout.states[layer], self.layout.all_holders[layer]
        order = [*keepers, *(worker for worker in holders if worker not in keepers)]
        parts = self.cell.expert_parts if spread else self.cell.tensor
        return order.index(self.worker) * (self.cell.size // parts) + self.cell.index // parts

    @property
    def part(self) -> int:
        """Of the different parts of a layer that ranks of a cell have, this one's number."""
        return self.cell.index % self.cell.parts

    @property
    def shard(self) -> str:
        """Its name: ``tp0``, ``tp1``, ..., with experts that are spread over ranks ``part0``, ...; empty: all of it."""
        if self.cell.expert > 1:
            return f"part{self.part}"
        return f"tp{self.part}" if self.cell.parts > 1 else ""

    def weights(self, held: Mapping[int, HeldLayer]) -> dict[int, dict[str, torch.Tensor]]:
        """Layer -> its weights by name, of those that this rank is the first to have."""
        found = {}
        for index, layer in sorted(held.items()):
            spread = {name for name, one in layer.named_parameters() if is_spread(one)}
            found[index] = {
                name: weight.cpu()
                for name, weight in layer.weights().items()
                if self.among(index, spread=name in spread) == 0
            }
        return {index: weights for index, weights in found.items() if weights}
