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
from odyssey_megatron.rebuild.transfer import Way

_MOVES, _BESIDE = 2**29, 2**30
"""From each on, tags that no message of a program has."""


class Piece(NamedTuple):
    """Of a message, from one of the ranks that it comes from."""

    work: Any
    arrives: torch.Tensor
    rooms: Sequence[torch.Tensor]
    """Of the whole, in which it belongs; what arrives has a word behind it, if there are words."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A message on its way here."""

    pieces: Sequence[Piece]
    tensor: torch.Tensor
    with_word: bool

    def wait(self) -> tuple[torch.Tensor, Word]:
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
        # One that was cut off holds anything, but then the groups hold no more, which counts first (``Ledger.word``).
        return self.tensor, torch.stack(words).prod() if words else None


class NamedGroups(Protocol):
    """Groups by name."""

    def __getitem__(self, name: str) -> dist.ProcessGroup: ...
    def __contains__(self, name: object) -> bool: ...


class Channels:
    """The messages of one worker in one generation. ``groups`` as built for it (``plan/groups.py``).

    Between cells of unlike size there are several ranks on one side or the other. Where tensor-parallel ranks have the
    whole of an activation, one receives it from the first of its counterparts, which all have the same. Where each has
    a piece (``cuts``), and where context-parallel ranks have, what two have in common goes from one to the other.
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
        self._own = cell.pieces(cuts)
        self._ends = dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]()

    def send(self, instr: Instr, tensor: torch.Tensor, word: Word) -> None:
        """Starts sending; the storage is kept alive by an alias until :meth:`wait_sent`."""
        for rank, gives, _ in self._ends_at(instr.peer):
            if not gives:
                continue  # another one of this cell sends it
            rows = self._rows(tensor.detach(), gives)
            message = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)
            if word is not None:
                # One message: a second one would wait for this one, and whatever is behind it, too.
                message = torch.cat([message.reshape(-1), word.to(message.dtype).reshape(1)])
            self._sent.append(self._checked(self._post(message, rank, self._where(instr, rank)), instr))

    def receive(self, instr: Instr, room: torch.Tensor, *, with_word: bool) -> Pending:
        """Starts receiving what has the shape of ``room``, into it unless a word comes along."""
        pieces = []
        for rank, _, takes in self._ends_at(instr.peer):
            if not takes:
                continue
            rows = self._rows(room, takes)
            message = rows[0]
            if with_word or len(rows) > 1:
                message = room.new_empty(sum(one.numel() for one in rows) + with_word)
            work = self._checked(dist.irecv(message, rank, **self._where(instr, rank)), instr)
            pieces.append(Piece(work, message, rows))
        return Pending(pieces, room, with_word)

    def of_transfer(self, transfer: Transfer, number: int) -> list[Way]:
        """Of a layer that moves, the parts that go from or to this rank. Of the transfers between two workers each has
        a ``number``.
        """
        here, sends = self._cell, transfer.source == self._cell.worker
        other = transfer.target if sends else transfer.source
        found = []
        for there in here.counterparts(other, self._shapes.get(other, 1)):
            source, target = (here, there) if sends else (there, here)
            where = self._of_moves(transfer, number, there.rank)
            found += [Way(part, target.slot(part), there.rank, where) for part in source.moves(target)]
        return found

    def _of_moves(self, transfer: Transfer, number: int, rank: int) -> dict[str, Any]:
        if self._tagged:
            return {"group": self._groups[WORLD], "tag": _MOVES + number}
        apart = self._cell.named(moves_name(transfer.source, transfer.target), rank)
        if apart in self._groups:
            return {"group": self._groups[apart]}
        return {"group": self._between(transfer.source, transfer.target, rank)}

    def _ends_at(self, peer: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """The ranks of worker ``peer`` with the pieces of an activation that this one sends there, and gets."""
        if peer not in self._ends:
            here, cuts = self._cell, self._cuts
            self._ends[peer] = [
                (there.rank, here.gives(there, cuts=cuts), there.gives(here, cuts=cuts))
                for there in here.counterparts(peer, self._shapes.get(peer, 1))
            ]
        return self._ends[peer]

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
        ((rank, *_),) = self._ends_at(peer)
        if self._tagged:
            return rank, {"group": self._groups[WORLD], "tag": _BESIDE}
        return rank, {"group": self._between(source, target, rank)}

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

    def _rows(self, tensor: torch.Tensor, pieces: tuple[int, ...]) -> list[torch.Tensor]:
        """Of an activation those ``pieces`` of this rank's: views, one for all that lie side by side."""
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
