"""Which of a rank's gradients are summed with whom (I3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from odyssey_megatron.execute.reduction import Summands
from odyssey_megatron.execute.scatter import Slices
from odyssey_megatron.mcore.model.experts import home_of_all, is_spread
from odyssey_megatron.mcore.model.flat import Cut, Range, ranges
from odyssey_megatron.mcore.model.holdings import Holdings
from odyssey_megatron.mcore.model.layers import LayerBlock, main_grad
from odyssey_megatron.plan.placing.stretches import Stretches


class Sums:
    """Gives the gradients of this rank's layers as the ranks of whole cells sum them. Implements
    ``execute.interpreter.Sums``.

    In a whole cell these are Megatron's own buffers. In a smaller one they are copies, part by part, laid out as on a
    whole cell's ranks; :meth:`take_sums` writes them back.
    """

    def __init__(self, holdings: Holdings, *, share: float):
        """``share``: the factor by which gradients are multiplied before they are summed."""
        self.share = share
        self._holdings = holdings
        self._staged: dict[tuple[int, int, int, bool], _Staged] = {}
        """The copies by (first layer, last layer + 1, part, of experts that are spread over ranks)."""

    def summands(self, first: int, last: int, part: int, *, spread: bool) -> Summands:
        """See ``execute.interpreter.Sums.summands``."""
        block = self._holdings.block_with(first, last)
        gradients = self._expert_gradients if spread else self._gradients
        return Summands(
            gradients(block, first, last, part),
            self._slices(block, first, last, part, spread=spread),
            () if spread else self._partial(block, first, last, part),
        )

    def take_sums(self) -> None:
        """Write the copies, which have been summed, back into the layers' gradients."""
        for one in self._staged.values():
            one.put_back()

    def forget(self) -> None:
        """Drop all copies."""
        self._staged.clear()

    def _gradients(self, block: LayerBlock, first: int, last: int, part: int) -> Sequence[torch.Tensor]:
        """The gradients of layers ``[first, last)`` of ``block``, 1-D."""
        parts = self._holdings.parts
        if parts.each.shards == 1:
            return block.gradients(first, last)
        staged = _Staged.of(block.buffered(first, last), parts.each.shards, parts.number(part))
        self._staged[first, last, part, False] = staged
        return staged.buffers

    def _expert_gradients(
        self, block: LayerBlock, first: int, last: int, part: int
    ) -> Sequence[torch.Tensor]:
        """The same for experts that are spread over ranks; in place, too, where parts are runs of experts."""
        parts = self._holdings.parts
        if not parts.each.cuts_experts:
            return block.expert_gradients(first, last)
        if parts.each.runs:
            return self._of_run(block, first, last, part)
        ours = {one for layer in block.inside(first, last) for one in parts.of_part(layer, part)}
        every = block.buffered(first, last, spread=True)
        staged = _Staged.of([[one for one in own if id(one) in ours] for own in every], 1, 0)
        self._staged[first, last, part, True] = staged
        return staged.buffers

    def _of_run(self, block: LayerBlock, first: int, last: int, part: int) -> list[torch.Tensor]:
        """The gradients of the experts in ``part``, a run of them, of layers ``[first, last)`` of ``block``: 1-D, in
        place, each of what lies together on every rank. A whole gang beside an uneven one has no room planned for
        copies.
        """
        found = []
        for layer in block.inside(first, last):
            ours, together = (
                self._holdings.parts.of_part(layer, part),
                dict[tuple[int, str], list[torch.Tensor]](),
            )
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

    def _partial(self, block: LayerBlock, first: int, last: int, part: int) -> Sequence[torch.Tensor]:
        """Views of those of :meth:`_gradients` of which each tensor-parallel rank has computed only a part."""
        partial = block.partial_parameters(first, last)
        if self._holdings.parts.each.shards == 1:
            return [main_grad(one) for one in partial]
        return self._staged[first, last, part, False].of_parameters(partial)

    def _slices(
        self, block: LayerBlock, first: int, last: int, part: int, *, spread: bool
    ) -> Sequence[Slices]:
        """Who needs which slices of the gradients; empty where every holder of these layers needs all sums."""
        layout, parts = self._holdings.layout, self._holdings.parts
        holders, states = layout.all_holders[first], layout.states
        kind = Stretches.of(self._holdings.cell, layout).kinds[-1 if spread else 0]
        count, each = kind.stretches, [states[layer] for layer in range(first, last)]
        if count == 1 and all(len(one.owners) == len(holders) for of_layer in each for one in of_layer):
            return []
        found, number = [], parts.number(part) if spread else None
        for layer in block.inside(first, last):
            for of_layer, owners in states[layer.index]:
                for stretch in range(count):
                    own = [
                        self._numbers(one, first, last, part, spread=spread)
                        for one in ranges(layer, parts.each, [kind.cut(of_layer, stretch)], number)
                        if is_spread(one.parameter) == spread
                    ]
                    found.append(Slices(tuple(map(holders.index, owners)), own, stretch, count))
        return found

    def _numbers(self, one: Range, first: int, last: int, part: int, *, spread: bool) -> torch.Tensor:
        """The gradients of the numbers ``one``, as a 1-D view of the gradients that are summed."""
        each = self._holdings.parts.each
        if (each.experts if spread else each.shards) == 1:
            return one.of_part(main_grad(one.parameter), 0)
        (staged,) = self._staged[first, last, part, spread].of_parameters([one.parameter])
        return staged.reshape(-1)[one.start : one.stop]


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
