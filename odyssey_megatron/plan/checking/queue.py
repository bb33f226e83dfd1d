"""Check that nobody waits for ever, even if a device has a single queue for all operations that it is given.

Operations reach a GPU through hardware queues; with ``CUDA_DEVICE_MAX_CONNECTIONS=1`` there is one. Then an operation
begins only when all that were given before it have begun, even unrelated ones. An operation that has begun waits
without holding up others: a message for its other end, a sum for all who take part. But the operations of one
communicator run one after the other, so a second message holds up all that is behind it until the first one is through.

It is taken for granted here that all operations that have begun find room on their device. They need room for two, as
``plan/scheduling/messages.py`` orders sends and receives.

This is the worst case. With more queues, or if sends are buffered, as gloo's are, there is less to wait for.
"""

from __future__ import annotations

from collections.abc import Mapping

from odyssey_megatron.errors import ScheduleInvalid
from odyssey_megatron.plan.scheduling.visits import (
    NEEDS,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    Codes,
    Visits,
    where,
)

Channel = tuple[int, int]
"""(sender, receiver)."""


def check_queue(visits: Visits, programs: Codes, begun: Mapping[int, int] | None = None) -> None:
    """Check that all of ``programs`` come to their ends with one queue per device, however long instructions take.

    Args:
        begun: worker -> the number of its instructions that are already known to begin.

    Raises:
        ScheduleInvalid: they do not; it names a worker and where it stands.
    """
    _Queues(visits, programs, begun or dict.fromkeys(programs, 0)).run()


class _Queues:
    def __init__(self, visits: Visits, programs: Codes, begun: Mapping[int, int]):
        self.visits, self.programs = visits, programs
        self.position = dict(begun)
        self.sends: dict[Channel, int] = {}
        self.receives: dict[Channel, int] = {}
        """Number of messages of each channel whose send, or whose receive, has begun."""
        self.sent: set[int] = set()
        """Receives for whose messages the send has begun."""
        self.asleep: dict[Channel, list[int]] = {}
        """Channel -> workers that wait for its next message."""
        self.gathering: dict[int, list[int]] = {}

    def run(self) -> None:
        awake = list(self.programs)
        while awake:
            awake += self._advance(awake.pop())
        for worker, program in self.programs.items():
            at = self.position[worker]
            if at < len(program):
                raise ScheduleInvalid(
                    f"{where(worker, at, self.visits.decode(program))}waits for ever where a device has one queue for "
                    "all operations. This is a bug of the generator: report the schedule."
                )

    def _advance(self, worker: int) -> list[int]:
        """Begin what can begin on ``worker``; return the workers that this has woken."""
        program, visits, woken = self.programs[worker], self.visits, list[int]()
        at = self.position[worker]
        while at < len(program):
            code = program[at]
            if code >= visits.reductions:
                if code <= visits.step:
                    self.position[worker] = at
                    return woken + self._gather(worker, code)
                at += 1  # an eager forward, or a part of a weight gradient, needs nothing
                continue
            visit, kind = code >> 3, code & 7
            if kind < SEND_FORWARD:
                channel = self._waits_for(worker, code, kind)
                if channel is not None:
                    self.asleep.setdefault(channel, []).append(worker)
                    break
                at += 1
                continue
            peer = visits.behind[visit] if kind in (SEND_FORWARD, RECV_BACKWARD) else visits.before[visit]
            sends = kind in (SEND_FORWARD, SEND_BACKWARD)
            channel = (worker, peer) if sends else (peer, worker)
            ours, theirs = (self.sends, self.receives) if sends else (self.receives, self.sends)
            number = ours.get(channel, 0)
            if theirs.get(channel, 0) < number:  # the one before it is not through
                self.asleep.setdefault(channel, []).append(worker)
                break
            ours[channel] = number + 1
            if sends:
                self.sent.add(
                    (visit + 1) * 8 + RECV_FORWARD
                    if kind == SEND_FORWARD
                    else (visit - 1) * 8 + RECV_BACKWARD
                )
            woken += self.asleep.pop(channel, ())
            at += 1
        self.position[worker] = at
        return woken

    def _waits_for(self, worker: int, code: int, kind: int) -> Channel | None:
        """Return the channel of the message that a compute instruction waits for; None if it need not wait."""
        visits, visit = self.visits, code >> 3
        needed = code + NEEDS[kind]
        if needed == code or needed in self.sent:
            return None
        peer = visits.before[visit] if needed & 7 == RECV_FORWARD else visits.behind[visit]
        return (peer, worker) if peer >= 0 else None

    def _gather(self, worker: int, code: int) -> list[int]:
        """Let ``worker`` come to a collective; return its members once all have come.

        At the worst, all that is behind the collective waits for it.
        """
        step = code == self.visits.step
        members = len(self.programs if step else self.visits.buckets[code - self.visits.reductions].holders)
        here = self.gathering.setdefault(code, [])
        here.append(worker)
        if len(here) < members:
            return []
        for member in self.gathering.pop(code):
            self.position[member] += 1
        return here
