"""Moving layers: the state that new holders lack, from those who have it. Old holders keep theirs until a step is
committed in the new generation, so an interrupted transfer loses nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.names import layer_name
from odyssey_megatron.plan.gathers import gather_order
from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.plan import Transfer
from odyssey_megatron.plan.slices import EVERYTHING, Span, firsts, kept
from odyssey_megatron.rebuild.manifest import Message, Tensors, agree, agree_on_messages

TensorsOf = Callable[[int, int, Span], Tensors]
"""Layer, part, and what of it -> all its tensors by name, in an order that is the same on every rank."""


class Way(NamedTuple):
    """Of a part of a layer that moves, from or to this rank."""

    part: int
    slot: int
    """``Cell.slot`` of the rank that it goes to."""
    rank: int
    """At the other end."""
    where: dict[str, Any]
    """How ``torch.distributed`` is told it."""


class Moving:
    """This worker's transfers under way, those that it sends and is sent; every part of a layer travels as one message.

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
        ways: Callable[[Transfer, int], Sequence[Way]],
        tensors_to_send: TensorsOf,
        tensors_to_fill: TensorsOf,
        filled: Callable[[int, int, Span, Tensors], None],
        checkpoint: Callable[[], None],
    ):
        """Collective over ``world``, of all members, also of those that neither send nor receive anything.

        Args:
            transfers: of this worker, in an order that those at the other ends have, too.
            ways: of a transfer, and its number among those from its source to its target: of its parts.
            filled: is called with a layer, a part and a span of it whose tensors have come, and with these.
            checkpoint: is called between layers.

        Raises:
            TensorsDiffer: before anything is sent, on all members alike.
        """
        self._checkpoint, self._filled = checkpoint, filled
        self._sends: list[tuple[Any, torch.Tensor]] = []
        self._receives: list[tuple[Any, torch.Tensor, tuple[int, int, Span, Tensors]]] = []
        self.arriving: set[int] = set()
        """Layers."""
        ours: list[tuple[Transfer, Message, Way, Tensors]] = []
        numbers: dict[tuple[int, int], Iterator[int]] = defaultdict(count)
        for transfer in transfers:
            checkpoint()
            number = next(numbers[transfer.source, transfer.target])
            of_layer = tensors_to_send if transfer.source == cell.worker else tensors_to_fill
            for way in ways(transfer, number):
                message = Message(transfer.layer, transfer.source, transfer.target, number, way.slot)
                ours.append((transfer, message, way, of_layer(transfer.layer, way.part, transfer.span)))
        agree_on_messages(
            {message: tensors for one, message, _, tensors in ours if one.source == cell.worker},
            {message: tensors for one, message, _, tensors in ours if one.target == cell.worker},
            world,
            who=f"rank {cell.rank}",
            what=lambda message: layer_name(message.layer, num_layers),
        )
        for transfer, _, way, tensors in ours:
            if not tensors:  # an embedding whose only weight is the head's, too
                if transfer.target == cell.worker:
                    filled(transfer.layer, way.part, transfer.span, tensors)
                continue
            checkpoint()
            flat = packed(tensors.values())
            if transfer.source == cell.worker:
                self._sends.append((dist.isend(flat, way.rank, **way.where), flat))
            else:
                work, layer = dist.irecv(flat, way.rank, **way.where), transfer.layer
                self._receives.append((work, flat, (layer, way.part, transfer.span, tensors)))
                self.arriving.add(layer)

    def finish(self) -> None:
        """Returns when all has been sent and received."""
        for work, flat, filled in self._receives:
            work.wait()
            unpack(flat, list(filled[-1].values()))
            self._filled(*filled)
            self._checkpoint()
        for work, _ in self._sends:
            work.wait()
            self._checkpoint()
        self.arriving, self._sends, self._receives = set(), [], []


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

ROOM_BYTES = 2**29
"""For weights on their way, at least. Those for which there is no room wait until the oldest are where they belong."""


def _room_bytes(device: torch.device) -> int:
    """As much as steps have needed besides what is here between them: activations, of which a step begins without any.

    The allocator of the device knows it, and nobody waits for the device. What others have is no matter: who has no
    room waits for weights alone.
    """
    if device.type != "cuda":
        return ROOM_BYTES
    used = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return max(ROOM_BYTES, used)


class Spreading:
    """Weights under way behind every step: the holders of a block, each of which has stepped some slices of its layers
    first, gather all of them. Those who keep a slice, too, have stepped it themselves.

    They are under way while the next step begins: whoever needs those of a layer waits for them (:meth:`arrive`).
    """

    def __init__(
        self,
        layout: Layout,
        buckets: Sequence[Block],
        *,
        cell: Cell,
        world: dist.ProcessGroup,
        holders_of: Callable[[int, int, int], tuple[dist.ProcessGroup, Sequence[int]]],
        weights_of: Callable[[int, int, Sequence[Span]], Tensors],
        arrived: Callable[[int, int, Sequence[Span], Tensors], None],
    ):
        """Collective over ``world``, of all members, wherever some holders do not keep all optimizer state.

        Args:
            buckets: the blocks of this worker, cut into what travels as one message: the same on all their holders.
            holders_of: the group of a block's holders, from its first layer and the one behind its last, and a
                ``Cell.slot`` of this rank; of each all ranks that have the same of it, and how many these are.
            weights_of: of a layer, a part and spans of it, in place or in a copy.
            arrived: is called with a layer, a part and spans whose weights have come, and with these.

        Raises:
            TensorsDiffer: before anything is sent, on all members alike.
        """
        self._weights_of, self._arrived = weights_of, arrived
        self._messages: list[_Message] = []
        self._under_way: deque[_UnderWay] = deque()
        ours: dict[int, Tensors] = {}
        states = layout.states
        for bucket in gather_order(buckets, layout.num_layers) if layout.keepers else ():
            slices = {
                layer: states[layer]
                for layer in range(bucket.first, bucket.last)
                if any(len(one.owners) < len(bucket.holders) for one in states[layer])
            }
            if not slices:
                continue
            block = next(one for one in layout.blocks() if one.first <= bucket.first < one.last)
            stepped = [
                [(layer, span) for layer, found in slices.items() for span in firsts(found).get(worker, ())]
                for worker in bucket.holders
            ]
            own = {
                (layer, span) for layer, found in slices.items() for span in kept(found).get(cell.worker, ())
            }
            for part in cell.held_parts:
                slot = cell.slot(part)
                ours |= {layer * cell.full + slot: weights_of(layer, part, [EVERYTHING]) for layer in slices}
                group, ranks = holders_of(block.first, block.last, slot)
                self._messages.append(_Message(group, ranks, part, frozenset(slices), stepped, own))
        if layout.keepers:
            agree(
                ours,
                len(layout.all_holders) * cell.full,
                world,
                who=f"rank {cell.rank}",
                what=lambda at: f"the weights of {layer_name(at // cell.full, layout.num_layers)}",
            )

    @property
    def has_part(self) -> bool:
        """This rank sends or receives any."""
        return bool(self._messages)

    def __bool__(self) -> bool:
        """Some are under way."""
        return bool(self._under_way)

    def begin(self) -> None:
        """Sends what this rank has stepped. It must not change, and others' is not here, before :meth:`arrive`."""
        room: int | None = None
        for message in self._messages:
            every = self._weights(message)
            sizes = [sum(one.nbytes for _, own in each for one in own.values()) for each in every]
            # Each comes in pieces from all ranks of a cell that have the same.
            if not (length := max(-(-size // each) for size, each in zip(sizes, message.ranks, strict=True))):
                continue
            some = next(one for each in every for _, own in each for one in own.values())
            room = _room_bytes(some.device) if room is None else room
            room -= message.group.size() * length
            while self._under_way and room < 0:
                room += self._end(self._under_way.popleft())
            index, piece = places(message.ranks)[message.group.rank()]
            gathered = some.new_empty((message.group.size(), length), dtype=torch.uint8)
            mine = gathered.new_zeros(message.ranks[index] * length)
            if sizes[index]:
                mine[: sizes[index]] = packed([one for _, own in every[index] for one in own.values()])
            # Not into a list: NCCL's backend would gather into as much memory again, and copy.
            own = mine[piece * length : (piece + 1) * length]
            work = _all_gather(gathered.view(-1), own, group=message.group, async_op=True)
            self._under_way.append(_UnderWay(message, work, gathered))

    def arrive(self, layer: int) -> None:
        """Returns when the weights of ``layer`` are here."""
        due = [one for one in self._under_way if layer in one.message.layers]
        for one in due:
            self._under_way.remove(one)
            self._end(one)

    def finish(self) -> None:
        """Returns when all weights are here, and those of this rank may change."""
        while self._under_way:
            self._end(self._under_way.popleft())

    def _weights(self, message: _Message) -> list[list[tuple[tuple[int, Span], Tensors]]]:
        """Of each holder (layer, span) and the weights of those slices of which it is the first owner."""
        return [
            [((layer, span), self._weights_of(layer, message.part, [span])) for layer, span in own]
            for own in message.stepped
        ]

    def _end(self, one: _UnderWay) -> int:
        """It is where it belongs; gives the bytes that were kept for it."""
        one.work.wait()
        rows = torch.split(one.gathered, [*one.message.ranks])
        for each, flat in zip(self._weights(one.message), [row.reshape(-1) for row in rows], strict=True):
            at = 0
            for (layer, span), own in each:
                size = sum(tensor.nbytes for tensor in own.values())
                if (layer, span) not in one.message.keeps:
                    unpack(flat[at : at + size], list(own.values()))
                    self._arrived(layer, one.message.part, [span], own)
                at += size
        return one.gathered.nbytes


class _Message(NamedTuple):
    """Of one bucket."""

    group: dist.ProcessGroup
    ranks: Sequence[int]
    """Of each holder, in the group."""
    part: int
    layers: frozenset[int]
    stepped: list[list[tuple[int, Span]]]
    """Of each holder, the slices of which it is the first owner."""
    keeps: set[tuple[int, Span]]
    """What this worker has stepped itself."""


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    message: _Message
    work: Any
    gathered: torch.Tensor
    """uint8 [ranks, bytes of the longest piece]."""


def places(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(holder, number among its own) of each rank of a group, in which each holder has so many ``ranks``."""
    return [(holder, number) for holder, count in enumerate(ranks) for number in range(count)]


def packed(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All bytes of ``tensors`` in one 1-D uint8 tensor. It is on their device, to which those on the host are copied:
    torch's Adam counts its steps there.
    """
    every = [one.detach() for one in tensors]
    device = next((one.device for one in every if one.device.type != "cpu"), torch.device("cpu"))
    return torch.cat([one.to(device).contiguous().reshape(-1).view(torch.uint8) for one in every])


def unpack(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copies ``flat`` back into ``tensors``; they may start at any byte, hence the clone (alignment). For one on the
    host it waits until ``flat`` has come.
    """
    at = 0
    with torch.no_grad():
        for one in tensors:
            piece = flat[at : at + one.nbytes].clone()
            one.copy_(piece.view(one.dtype).reshape(one.shape))
            at += one.nbytes
