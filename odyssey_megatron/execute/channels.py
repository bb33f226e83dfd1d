"""Messages between workers.

A message is named by (kind, microbatch, boundary). On gloo all go through the generation's world group, told apart by
their tag. NCCL knows no tags: there, one group of two for each (sender, receiver) keeps every channel first-in
first-out, which is the order ``verify()`` has checked. Layers that move go the same way, before all messages; or
beside them, where they have a group of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import NO_SHAPES, Cell, Shapes
from odyssey_megatron.errors import PeerFailed
from odyssey_megatron.execute.held import Held, SlowLinks
from odyssey_megatron.execute.ledger import Word
from odyssey_megatron.plan.groups import WORLD, channel_name, moves_name
from odyssey_megatron.plan.plan import Transfer
from odyssey_megatron.plan.schedule import SEND, Instr, Op
from odyssey_megatron.rebuild.abort import wait_all

_MOVES, _BESIDE = 2**29, 2**30
"""From each on, tags that no message of a program has."""


class Piece(NamedTuple):
    """Of a message, from one of the ranks that it comes from."""

    work: Any
    arrives: torch.Tensor
    room: torch.Tensor
    """Of the whole; what arrives has a word behind it, if there are words."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A message on its way here."""

    pieces: Sequence[Piece]
    tensor: torch.Tensor
    with_word: bool

    def wait(self) -> tuple[torch.Tensor, Word]:
        words = []
        for work, arrives, room in self.pieces:
            work.wait()
            if self.with_word:
                words.append(arrives[-1])
                if len(self.pieces) == 1:
                    return arrives[:-1].view(self.tensor.shape), arrives[-1]
                room.copy_(arrives[:-1].view(room.shape))
        # One that was cut off holds anything, but then the groups hold no more, which counts first (``Ledger.word``).
        return self.tensor, torch.stack(words).prod() if words else None


class NamedGroups(Protocol):
    """Groups by name."""

    def __getitem__(self, name: str) -> dist.ProcessGroup: ...
    def __contains__(self, name: object) -> bool: ...


class Channels:
    """The messages of one worker in one generation. ``groups`` as built for it (``plan/groups.py``).

    Between cells of unlike size there are several ranks on one side or the other. Where each rank has the whole of an
    activation, one receives it from the first of its counterparts, which all have the same. Where each has a piece
    (``cuts``), what two have in common goes from one to the other.
    """

    def __init__(
        self,
        groups: NamedGroups,
        *,
        cell: Cell,
        num_layers: int,
        tagged: bool,
        shapes: Shapes = NO_SHAPES,
        cuts: bool = False,
        slow: SlowLinks | None = None,
    ):
        self._groups, self._cell, self._num_layers, self._tagged = groups, cell, num_layers, tagged
        self._shapes, self._cuts = shapes, cuts
        self._slow = slow or SlowLinks()
        self._sent: list[Any] = []

    def send(self, instr: Instr, tensor: torch.Tensor, word: Word) -> None:
        """Starts sending; the storage is kept alive by an alias until :meth:`wait_sent`."""
        each = self._shapes.get(instr.peer, 1)
        for rank, places in self._cell.links(instr.peer, each):
            if not self._cuts and places.start % each:
                continue  # another one of this cell sends it
            message = self._piece(tensor.detach(), places).contiguous()
            if word is not None:
                # One message: a second one would wait for this one, and whatever is behind it, too.
                message = torch.cat([message.reshape(-1), word.to(message.dtype).reshape(1)])
            self._sent.append(self._checked(self._post(message, rank, self._where(instr, places)), instr))

    def receive(self, instr: Instr, room: torch.Tensor, *, with_word: bool) -> Pending:
        """Starts receiving what has the shape of ``room``, into it unless a word comes along."""
        links, pieces = self._cell.links(instr.peer, self._shapes.get(instr.peer, 1)), []
        for rank, places in links if self._cuts else links[:1]:
            own = self._piece(room, places)
            message = own.new_empty(own.numel() + 1) if with_word else own
            work = self._checked(dist.irecv(message, rank, **self._where(instr, places)), instr)
            pieces.append(Piece(work, message, own))
        return Pending(pieces, room, with_word)

    def of_transfer(self, transfer: Transfer, number: int, place: int) -> tuple[int, dict[str, Any]]:
        """The rank at the other end of a layer's way that moves, for the part in that ``place`` of a cell; and how
        ``torch.distributed`` is told it. Of the transfers between two workers each has a ``number``.
        """
        other = transfer.target if transfer.source == self._cell.worker else transfer.source
        links = self._cell.links(other, self._shapes.get(other, 1))
        rank, places = next(one for one in links if place in one.places)
        if self._tagged:
            return rank, {"group": self._groups[WORLD], "tag": _MOVES + number}
        apart = self._cell.named(moves_name(transfer.source, transfer.target), places)
        if apart in self._groups:
            return rank, {"group": self._groups[apart]}
        return rank, {"group": self._between(transfer.source, transfer.target, places)}

    def alike(self, worker: int) -> bool:
        """Whether ``worker`` has as many ranks as this one, so that each has one counterpart there."""
        return self._shapes.get(worker, 1) == self._cell.each

    def send_beside(self, peer: int, tensor: torch.Tensor) -> Any:
        """A message to worker ``peer``, which is :meth:`alike`, that is none of a program. Returns its work."""
        rank, where = self._beside(peer, self._cell.worker, peer)
        return self._post(tensor, rank, where)

    def receive_beside(self, peer: int, room: torch.Tensor) -> Any:
        """One from worker ``peer``, into ``room``."""
        rank, where = self._beside(peer, peer, self._cell.worker)
        return dist.irecv(room, rank, **where)

    def _beside(self, peer: int, source: int, target: int) -> tuple[int, dict[str, Any]]:
        ((rank, places),) = self._cell.links(peer, self._cell.each)
        if self._tagged:
            return rank, {"group": self._groups[WORLD], "tag": _BESIDE}
        return rank, {"group": self._between(source, target, places)}

    def _post(self, message: torch.Tensor, rank: int, where: dict[str, Any]) -> Any:
        return self._slow.post(rank, message.nbytes, lambda: dist.isend(message, rank, **where))

    def wait_sent(self) -> None:
        """Returns when every message sent so far has left."""
        wait_all([one.sent if isinstance(one, Held) else one for one in self._sent])
        self._sent.clear()

    def abandon(self) -> None:
        """Lets go of what is still being sent."""
        self._slow.abandon()
        self._sent.clear()

    def _piece(self, tensor: torch.Tensor, places: range) -> torch.Tensor:
        """Of an activation what belongs to ``places`` of this rank's."""
        own = self._cell.places
        if not self._cuts or places == own:
            return tensor
        rows = tensor.shape[0] // len(own)
        return tensor[(places.start - own.start) * rows : (places.stop - own.start) * rows]

    def _where(self, instr: Instr, places: range) -> dict[str, Any]:
        if not self._tagged:
            own = self._cell.worker
            ends = (own, instr.peer) if instr.op in SEND else (instr.peer, own)
            return {"group": self._between(*ends, places)}
        forward = instr.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        tag = (instr.microbatch * (self._num_layers + 1) + instr.first) * 2 + forward
        return {"group": self._groups[WORLD], "tag": tag}

    def _between(self, source: int, target: int, places: range) -> dist.ProcessGroup:
        return self._groups[self._cell.named(channel_name(source, target), places)]

    def _checked(self, work: Any, instr: Instr) -> Any:
        if work is None:
            raise PeerFailed(f"{instr}: this rank is not a member of the message's group")
        return work
