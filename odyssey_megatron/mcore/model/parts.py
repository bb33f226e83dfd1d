"""The parts that a rank of a smaller cell has, as the job's tensor parallelism defines them.

A job with tensor parallelism T cuts a layer into T parts. A cell that has lost ranks goes on with t of them, each with
``tensor_each`` = T/t consecutive parts. Its modules are Megatron's own for tensor parallelism t: each of their tensors
is composed of those parts' tensors (``flat.Cut``). Whatever leaves such a rank, or arrives there, goes part by part,
with the names, shapes, order and flat buffers of a whole cell's rank. Where the cell only has fewer context-parallel
ranks, t is T. A rank of a smaller gang has the experts of several consecutive expert-parallel ranks: each expert is in
one part only, and everything else is the same in all of these parts. With an uneven gang in the job, these parts are
the runs of experts that no rank shares out (``Cell.runs``), and a rank of a whole gang may have several, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.shapes import ONE
from odyssey_megatron.mcore.model.experts import in_whole, is_spread, of_one_rank
from odyssey_megatron.mcore.model.flat import Cut
from odyssey_megatron.mcore.model.layers import HeldLayer

Tensors = Mapping[str, torch.Tensor]


class Parts:
    """The parts that this rank of ``cell`` has of each layer."""

    def __init__(self, cell: Cell):
        self.each, self._numbers = cell.parts.each, cell.parts.held

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def number(self, part: int) -> int:
        """The position of ``part`` among those of this rank."""
        return self._numbers.index(part)

    @property
    def is_one(self) -> bool:
        """Whether this rank has one part, as in whole cells: then parts are the tensors themselves, and nothing here
        has an effect.
        """
        return self.each == ONE

    def of(self, layer: HeldLayer, tensors: Tensors, part: int) -> dict[str, torch.Tensor]:
        """The ``part`` of ``tensors`` of ``layer``, weights or state, with names and shapes of a whole cell."""
        if self.is_one:
            return dict(tensors)
        number = self._numbers.index(part)
        if self.each.cuts_experts:
            return self._with_experts(layer, tensors, number)
        cuts = self._cuts(layer, tensors)
        return {name: cuts[name].part(one.detach(), number) for name, one in tensors.items()}

    @torch.no_grad()
    def arrived(self, layer: HeldLayer, tensors: Tensors, part: int, sent: Tensors) -> None:
        """Take over ``sent``, which was received into what :meth:`of` has returned, as that ``part`` of ``tensors``."""
        if self.each.shards > 1:  # otherwise these are the tensors themselves
            cuts, number = self._cuts(layer, tensors), self._numbers.index(part)
            for name, one in sent.items():
                cuts[name].put(tensors[name], number, one)

    def bytes_of_one(self, layer: HeldLayer) -> int:
        """Bytes of everything that a rank of a whole cell has of ``layer``; optimizer state is extrapolated from what
        is kept here.
        """
        weights, spread = layer.weights(), self.spread(layer)
        cuts = self._cuts(layer, weights) if self.each.shards > 1 else {}
        experts = self.each.times_experts(of_one_rank(layer.config)) if spread else 1
        of_weights = sum(
            one.nbytes
            // (self.each.shards if name in cuts and cuts[name].dim is not None else 1)
            / (experts if name in spread else 1)
            for name, one in weights.items()
        )
        return round(of_weights) + (layer.optimizer.part_bytes() if layer.optimizer else 0)

    def _cuts(self, layer: HeldLayer, names: Iterable[str]) -> dict[str, Cut]:
        """The cut of each tensor in ``names``: parameters, and their optimizer state, which is cut in the same way."""
        parameters, each = dict(layer.named_parameters()), self.each.shards
        found = {}
        for name in names:
            if (parameter := parameters.get(name)) is None:
                parameter = parameters[name.rpartition(".")[0]]
            alike = name.endswith(".step")
            found[name] = Cut(each) if alike else Cut.of(parameter, each)
        return found

    # -- experts ----------------------------------------------------------------------------------------------------

    @staticmethod
    def spread(layer: HeldLayer) -> set[str]:
        """The names of the parameters of experts that are spread over ranks."""
        return {name for name, one in layer.named_parameters() if is_spread(one)}

    def _with_experts(self, layer: HeldLayer, tensors: Tensors, number: int) -> dict[str, torch.Tensor]:
        """The tensors themselves, without the experts of other parts, with the names and in the order of a whole cell's
        rank: weights by name, then buffers, then optimizer state by the names of the parameters.
        """
        parameters, found = dict(layer.named_parameters()), list[tuple[int, str, str, torch.Tensor]]()
        for name, one in tensors.items():
            kind, parameter, kept = 0, name, ""
            if name not in parameters:
                before, _, behind = name.rpartition(".")
                kind, parameter, kept = (2, before, f".{behind}") if before in parameters else (1, "", name)
            if parameter and is_spread(parameters[parameter]):
                part, parameter = in_whole(parameter, of_one_rank(layer.config), self.each)
                if part != number:
                    continue
            found.append((kind, parameter, f"{parameter}{kept}", one.detach()))
        return {name: one for *_, name, one in sorted(found, key=lambda each: each[:2])}

    def of_part(self, layer: HeldLayer, part: int) -> set[int]:
        """The ids of the expert parameters that are in ``part``."""
        number, count = self._numbers.index(part), of_one_rank(layer.config)
        names = {name: one for name, one in layer.named_parameters() if is_spread(one)}
        return {id(one) for name, one in names.items() if in_whole(name, count, self.each)[0] == number}


# -- which cells can be made smaller -----------------------------------------------------------------------------------


def adapt(config: Any, cell: Cell) -> Any:
    """Change the ``config`` of the job's model to the parallel sizes of ``cell``; returns a copy of what it was."""
    if cell.each == 1:
        return config
    whole = copy.copy(config)
    config.tensor_model_parallel_size = cell.tensor
    config.sequence_parallel = config.sequence_parallel and cell.tensor > 1
    config.context_parallel_size = cell.context
    if cell.context_each > 1:
        config.hierarchical_context_parallel_sizes = None
    if cell.uneven:
        # A rank without a lane in a turn sends no token anywhere, and the fused kernel makes room for all of them.
        config.moe_permute_fusion = False
    return whole
