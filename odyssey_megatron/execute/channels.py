"""Messages between workers.

A message is named by (kind, microbatch, boundary). On gloo all go through the generation's world group, told apart by
their tag. NCCL knows no tags: there, one group of two for each (sender, receiver) keeps every channel first-in
first-out, which is the order ``verify()`` has checked. Layers that move go the same way, before all messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.state import Cell
from odyssey_megatron.errors import PeerFailed
from odyssey_megatron.execute.ledger import Word
from odyssey_megatron.plan.plan import Transfer
from odyssey_megatron.plan.schedule import MESSAGE, SEND, Instr, Op, Program
from odyssey_megatron.rebuild.abort import wait_all
from odyssey_megatron.rebuild.groups import WORLD


def channel_name(source: int, target: int) -> str:
    """Of what worker ``source`` sends to ``target``."""
    return f"{source}>{target}"


def channel_groups(
    worker: int, program: Program, transfers: Iterable[Transfer]
) -> dict[str, tuple[int, ...]]:
    """Every channel that ``worker`` is at an end of, with its two workers."""
    ends = {
        (worker, one.peer) if one.op in SEND else (one.peer, worker) for one in program if one.op in MESSAGE
    }
    ends |= {(one.source, one.target) for one in transfers if worker in (one.source, one.target)}
    return {channel_name(*one): (min(one), max(one)) for one in ends}


@dataclass(frozen=True, slots=True)
class Pending:
    """A message on its way here."""

    work: Any
    tensor: torch.Tensor
    word: Word

    def wait(self) -> tuple[torch.Tensor, Word]:
        self.work.wait()
        return self.tensor, self.word


class NamedGroups(Protocol):
    """Groups by name."""

    def __getitem__(self, name: str) -> dist.ProcessGroup: ...


class Channels:
    """The messages of one worker in one generation. ``groups`` as built for it (see :func:`channel_groups`)."""

    def __init__(self, groups: NamedGroups, *, cell: Cell, num_layers: int, tagged: bool):
        self._groups, self._cell, self._num_layers, self._tagged = groups, cell, num_layers, tagged
        self._sent: list[Any] = []

    def send(self, instr: Instr, tensor: torch.Tensor, word: Word) -> None:
        """Starts sending; the storage is kept alive by an alias until :meth:`wait_sent`."""
        message = tensor.detach().contiguous()
        if word is not None:
            # One message: a second one would wait for this one, and whatever is behind it, too.
            message = torch.cat([message.reshape(-1), word.to(message.dtype).reshape(1)])
        work = dist.isend(message, self._cell.peer(instr.peer), **self._where(instr))
        self._sent.append(self._checked(work, instr))

    def receive(self, instr: Instr, room: torch.Tensor, *, with_word: bool) -> Pending:
        """Starts receiving what has the shape of ``room``, into it unless a word comes along."""
        message = room.new_empty(room.numel() + 1) if with_word else room
        work = self._checked(dist.irecv(message, self._cell.peer(instr.peer), **self._where(instr)), instr)
        if not with_word:
            return Pending(work, room, None)
        return Pending(work, message[:-1].view(room.shape), message[-1])

    def of_transfer(self, transfer: Transfer, tag: int) -> dict[str, Any]:
        """How ``torch.distributed`` is told the way of a layer that moves."""
        if self._tagged:
            return {"group": self._groups[WORLD], "tag": tag}
        return {"group": self._between(transfer.source, transfer.target)}

    def wait_sent(self) -> None:
        """Returns when every message sent so far has left."""
        wait_all(self._sent)
        self._sent.clear()

    def abandon(self) -> None:
        """Lets go of what is still being sent."""
        self._sent.clear()

    def _where(self, instr: Instr) -> dict[str, Any]:
        if not self._tagged:
            own = self._cell.worker
            return {"group": self._between(*((own, instr.peer) if instr.op in SEND else (instr.peer, own)))}
        forward = instr.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        tag = (instr.microbatch * (self._num_layers + 1) + instr.first) * 2 + forward
        return {"group": self._groups[WORLD], "tag": tag}

    def _between(self, source: int, target: int) -> dist.ProcessGroup:
        return self._groups[self._cell.named(channel_name(source, target))]

    def _checked(self, work: Any, instr: Instr) -> Any:
        if work is None:
            raise PeerFailed(f"{instr}: this rank is not a member of the message's group")
        return work
