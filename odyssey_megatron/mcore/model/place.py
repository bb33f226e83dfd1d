"""Which part of its layers a rank has, and its place among those that have the same: the first one speaks for all."""

from __future__ import annotations

from dataclasses import dataclass

from odyssey_megatron.cluster.cell import Cell
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
        """Those that hold this rank's part of ``layer``, the one that speaks for it first; of the experts of it, if
        they are ``spread`` over ranks.
        """
        holders, speaker = self.layout.all_holders[layer], self.layout.speaker(layer)
        order = [speaker, *(worker for worker in holders if worker != speaker)]
        cell = self.cell
        parts, full = (
            (cell.expert_parts, cell.full_expert_parts) if spread else (cell.tensor, cell.full_tensor)
        )
        each = cell.full // full  # as many numbers as a whole cell has ranks for it
        return order.index(self.worker) * each + cell.index // parts

    @property
    def parts(self) -> tuple[int, ...]:
        """Of the different parts of a layer that ranks of a cell have, this one's numbers."""
        return self.cell.own(self.cell.parts)

    @property
    def shards(self) -> tuple[str, ...]:
        """Their names: ``tp0``, ..., with experts that are spread over ranks ``part0``, ...; empty: all of it."""
        kind = "part" if self.cell.full_expert > 1 else "tp" if self.cell.parts > 1 else ""
        return tuple(f"{kind}{part}" if kind else "" for part in self.parts)

    def first_of(self, layer: HeldLayer) -> set[str]:
        """The names of the weights of ``layer`` of whose holders this rank is the first."""
        spread = {name for name, one in layer.named_parameters() if is_spread(one)}
        return {name for name in layer.weights() if self.among(layer.index, spread=name in spread) == 0}
