"""Messages between workers.

A message is named by (kind, microbatch, boundary). On gloo all messages go through the generation's world
group and are told apart by their tags. NCCL knows no tags: there, each (sender, receiver) has a group of two,
in which messages are first-in first-out, the order that ``verify()`` has checked. Layers that move go the
same way, before all other messages; or beside them, where they have a group of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.errors import PeerFailed
from odyssey_megatron.execute.held import Held, SlowLinks
from odyssey_megatron.execute.ledger import Word
from odyssey_megatron.plan.placing.groups import WORLD, channel_name, moves_name
from odyssey_megatron.plan.placing.stretches import exchanged
from odyssey_megatron.plan.plan import Transfer
from odyssey_megatron.plan.schedule import SEND, Instr, Op
from odyssey_megatron.rebuild.abort import wait_all
from odyssey_megatron.rebuild.transfer import Way

_MOVES, _BESIDE = 2**29, 2**30
"""The first tags for layers that move, and for messages beside a program. A program's messages have lower ones."""


class MessagePart(NamedTuple):
    """The part of a message that comes from one rank of the sending worker."""

    work: Any
    arrives: torch.Tensor
    rooms: Sequence[torch.Tensor]
    """Its places in the whole message. With words, what arrives has one at its end."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A message on its way here."""

    pieces: Sequence[MessagePart]
    tensor: torch.Tensor
    with_word: bool

    def wait(self) -> tuple[torch.Tensor, Word]:
        """Return the message, [s, b, h], and its word, once both are here."""
        words = []
        for work, arrives, rooms in self.pieces:
            work.wait()
            if self.with_word:
                words.append(arrives[-1])
                if len(self.pieces) == 1 == len(rooms):
                    return arrives[:-1].view(self.tensor.shape), arrives[-1]
            if self.with_word or len(rooms) > 1:
                came = torch.split(
                    arrives.view(-1)[: sum(one.numel() for one in rooms)], [*map(torch.numel, rooms)]
                )
                for room, part in zip(rooms, came, strict=True):
                    room.copy_(part.view(room.shape))
        # The word of a message that was cut off may be anything, but then the groups no longer hold, which
        # ``Ledger.word`` looks at first.
        return self.tensor, torch.stack(words).prod() if words else None


class NamedGroups(Protocol):
    """Groups by name."""

    def __getitem__(self, name: str) -> dist.ProcessGroup: ...
    def __contains__(self, name: object) -> bool: ...


class Channels:
    """The messages of one worker in one generation, over its ``groups`` (``plan/placing/groups.py``).

    Between cells of unlike size a rank may have several counterparts. Where each tensor-parallel rank has the
    whole of an activation, a rank receives it from the first of its counterparts, which all have the same.
    Where each has a piece (``cuts``), and with context parallelism, a rank sends each counterpart what both
    have of it.
    """

    def __init__(
        self,
        groups: NamedGroups,
        *,
        cells: Cells,
        num_layers: int,
        tagged: bool,
        cuts: bool = False,
        slices: bool = False,
        slow: SlowLinks | None = None,
    ):
        """``slices``: optimizer state is cut (``plan/placing/slices.py``)."""
        self._groups, self._num_layers, self._tagged = groups, num_layers, tagged
        self._cells, self._cell, self._cuts, self._slices = cells, cells.cell, cuts, slices
        self._slow = slow or SlowLinks()
        self._sent: deque[Any] = deque()
        self._own = self._cell.pieces(cuts)
        self._ends = dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]()

    def send(self, instr: Instr, tensor: torch.Tensor, word: Word) -> None:
        """Start sending ``tensor``, [s, b, h]. An alias keeps the storage alive until the device has sent it, or until
        :meth:`wait_sent`.
        """
        while self._sent and not isinstance(self._sent[0], Held) and self._sent[0].is_through:
            self._sent.popleft()
        for rank, gives, _ in self._ends_at(instr.peer):
            if not gives:
                continue  # another rank of this cell sends it
            rows = self._rows(tensor.detach(), gives)
            message = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)
            if word is not None:
                # One message, as a second one would wait for the first, and all behind it would wait, too.
                message = torch.cat([message.reshape(-1), word.to(message.dtype).reshape(1)])
            self._sent.append(self._checked(self._post(message, rank, self._where(instr, rank)), instr))

    def receive(self, instr: Instr, room: torch.Tensor, *, with_word: bool) -> Pending:
        """Start receiving a message of the shape of ``room``. It arrives in ``room`` itself, unless a word
        comes with it.
        """
        pieces = []
        for rank, _, takes in self._ends_at(instr.peer):
            if not takes:
                continue
            rows = self._rows(room, takes)
            message = rows[0]
            if with_word or len(rows) > 1:
                message = room.new_empty(sum(one.numel() for one in rows) + with_word)
            work = self._checked(dist.irecv(message, rank, **self._where(instr, rank)), instr)
            pieces.append(MessagePart(work, message, rows))
        return Pending(pieces, room, with_word)

    def of_transfer(self, transfer: Transfer, number: int) -> list[Way]:
        """Return the parts of a layer that this rank sends or receives in ``transfer``.

        ``number`` is the transfer's number among those between the same two workers.
        """
        here, sends = self._cell, transfer.source == self._cell.worker
        other = transfer.target if sends else transfer.source
        found = []
        for there in self._cells.counterparts(other):
            source, target = (here, there) if sends else (there, here)
            where = self._of_moves(transfer, number, there.rank)
            if self._slices:
                ways = [
                    (here.parts.held[one.number], one.slot, one.span)
                    for one in exchanged(source, target, transfer.span, sends=sends)
                ]
            else:
                given = source.parts.given_to(target.parts)
                ways = [(part, target.parts.slot(part), transfer.span) for part in given]
            found += [Way(part, slot, there.rank, where, span) for part, slot, span in ways]
        return found

    def _of_moves(self, transfer: Transfer, number: int, rank: int) -> dict[str, Any]:
        if self._tagged:
            return {"group": self._groups[WORLD], "tag": _MOVES + number}
        apart = self._cell.named(moves_name(transfer.source, transfer.target), rank)
        if apart in self._groups:
            return {"group": self._groups[apart]}
        return {"group": self._between(transfer.source, transfer.target, rank)}

    def _ends_at(self, peer: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Return each rank of worker ``peer`` with the pieces of an activation that this rank sends it, and
        gets from it.
        """
        if peer not in self._ends:
            here, cuts = self._cell, self._cuts
            self._ends[peer] = [
                (there.rank, here.gives(there, cuts=cuts), there.gives(here, cuts=cuts))
                for there in self._cells.counterparts(peer)
            ]
        return self._ends[peer]

    def send_beside(self, peer: int, tensor: torch.Tensor) -> Any:
        """Send a message of any shape that belongs to no program to worker ``peer``, which is ``alike``. Returns the
        work.
        """
        rank, where = self._beside(peer, self._cell.worker, peer)
        return self._post(tensor, rank, where)

    def receive_beside(self, peer: int, room: torch.Tensor) -> Any:
        """Receive such a message from worker ``peer`` into ``room``, of its shape. Returns its work."""
        rank, where = self._beside(peer, peer, self._cell.worker)
        return dist.irecv(room, rank, **where)

    def _beside(self, peer: int, source: int, target: int) -> tuple[int, dict[str, Any]]:
        ((rank, *_),) = self._ends_at(peer)
        if self._tagged:
            return rank, {"group": self._groups[WORLD], "tag": _BESIDE}
        return rank, {"group": self._between(source, target, rank)}

    def _post(self, message: torch.Tensor, rank: int, where: dict[str, Any]) -> Any:
        return self._slow.post(rank, message.nbytes, lambda: dist.isend(message, rank, **where))

    def wait_sent(self) -> None:
        """Return when every message sent so far has left."""
        wait_all([one.sent if isinstance(one, Held) else one for one in self._sent])
        self._sent.clear()

    def abandon(self) -> None:
        """Let go of what is still being sent."""
        self._slow.abandon()
        self._sent.clear()

    def _rows(self, tensor: torch.Tensor, pieces: tuple[int, ...]) -> list[torch.Tensor]:
        """Return ``pieces`` of this rank's activation as views: one view for all pieces that lie side by side."""
        if pieces == self._own:
            return [tensor]
        each, found = tensor.shape[0] // len(self._own), list[list[int]]()
        for at in map(self._own.index, pieces):
            if found and found[-1][1] == at:
                found[-1][1] = at + 1
            else:
                found.append([at, at + 1])
        return [tensor[low * each : high * each] for low, high in found]

    def _where(self, instr: Instr, rank: int) -> dict[str, Any]:
        if not self._tagged:
            own = self._cell.worker
            ends = (own, instr.peer) if instr.op in SEND else (instr.peer, own)
            return {"group": self._between(*ends, rank)}
        forward = instr.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        tag = (instr.microbatch * (self._num_layers + 1) + instr.first) * 2 + forward
        return {"group": self._groups[WORLD], "tag": tag}

    def _between(self, source: int, target: int, rank: int) -> dist.ProcessGroup:
        return self._groups[self._cell.named(channel_name(source, target), rank)]

    def _checked(self, work: Any, instr: Instr) -> Any:
        if work is None:
            raise PeerFailed(f"{instr}: this rank is not a member of the message's group")
        return work
