"""Signs of life through shared memory: a slot a rank, with a heartbeat that a thread of the rank writes and its agent
reads, and a lifeline that tells the agent of its death.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from odyssey_megatron.cluster.events import Ask
from odyssey_megatron.launch import leftovers, lifeline
from odyssey_megatron.launch.lifeline import Lifeline

_LINE_BYTES = 64  # a cache line each: ranks do not disturb one another
_SLOT_BYTES = _LINE_BYTES + lifeline.SIZE_BYTES
_EXCUSED = -1.0
_LEAVES_WITHIN_S = 60.0
_ASK_OFFSET = 8


class HeartbeatBoard:
    """The agent's side: one slot for each of ``size`` local ranks."""

    def __init__(self, size: int):
        leftovers.remove()
        self.path, self._lock = leftovers.make(_SLOT_BYTES * size)
        self._memory = _map(self.path)
        self._lifelines = [Lifeline(self._memory, slot * _SLOT_BYTES + _LINE_BYTES) for slot in range(size)]
        for one in self._lifelines:
            one.create()

    def silent_s(self, slot: int, now_s: float) -> float:
        """Seconds since the last beat; 0.0 before the first one, and while silence means nothing.

        Of a rank that leaves: beyond the time in which an interpreter ends, without its threads.
        """
        beat_s = self._beat_s(slot)
        if beat_s < _EXCUSED:
            return max(now_s + beat_s - _LEAVES_WITHIN_S, 0.0)
        return max(now_s - beat_s, 0.0) if beat_s > 0.0 else 0.0

    def has_begun(self, slot: int) -> bool:
        """Whether the rank has taken its lifeline."""
        return self._beat_s(slot) != 0.0

    def vacate(self, slot: int) -> None:
        """The rank has ended, and another process will take the slot."""
        struct.pack_into("d", self._memory, slot * _SLOT_BYTES, 0.0)

    def await_end(self, slot: int) -> None:
        """Returns once the rank has begun to end, however it does; only after :meth:`has_begun`."""
        self._lifelines[slot].await_end()

    def ask(self, what: Ask) -> None:
        """Of all ranks, also of those that take a slot later."""
        for slot in range(len(self._lifelines)):
            self._memory[slot * _SLOT_BYTES + _ASK_OFFSET] = what

    def close(self) -> None:
        """The memory stays mapped: a thread may still wait there."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock)

    def _beat_s(self, slot: int) -> float:
        (beat_s,) = struct.unpack_from("d", self._memory, slot * _SLOT_BYTES)
        return float(beat_s)


class Heartbeat:
    """The rank's side, made by its main thread.

    A rank whose threads do not run (stopped, or never giving up the GIL) is silent, and so is one that ``may_beat`` no
    more.
    """

    def __init__(self, path: str, slot: int, interval_s: float):
        self._memory, self._offset, self._interval_s = _map(Path(path)), slot * _SLOT_BYTES, interval_s
        self._lifeline = Lifeline(self._memory, self._offset + _LINE_BYTES)
        self._lifeline.take()
        self._excused = self._leaves = False
        self.may_beat: Callable[[], bool] = lambda: True
        """Asked before each beat, unless silence means nothing."""
        self._beat(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="odyssey-heartbeat", daemon=True)
        self._thread.start()

    @property
    def asked(self) -> Ask:
        """What the agent wants of this rank."""
        return Ask(self._memory[self._offset + _ASK_OFFSET])

    def leave(self) -> None:
        """The rank is about to end, and its threads before it: it has longer to do so."""
        self._leaves = True
        self._beat(-time.monotonic())

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """In the body silence means nothing: for compiled code that keeps the GIL, however long it takes."""
        self._excused = True
        self._beat(_EXCUSED)
        try:
            yield
        finally:
            self._excused = False
            self._beat(time.monotonic())

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            now_s = time.monotonic()
            if self._excused or self._leaves or self.may_beat():
                self._beat(_EXCUSED if self._excused else -now_s if self._leaves else now_s)

    def _beat(self, value: float) -> None:
        struct.pack_into("d", self._memory, self._offset, value)


def _map(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)
