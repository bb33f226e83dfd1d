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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.shapes import ONE
from odyssey_megatron.mcore.model.experts import home_of_all, in_whole, is_spread, of_one_rank
from odyssey_megatron.mcore.model.flat import Cut
from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock, main_grad

Tensors = Mapping[str, torch.Tensor]


class Parts:
    """The parts that this rank of ``cell`` has of each layer."""

    def __init__(self, cell: Cell):
        self.each, self._numbers = cell.parts.each, cell.parts.held
        self._staged: dict[tuple[int, int, int, bool], _Staged] = {}

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

    # -- gradients ------------------------------------------------------------------------------------------------

    def stage(self, block: LayerBlock, first: int, last: int, part: int, *, spread: bool = False) -> _Staged:
        """Copy the gradients of layers ``[first, last)`` of ``block``, or of their experts that are ``spread`` over
        ranks, into buffers like a whole cell's.
        """
        if spread:
            ours = {one for layer in block.inside(first, last) for one in self.of_part(layer, part)}
            every = block.buffered(first, last, spread=True)
            made = _Staged.of([[one for one in own if id(one) in ours] for own in every], 1, 0)
        else:
            number = self._numbers.index(part)
            made = _Staged.of(block.buffered(first, last), self.each.shards, number)
        self._staged[first, last, part, spread] = made
        return made

    def of_run(self, block: LayerBlock, first: int, last: int, part: int) -> list[torch.Tensor]:
        """The gradients of the experts in ``part``, a run of them, of layers ``[first, last)`` of ``block``: 1-D, in
        place, each of what lies together on every rank. A whole gang beside an uneven one has no room planned for
        copies.
        """
        found = []
        for layer in block.inside(first, last):
            ours, together = self.of_part(layer, part), dict[tuple[int, str], list[torch.Tensor]]()
            for name, one in layer.named_parameters():
                if id(one) in ours:
                    view = main_grad(one)
                    place = view.untyped_storage().data_ptr(), home_of_all(name)
                    together.setdefault(place, []).append(view)
            for views in together.values():
                low = min(one.storage_offset() for one in views)
                high = max(one.storage_offset() + one.numel() for one in views)
                assert high - low == sum(map(torch.Tensor.numel, views)), "another's gradients lie between"
                found.append(views[0].as_strided((high - low,), (1,), low))
        return found

    def staged(self, first: int, last: int, part: int, *, spread: bool = False) -> _Staged:
        """What :meth:`stage` has returned last for these arguments."""
        return self._staged[first, last, part, spread]

    def take_sums(self) -> None:
        """Write the staged gradients, which have been summed, back into the layers' gradients."""
        for one in self._staged.values():
            one.put_back()

    def forget(self) -> None:
        """Drop all that is staged."""
        self._staged.clear()


@dataclass(frozen=True, slots=True)
class _Staged:
    """Copies of the gradients of one part."""

    buffers: list[torch.Tensor]
    """1-D; each is what one of Megatron's buffers has of the part in a whole cell, parameter after parameter."""
    views: list[tuple[torch.nn.Parameter, torch.Tensor]]
    """Each parameter, and the view of its gradient in the buffers."""
    each: int
    number: int
    """The position of the part among those of the rank."""

    @classmethod
    @torch.no_grad()
    def of(cls, buffered: Iterable[Sequence[torch.nn.Parameter]], each: int, number: int) -> _Staged:
        made: _Staged = cls([], [], each, number)
        for parameters in buffered:
            pieces = [Cut.of(one, each).part(main_grad(one), number) for one in parameters]
            buffer = torch.cat([one.reshape(-1) for one in pieces])
            made.buffers.append(buffer)
            cut = torch.split(buffer, [one.numel() for one in pieces])
            for parameter, piece, view in zip(parameters, pieces, cut, strict=True):
                made.views.append((parameter, view.view(piece.shape)))
        return made

    @torch.no_grad()
    def put_back(self) -> None:
        for parameter, view in self.views:
            Cut.of(parameter, self.each).put(main_grad(parameter), self.number, view)

    def of_parameters(self, wanted: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """The views of the ``wanted`` parameters, in their order."""
        views = {id(parameter): view for parameter, view in self.views}
        return [views[id(one)] for one in wanted]


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
