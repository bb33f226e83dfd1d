"""Move layers: send new holders the state that they lack, from workers that have it.

Old holders keep their state until a step is committed in the new generation, so an interrupted transfer loses nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.names import layer_name
from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.placing.slices import EVERYTHING, Slice, Span, firsts, kept
from odyssey_megatron.plan.placing.stretches import Kind, Seats, Stretches
from odyssey_megatron.plan.plan import Transfer
from odyssey_megatron.plan.scheduling.gathers import gather_order
from odyssey_megatron.rebuild.manifest import Message, Tensors, agree, agree_on_messages

TensorsOf = Callable[[int, int, Span], Tensors]
"""(layer, part, span of it) -> all its tensors by name, in an order that is the same on every rank."""


class Way(NamedTuple):
    """The way of one part of a layer that moves from or to this rank."""

    part: int
    slot: int
    """Tells it from the others that go between two workers in one transfer: the place that it goes to, as an index in a
    whole cell (``Parts.slot``), or of cut state ``plan.placing.stretches.Piece.slot``.
    """
    rank: int
    """The rank at the other end."""
    where: dict[str, Any]
    """The keyword arguments for ``torch.distributed`` that say through which group it goes."""
    span: Span = EVERYTHING
    """What of the part goes this way."""


class Moving:
    """The transfers to and from this worker. Each part of a layer travels as one message.

    Messages begin in the order of the plan, which is one for all ranks. A rank without room for another first waits for
    its oldest one. That waits only for messages before it in the plan. So ranks never wait for one another in a circle,
    whatever room each has.

    What is received is not there before :meth:`finish` returns. Methods raise what the group raises when the generation
    ends.
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
        """Begin the transfers. Collective over ``world``: also for members that neither send nor receive anything.

        Args:
            transfers: Those from and to this worker, in the order of the plan.
            world: The group of all members.
            ways: Returns the ways of a transfer's parts, given its number among those of its source and target, too.
            tensors_to_fill: Called again when a message has come, as the tensors may take memory.
            filled: Called with a layer, a part, a span of it, and its tensors, once these have come.
            checkpoint: Called between layers. It may raise to end the transfers.

        Raises:
            TensorsDiffer: On all members alike, before anything is sent.
        """
        self._worker, self._checkpoint, self._filled = cell.worker, checkpoint, filled
        self._tensors_to_send, self._tensors_to_fill = tensors_to_send, tensors_to_fill
        # A send does not wait for room to receive, nor a receive for room to send: layers that go on from worker to
        # worker would move one after the other.
        self._sends, self._receives = _OneWay(self._end), _OneWay(self._end)
        ours = [*self._messages(transfers, ways)]
        agree_on_messages(
            {one.message: one.tensors for one in ours if self._is_sent(one.message)},
            {one.message: one.tensors for one in ours if one.message.target == cell.worker},
            world,
            who=f"rank {cell.rank}",
            what=lambda message: layer_name(message.layer, num_layers),
        )
        room_bytes = next((_room_bytes(one.device) // 2 for one in ours if one.tensors), 0)
        for one in ours:
            if one.tensors:
                self._begin(one, room_bytes)
            elif not self._is_sent(one.message):  # its only weight is tied, and so belongs to another layer
                filled(one.message.layer, one.way.part, one.way.span, one.tensors)

    def _messages(
        self, transfers: Sequence[Transfer], ways: Callable[[Transfer, int], Sequence[Way]]
    ) -> Iterator[_Moved]:
        numbers: dict[tuple[int, int], Iterator[int]] = defaultdict(count)
        for transfer in transfers:
            self._checkpoint()
            number = next(numbers[transfer.source, transfer.target])
            for way in ways(transfer, number):
                message = Message(transfer.layer, transfer.source, transfer.target, number, way.slot)
                tensors = self._tensors(message, way)
                shapes = {
                    name: torch.empty(one.shape, dtype=one.dtype, device="meta")
                    for name, one in tensors.items()
                }
                yield _Moved(message, way, shapes, _device_of(tensors.values()))

    def _is_sent(self, message: Message) -> bool:
        return message.source == self._worker

    def _tensors(self, message: Message, way: Way) -> Tensors:
        of_layer = self._tensors_to_send if self._is_sent(message) else self._tensors_to_fill
        return of_layer(message.layer, way.part, way.span)

    @property
    def arriving(self) -> set[int]:
        """The layers of which something is still to be received."""
        return {moved.message.layer for moved, _, _ in self._receives.under_way}

    def _begin(self, one: _Moved, room_bytes: int) -> None:
        self._checkpoint()
        rank, where = one.way.rank, one.way.where
        num_bytes = sum(each.nbytes for each in one.tensors.values())
        if self._is_sent(one.message):
            self._sends.make_room(num_bytes, room_bytes)
            flat = packed(self._tensors(one.message, one.way).values())
            self._sends.add(one, dist.isend(flat, rank, **where), flat)
        else:
            self._receives.make_room(num_bytes, room_bytes)
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=one.device)
            self._receives.add(one, dist.irecv(flat, rank, **where), flat)

    def _end(self, one: _Moved, work: Any, flat: torch.Tensor) -> None:
        work.wait()
        if not self._is_sent(one.message):
            tensors = self._tensors(one.message, one.way)
            unpack(flat, list(tensors.values()))
            self._filled(one.message.layer, one.way.part, one.way.span, tensors)
        self._checkpoint()

    def finish(self) -> None:
        """Return when everything has been sent and received."""
        self._receives.finish()
        self._sends.finish()


class _Moved(NamedTuple):
    """A message that this rank sends or receives."""

    message: Message
    way: Way
    tensors: Tensors
    """Shapes and types only."""
    device: torch.device
    """Where its bytes lie while it is under way."""


class _OneWay:
    """The messages under way that this rank sends, or those that it receives; the oldest first."""

    def __init__(self, end: Callable[[_Moved, Any, torch.Tensor], None]):
        """``end`` waits for a message, given its work and its bytes, which are let go behind it."""
        self.under_way: deque[tuple[_Moved, Any, torch.Tensor]] = deque()
        self._end, self._bytes = end, 0

    def make_room(self, num_bytes: int, room_bytes: int) -> None:
        """Wait for the oldest messages until ``num_bytes`` more fit ``room_bytes``, or none is under way."""
        while self.under_way and self._bytes + num_bytes > room_bytes:
            self._end_oldest()

    def add(self, moved: _Moved, work: Any, flat: torch.Tensor) -> None:
        self.under_way.append((moved, work, flat))
        self._bytes += flat.nbytes

    def _end_oldest(self) -> None:
        moved, work, flat = self.under_way.popleft()
        self._end(moved, work, flat)
        self._bytes -= flat.nbytes

    def finish(self) -> None:
        while self.under_way:
            self._end_oldest()


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

ROOM_BYTES = 2**29
"""The least room for what is under way. If there is no room for more, the oldest is first put where it belongs."""


def _room_bytes(device: torch.device) -> int:
    """Return the number of bytes that weights, or layers that move, may take under way on this rank.

    It is what steps have needed at their peak beyond what is allocated now: mostly activations, and a step begins
    without any. The allocator knows both numbers without waiting for the device. Other ranks may have other room: a
    rank that has none waits for what is under way.
    """
    if device.type != "cuda":
        return ROOM_BYTES
    used = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return max(ROOM_BYTES, used)


class Spreading:
    """The gathering of weights after every step, with the distributed optimizer.

    For each slice of a layer, one holder of the block (the slice's first owner) sends the weights that it has stepped
    to all other holders, each of its ranks those of its stretches. Other keepers of the slice have stepped it
    themselves, and ignore what comes.

    The weights are under way while the next step begins; code that needs a layer waits for it (:meth:`arrive`).
    """

    def __init__(
        self,
        layout: Layout,
        buckets: Sequence[Block],
        *,
        cell: Cell,
        world: dist.ProcessGroup,
        holders_of: Callable[[int, int, int, int], tuple[dist.ProcessGroup | None, Sequence[int]]],
        weights_of: Callable[[int, int, Sequence[Span]], Tensors],
        arrived: Callable[[int, int, Sequence[Span], Tensors], None],
    ):
        """Prepare the messages. Collective over ``world`` if the layout has keepers.

        Args:
            buckets: The blocks of this worker, cut into pieces that travel as one message. The same on all holders.
            world: The group of all members.
            holders_of: Returns the group of a block's holders and, for each holder, the number of its ranks in it: all
                those that have the same part; None: this rank alone has. It is given the block's first layer, the layer
                behind its last one, a part that this rank has, and how many different ones there are (``Kind.parts``).
            weights_of: Returns the weights of a layer, a part and spans of it, in place or as a copy.
            arrived: Called with a layer, a part, spans of it, and their weights, once these have come.

        Raises:
            TensorsDiffer: On all members alike, before anything is sent.
        """
        self._weights_of, self._arrived = weights_of, arrived
        self._messages: list[_Message] = []
        self._under_way: deque[_UnderWay] = deque()
        if not layout.keepers:
            return
        ours, kinds, number = dict[int, Tensors](), Stretches.of(cell, layout).kinds, layout.num_layers
        places = sum(kind.parts for kind in kinds)
        for bucket, kind, held, part, slices in _to_gather(layout, gather_order(buckets, number), cell):
            place = part if kind.all == kinds[0].all else kinds[0].parts + part
            ours |= {layer * places + place: weights_of(layer, held, [kind.all]) for layer in slices}
            block = next(one for one in layout.blocks() if one.first <= bucket.first < one.last)
            group, ranks = holders_of(block.first, block.last, part, kind.parts)
            if group is not None:
                own = {*_spans(slices, kept, cell.worker, kind, kind.own)}
                seats, of = Seats(ranks, kind.stretches), bucket.holders
                stepped = [_spans(slices, firsts, of[at], kind, keeps) for at, keeps in seats.kept()]
                self._messages.append(_Message(group, held, frozenset(slices), stepped, own))
        agree(
            ours,
            len(layout.all_holders) * places,
            world,
            who=f"rank {cell.rank}",
            what=lambda at: f"the weights of {layer_name(at // places, number)}",
        )

    @property
    def has_part(self) -> bool:
        """Whether this rank sends or receives any weights."""
        return bool(self._messages)

    def __bool__(self) -> bool:
        """Whether weights are under way."""
        return bool(self._under_way)

    def begin(self) -> None:
        """Begin to send the weights that this rank has stepped, and to receive those of others.

        Before :meth:`arrive` the former must not change, and the latter are not here.
        """
        room: int | None = None
        for message in self._messages:
            every = self._weights(message)
            if not (
                length := max(sum(one.nbytes for _, own in each for one in own.values()) for each in every)
            ):
                continue
            some = next(one for each in every for _, own in each for one in own.values())
            room = _room_bytes(some.device) if room is None else room
            room -= message.group.size() * length
            while self._under_way and room < 0:
                room += self._end(self._under_way.popleft())
            gathered = some.new_empty((message.group.size(), length), dtype=torch.uint8)
            mine = gathered.new_zeros(length)
            if stepped := [one for _, own in every[message.group.rank()] for one in own.values()]:
                flat = packed(stepped)
                mine[: flat.numel()] = flat
            # Gathered into one tensor: for a list of tensors NCCL's backend would use as much memory again, and copy.
            work = _all_gather(gathered.view(-1), mine, group=message.group, async_op=True)
            self._under_way.append(_UnderWay(message, work, gathered))

    def arrive(self, layer: int) -> None:
        """Return when the weights of ``layer`` are here."""
        due = [one for one in self._under_way if layer in one.message.layers]
        for one in due:
            self._under_way.remove(one)
            self._end(one)

    def finish(self) -> None:
        """Return when all weights are here. From then on those of this rank may change."""
        while self._under_way:
            self._end(self._under_way.popleft())

    def _weights(self, message: _Message) -> list[list[tuple[tuple[int, Span], Tensors]]]:
        """Return, for each rank, (layer, span) and the weights of each span of which it is the first keeper."""
        return [
            [((layer, span), self._weights_of(layer, message.part, [span])) for layer, span in own]
            for own in message.stepped
        ]

    def _end(self, one: _UnderWay) -> int:
        """Wait for a message, and put its weights where they belong. Returns the number of bytes freed."""
        one.work.wait()
        for each, flat in zip(self._weights(one.message), one.gathered, strict=True):
            at = 0
            for (layer, span), own in each:
                size = sum(tensor.nbytes for tensor in own.values())
                if (layer, span) not in one.message.keeps:
                    unpack(flat[at : at + size], list(own.values()))
                    self._arrived(layer, one.message.part, [span], own)
                at += size
        return one.gathered.nbytes


def _to_gather(
    layout: Layout, buckets: Iterable[Block], cell: Cell
) -> Iterator[tuple[Block, Kind, int, int, dict[int, tuple[Slice, ...]]]]:
    """Yield, in the order in which all ranks gather them, what of each bucket not all ranks step that have it: the
    bucket, the kind, its part, among ``Parts.held`` and among ``Parts.own``, and the layers with their slices.
    """
    for bucket in buckets:
        for kind in Stretches.of(cell, layout).kinds:
            slices = {
                layer: found
                for layer, found in enumerate(layout.states[bucket.first : bucket.last], start=bucket.first)
                if kind.stretches > 1 or any(len(one.owners) < len(bucket.holders) for one in found)
            }
            for held, part in zip(cell.parts.held, cell.parts.own(kind.parts), strict=False):
                if slices:
                    yield bucket, kind, held, part, slices


def _spans(
    slices: Mapping[int, tuple[Slice, ...]],
    of_worker: Callable[[tuple[Slice, ...]], Mapping[int, tuple[Span, ...]]],
    worker: int,
    kind: Kind,
    own: range,
) -> list[tuple[int, Span]]:
    """Return (layer, span) of what ``of_worker`` gives ``worker`` of these ``slices``, in the stretches ``own``."""
    return [
        (layer, span)
        for layer, found in slices.items()
        for span in kind.each(of_worker(found).get(worker, ()), own)
    ]


class _Message(NamedTuple):
    """What one gathering of a bucket consists of, for one part."""

    group: dist.ProcessGroup
    part: int
    layers: frozenset[int]
    stepped: list[list[tuple[int, Span]]]
    """For each rank of the group, the spans (layer, span) of which it is the first keeper."""
    keeps: set[tuple[int, Span]]
    """The spans (layer, span) that this rank keeps, and so has stepped itself."""


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    message: _Message
    work: Any
    gathered: torch.Tensor
    """uint8 [ranks, bytes that the one with most sends]."""


def _device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of those that are on one, else the host."""
    return next((one.device for one in tensors if one.device.type != "cpu"), torch.device("cpu"))


def packed(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return all bytes of ``tensors`` in one 1-D uint8 tensor.

    It is on the device of those tensors that are on one. Tensors on the host are copied there, such as the step counts
    of torch's Adam.
    """
    every = [one.detach() for one in tensors]
    device = _device_of(every)
    return torch.cat([one.to(device).contiguous().reshape(-1).view(torch.uint8) for one in every])


def unpack(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy ``flat``, a 1-D uint8 tensor, back into ``tensors``. If one of these is on the host, wait until it has come.

    A tensor may start at any byte of ``flat``; the clone aligns it.
    """
    at = 0
    with torch.no_grad():
        for one in tensors:
            piece = flat[at : at + one.nbytes].clone()
            one.copy_(piece.view(one.dtype).reshape(one.shape))
            at += one.nbytes
