"""Gathers a layer's optimizer state in one place for checkpoints, and sends it back to the owners of its slices.

Each layer is gathered on its own speaker (``Layout.speaker``), so that nobody has more than a fair share of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from odyssey_megatron.mcore.model.holdings import Holdings
from odyssey_megatron.mcore.model.optimizer import LayerOptimizer
from odyssey_megatron.plan.placing.slices import EVERYTHING, Slice, Span, firsts, kept
from odyssey_megatron.plan.placing.stretches import Kind, Seats, Stretches
from odyssey_megatron.rebuild.transfer import packed, unpack

HoldersOf = Callable[[int, int, int, int], tuple[dist.ProcessGroup | None, Sequence[int]]]
"""Maps the first layer of a block, its last + 1, a part that this rank has, and the number of parts to the group of the
block's holders, with all ranks of each holder that have the part, and the number of these ranks for each holder. None:
this rank alone has the part.
"""


class _Part(NamedTuple):
    """A part of a layer whose state is cut, and this rank's task in gathering it."""

    layer: int
    number: int
    """Position of the part among those of this rank."""
    kind: Kind
    """What of the part it is."""
    group: dist.ProcessGroup | None
    seats: Seats
    """Those of the ranks in the group."""
    holders: tuple[int, ...]
    speaker: int
    slices: tuple[Slice, ...]

    @property
    def root(self) -> int:
        """The rank in the group that gathers the part: the speaker's first."""
        return self.seats.keeping(self.holders.index(self.speaker), 0)

    def spans(self, of_workers: Mapping[int, Sequence[Span]]) -> list[tuple[Span, ...]]:
        """What each rank of the group has of the spans of its worker."""
        return [
            self.kind.each(of_workers.get(self.holders[holder], ()), keeps)
            for holder, keeps in self.seats.kept()
        ]

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.group.rank() if self.group is not None else 0

    @property
    def is_here(self) -> bool:
        return self.rank == self.root


class WholeLayers:
    """The layers of a rank whose state is cut."""

    def __init__(self, holdings: Holdings, holders_of: HoldersOf):
        self._holdings, self._holders_of = holdings, holders_of

    def _parts(self) -> Iterator[_Part]:
        place, states = self._holdings.place, self._holdings.place.layout.states
        cell, layout = place.cell, place.layout
        own = Stretches.of(cell, layout)
        parts = [
            (number, part, kind)
            for kind in own.kinds
            for number, part in enumerate(cell.parts.own(kind.parts))
        ]
        for block in layout.blocks() if layout.keepers else ():
            for layer in range(block.first, block.last) if place.worker in block.holders else ():
                if not own.shares_out and not is_cut(states[layer]):
                    continue
                speaker, found = layout.speaker(layer), list[_Part]()
                for number, part, kind in parts:
                    group, ranks = self._holders_of(block.first, block.last, part, kind.parts)
                    seats = Seats(ranks, kind.stretches)
                    found.append(
                        _Part(layer, number, kind, group, seats, block.holders, speaker, states[layer])
                    )
                if any(one.group is not None for one in found):  # else all of it is here
                    yield from found

    def new(self) -> dict[int, LayerOptimizer]:
        """Optimizers with unused state for the layers that are gathered here, by layer."""
        layers = {one.index: one for one in self._holdings.layers}
        made: dict[int, LayerOptimizer] = {}
        for one in self._parts():
            if one.is_here and one.layer not in made:
                made[one.layer] = self._holdings.optimizer_of(layers[one.layer], (EVERYTHING,))
        return made

    @torch.no_grad()
    def gathered(self) -> dict[int, LayerOptimizer]:
        """Optimizers with all owners' current state for the layers that are gathered here, by layer. Collective."""
        made, own = self.new(), {one.index: one.optimizer for one in self._holdings.layers}
        for one in self._parts():
            spans = one.spans(firsts(one.slices))
            flat = _padded(own[one.layer], one, spans[one.rank])
            rooms = [torch.empty_like(flat) for _ in spans] if one.is_here else None
            if one.group is not None:
                dist.gather(flat, rooms, group=one.group, group_dst=one.root)
            else:
                rooms = [flat]
            for theirs, room in zip(spans, rooms or (), strict=False):
                _fill(made[one.layer], one.number, theirs, room)
        return made

    @torch.no_grad()
    def give_back(self, made: dict[int, LayerOptimizer]) -> None:
        """Send all owners what was loaded into the optimizers that :meth:`new` has ``made``. Collective."""
        own = {one.index: one.optimizer for one in self._holdings.layers}
        for one in self._parts():
            mine, spans, rooms = own[one.layer], one.spans(kept(one.slices)), None
            flat = _padded(mine, one, spans[one.rank])
            if one.is_here:
                rooms = [torch.zeros_like(flat) for _ in spans]
                for theirs, room in zip(spans, rooms, strict=True):
                    sent = _bytes(made[one.layer], one.number, theirs)
                    room[: sent.numel()] = sent
            if one.group is not None:
                dist.scatter(flat, rooms, group=one.group, group_src=one.root)
            elif rooms:
                (flat,) = rooms
            if mine is not None:
                _fill(mine, one.number, spans[one.rank], flat)
                mine.take_over()


def _padded(own: LayerOptimizer | None, one: _Part, mine: Sequence[Span]) -> torch.Tensor:
    """This rank's bytes of its spans ``mine``, padded with zeros to the length of the longest: 1-D, uint8."""
    flat = _bytes(own, one.number, mine if own is not None else ())
    if one.group is None:
        return flat
    length = torch.tensor(flat.numel(), device=flat.device)
    dist.all_reduce(length, op=dist.ReduceOp.MAX, group=one.group)
    return torch.cat([flat, flat.new_zeros(int(length) - flat.numel())])


def _bytes(optimizer: LayerOptimizer | None, number: int, spans: Sequence[Span]) -> torch.Tensor:
    tensors = [x for span in spans if optimizer for x in optimizer.numbers(number, span).values()]
    nothing = torch.empty(0, dtype=torch.uint8, device=torch.cuda.current_device())
    return packed(tensors) if tensors else nothing


def is_cut(slices: tuple[Slice, ...]) -> bool:
    """Whether nobody keeps all of the layer's state."""
    return slices[0].span != EVERYTHING


def _fill(optimizer: LayerOptimizer, number: int, spans: Sequence[Span], flat: torch.Tensor) -> None:
    at = 0
    for span in spans:
        room = {name: torch.empty_like(one) for name, one in optimizer.numbers(number, span).items()}
        size = sum(one.nbytes for one in room.values())
        unpack(flat[at : at + size], list(room.values()))
        optimizer.put(number, span, room)
        at += size
