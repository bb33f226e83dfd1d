"""Which part of its layers a rank has, and its place among those that have the same; the first speaks for all."""

from __future__ import annotations

from dataclasses import dataclass

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.mcore.model.experts import is_spread
from odyssey_megatron.mcore.model.layers import HeldLayer
from odyssey_megatron.plan.layout import Layout


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one rank under a layout."""

    layout: Layout
    worker: int
    cell: Cell

    def among(self, layer: int, *, spread: bool = False, turn: int = 0) -> int:
        """This rank's place among those that hold its part of ``layer``, where the one that speaks for the part has
        place 0; or of the layer's experts, if they are ``spread`` over ranks.

        In each ``turn`` another holder speaks, if all of them have all of the state.
        """
        holders, speaker = self.layout.all_holders[layer], self.layout.speaker(layer)
        order = [speaker, *(worker for worker in holders if worker != speaker)]
        turn = 0 if self.layout.keepers else turn % len(order)
        order = order[turn:] + order[:turn]
        cell = self.cell
        if spread and cell.runs:
            return order.index(self.worker)  # one rank of each gang has a run
        parts, full = (
            (cell.expert_parts, cell.parts.of_experts) if spread else (cell.tensor, cell.full_tensor)
        )
        each = cell.full // full  # the number of ranks of a whole cell that have the same part
        return order.index(self.worker) * each + cell.index // parts

    @property
    def shards(self) -> tuple[str, ...]:
        """The names of the parts that this rank has: ``tp0``, ..., with experts that are spread over ranks ``part0``,
        ...; empty: the whole layer.
        """
        if self.cell.runs:
            return tuple(self._of_run(at) for at in self.cell.held_runs)
        parts = self.cell.parts
        kind = "part" if self.cell.full_expert > 1 else "tp" if parts.count > 1 else ""
        return tuple(f"{kind}{part}" if kind else "" for part in parts.held)

    @property
    def shard(self) -> str:
        """The name of what this rank has in a gang besides experts; empty: all that a layer has besides them."""
        return f"tp{self.cell.held_shards[0]}" if self.cell.full_tensor > 1 else ""

    def _of_run(self, run: int) -> str:
        """The name of the part with a run of experts: that of the part of a whole gang that it is in, and where."""
        whole, offset = divmod(self.cell.runs[run], self.cell.experts // self.cell.full_expert)
        part = f"part{self.cell.tensor_rank + self.cell.tensor * whole}"
        return f"{part}+{offset}" if offset else part

    def first_of(self, layer: HeldLayer) -> set[str]:
        """The names of the weights of ``layer`` for which this rank is the first of its holders."""
        spread = {name for name, one in layer.named_parameters() if is_spread(one)}
        return {name for name in layer.weights() if self.among(layer.index, spread=name in spread) == 0}
