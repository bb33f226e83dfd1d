"""Moving layers: the state that new holders lack, from those who have it. Old holders keep theirs until a step is
committed in the new generation, so an interrupted transfer loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.names import layer_name
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.plan import Transfer
from odyssey_megatron.rebuild.manifest import Tensors, agree

TensorsOf = Callable[[int, int], Tensors]
"""Layer and part -> all its tensors by name, in an order that is the same on every rank."""


class Moving:
    """Transfers under way: what this worker sends and receives of them; every part of a layer travels as one message.

    What is sent must not change before :meth:`finish` returns, and what is received is not there before. Methods raise
    what the group raises when the generation ends.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        *,
        num_layers: int,
        cell: Cell,
        world: dist.ProcessGroup,
        way: Callable[[Transfer, int, int], tuple[int, dict[str, Any]]],
        tensors_to_send: TensorsOf,
        tensors_to_fill: TensorsOf,
        filled: Callable[[int, int, Tensors], None],
        checkpoint: Callable[[], None],
    ):
        """Collective over ``world``, of all members, wherever there are transfers.

        Args:
            way: of a transfer, its number and a place in the cell: the rank at the other end, and how
                ``torch.distributed`` is told where it goes.
            filled: is called with a layer and a part whose tensors have come, and with these.
            checkpoint: is called between layers.

        Raises:
            TensorsDiffer: before anything is sent, on all members alike.
        """
        self._checkpoint, self._filled = checkpoint, filled
        self._sends: list[tuple[Any, torch.Tensor]] = []
        self._receives: list[tuple[Any, torch.Tensor, tuple[int, int, Tensors]]] = []
        self.arriving: set[int] = set()
        """Layers."""
        ours: dict[tuple[int, int, int], Tensors] = {}
        for tag, transfer in enumerate(transfers):
            if cell.worker in (transfer.source, transfer.target):
                checkpoint()
                of_layer = tensors_to_send if transfer.source == cell.worker else tensors_to_fill
                for place, part in zip(cell.places, cell.held_parts, strict=True):
                    ours[tag, place, part] = of_layer(transfer.layer, part)
        if transfers:
            agree(
                {tag * cell.full + place: tensors for (tag, place, _), tensors in ours.items()},
                len(transfers) * cell.full,
                world,
                who=f"rank {cell.rank}",
                what=lambda at: layer_name(transfers[at // cell.full].layer, num_layers),
            )
        for (tag, place, part), tensors in ours.items():
            if not tensors:  # an embedding whose only weight is the head's, too
                continue
            checkpoint()
            transfer, flat = transfers[tag], _packed(tensors)
            rank, where = way(transfer, tag, place)
            if transfer.source == cell.worker:
                self._sends.append((dist.isend(flat, rank, **where), flat))
            else:
                work, layer = dist.irecv(flat, rank, **where), transfer.layer
                self._receives.append((work, flat, (layer, part, tensors)))
                self.arriving.add(layer)

    def finish(self) -> None:
        """Returns when all has been sent and received."""
        for work, flat, filled in self._receives:
            work.wait()
            _unpack(flat, list(filled[-1].values()))
            self._filled(*filled)
            self._checkpoint()
        for work, _ in self._sends:
            work.wait()
        self.arriving, self._sends, self._receives = set(), [], []


class Spreading:
    """Weights under way behind every step, from the first keeper of each layer to the holders that do not keep its
    optimizer state; those of one keeper and block travel as one message.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        cell: Cell,
        world: dist.ProcessGroup,
        group_of: Callable[[int, int, int], dist.ProcessGroup],
        weights_of: Callable[[Sequence[int], int], Tensors],
        arrived: Callable[[Sequence[int], int, Tensors], None],
    ):
        """Collective over ``world``, of all members, wherever some holders keep no optimizer state.

        Args:
            group_of: the group of a block's holders, from its first layer and the one behind its last; of each all
                ranks that have the same of it as this one in a place that it fills.
            weights_of: of layers and a part, in place or in a copy.
            arrived: is called with layers and a part whose weights have come, and with these.

        Raises:
            TensorsDiffer: before anything is sent, on all members alike.
        """
        self._weights_of, self._arrived = weights_of, arrived
        self._messages: list[tuple[dist.ProcessGroup, int, list[int], int]] = []
        ours: dict[int, Tensors] = {}
        places = list(zip(cell.places, cell.held_parts, strict=True))
        for block in layout.blocks() if layout.keepers else ():
            sources: dict[int, list[int]] = {}
            for layer in range(block.first, block.last):
                if cell.worker in block.holders and len(layout.keepers[layer]) < len(block.holders):
                    sources.setdefault(layout.keepers[layer][0], []).append(layer)
                    ours |= {layer * cell.full + place: weights_of([layer], part) for place, part in places}
            for keeper, layers in sources.items():
                source = block.holders.index(keeper) * (cell.full // cell.parts)
                for place, part in places:
                    group = group_of(block.first, block.last, place)
                    self._messages.append((group, source, layers, part))
        if layout.keepers:
            agree(
                ours,
                len(layout.all_holders) * cell.full,
                world,
                who=f"rank {cell.rank}",
                what=lambda at: f"the weights of {layer_name(at // cell.full, layout.num_layers)}",
            )

    def __len__(self) -> int:
        """Messages, of which each is sent or received here."""
        return len(self._messages)

    def run(self) -> None:
        """Returns when the weights are here; on the keepers, when they may change."""
        for group, source, layers, part in self._messages:
            if not (tensors := self._weights_of(layers, part)):
                continue
            flat = _packed(tensors)
            dist.broadcast(flat, group=group, group_src=source)
            if group.rank() != source:
                _unpack(flat, list(tensors.values()))
                self._arrived(layers, part, tensors)


def _packed(tensors: Tensors) -> torch.Tensor:
    """All bytes of ``tensors`` in one 1-D uint8 tensor."""
    return torch.cat([one.detach().contiguous().reshape(-1).view(torch.uint8) for one in tensors.values()])


def _unpack(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copies ``flat`` back into ``tensors``; they may start at any byte, hence the clone (alignment)."""
    at = 0
    with torch.no_grad():
        for one in tensors:
            piece = flat[at : at + one.nbytes].clone()
            one.copy_(piece.view(one.dtype).reshape(one.shape))
            at += one.nbytes
