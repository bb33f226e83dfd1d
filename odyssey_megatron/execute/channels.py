"""Messages between workers.

A message is named by (kind, microbatch, boundary). On gloo all go through the generation's world group, told apart by
their tag. NCCL knows no tags: there, one group of two for each (sender, receiver, kind) keeps every channel first-in
first-out, which is the order ``verify()`` has checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.state import Cell
from odyssey_megatron.errors import PeerFailed
from odyssey_megatron.execute.ledger import Word
from odyssey_megatron.plan.schedule import MESSAGE, SEND, Instr, Op, Schedule
from odyssey_megatron.rebuild.abort import wait_all

WORLD = "world"


def channel_name(instr: Instr, worker: int) -> str:
    """The directed channel of a message instruction of ``worker``, e.g. ``forward:3>5``."""
    source, target = (worker, instr.peer) if instr.op in SEND else (instr.peer, worker)
    kind = "forward" if instr.op in (Op.SEND_FORWARD, Op.RECV_FORWARD) else "backward"
    return f"{kind}:{source}>{target}"


def channel_groups(schedule: Schedule) -> dict[str, tuple[int, ...]]:
    """Every directed channel that ``schedule`` uses, with its two workers."""
    return {
        channel_name(instr, worker): tuple(sorted((worker, instr.peer)))
        for worker, program in schedule.programs
        for instr in program
        if instr.op in MESSAGE
    }


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

    def wait_sent(self) -> None:
        """Returns when every message sent so far has left."""
        wait_all(self._sent)
        self._sent.clear()

    def abandon(self) -> None:
        """Lets go of what is still being sent."""
        self._sent.clear()

    def _where(self, instr: Instr) -> dict[str, Any]:
        if not self._tagged:
            return {"group": self._groups[self._cell.named(channel_name(instr, self._cell.worker))]}
        forward = instr.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        tag = (instr.microbatch * (self._num_layers + 1) + instr.first) * 2 + forward
        return {"group": self._groups[WORLD], "tag": tag}

    def _checked(self, work: Any, instr: Instr) -> Any:
        if work is None:
            raise PeerFailed(f"{instr}: this rank is not a member of the message's group")
        return work
