"""Signs of life through shared memory.

Each rank has a slot. It contains a heartbeat, which a thread of the rank writes and its agent reads, and a lifeline,
which tells the agent of the rank's death.
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
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.launch.process import leftovers, lifeline
from odyssey_megatron.launch.process.lifeline import Lifeline

_LINE_BYTES = 64  # a cache line each: ranks do not disturb one another
_SLOT_BYTES = _LINE_BYTES + lifeline.SIZE_BYTES
_EXCUSED = -1.0
_LEAVES_WITHIN_S = 60.0
_ASK_OFFSET = 8
_GAVE_UP_OFFSET = 9


class HeartbeatBoard:
    """The agent's side: one slot for each of ``size`` local ranks. Raises ConfigError if shared memory has no room."""

    def __init__(self, size: int):
        leftovers.remove()
        try:
            self.path, self._lock = leftovers.make(_SLOT_BYTES * size)
        except OSError as error:
            raise ConfigError(
                f"{leftovers.shared_memory()}: {error.strerror}. There the ranks of this node write "
                f"{_SLOT_BYTES * size} bytes of signs of life for their launcher. Remove what is not needed there, or "
                "mount a larger one (of a container: docker run --shm-size)."
            ) from error
        self._memory = _map(self.path)
        self._lifelines = [Lifeline(self._memory, slot * _SLOT_BYTES + _LINE_BYTES) for slot in range(size)]
        for one in self._lifelines:
            one.create()

    def silent_s(self, slot: int, now_s: float) -> float:
        """Return the seconds since the last beat: 0.0 before the first one, and while silence means nothing.

        For a rank that leaves, the ``_LEAVES_WITHIN_S`` that its interpreter may take to end, without its threads, do
        not count.
        """
        beat_s = self._beat_s(slot)
        if beat_s < _EXCUSED:
            return max(now_s + beat_s - _LEAVES_WITHIN_S, 0.0)
        return max(now_s - beat_s, 0.0) if beat_s > 0.0 else 0.0

    def has_begun(self, slot: int) -> bool:
        """Return whether the rank has taken its lifeline."""
        return self._beat_s(slot) != 0.0

    def gave_up(self, slot: int) -> bool:
        """Return whether the rank is silent because ``Heartbeat.may_beat`` forbids it to beat."""
        return bool(self._memory[slot * _SLOT_BYTES + _GAVE_UP_OFFSET])

    def vacate(self, slot: int) -> None:
        """Note that the rank has ended, and another process will take the slot."""
        struct.pack_into("d", self._memory, slot * _SLOT_BYTES, 0.0)
        self._memory[slot * _SLOT_BYTES + _GAVE_UP_OFFSET] = False

    def await_end(self, slot: int) -> None:
        """Return once the rank has begun to end, in whatever way. Call it only after :meth:`has_begun`."""
        self._lifelines[slot].await_end()

    def ask(self, what: Ask) -> None:
        """Ask all ranks for ``what``, also those that take a slot later."""
        for slot in range(len(self._lifelines)):
            self._memory[slot * _SLOT_BYTES + _ASK_OFFSET] = what

    def close(self) -> None:
        """Remove the file. The memory stays mapped, as a thread may still wait there."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock)

    def _beat_s(self, slot: int) -> float:
        (beat_s,) = struct.unpack_from("d", self._memory, slot * _SLOT_BYTES)
        return float(beat_s)


class Heartbeat:
    """The rank's side, made by its main thread.

    A rank is silent if its threads do not run (it is stopped, or never gives up the GIL), or if ``may_beat`` forbids
    it.
    """

    def __init__(self, path: str, slot: int, interval_s: float):
        self._memory, self._offset, self._interval_s = _map(Path(path)), slot * _SLOT_BYTES, interval_s
        self._lifeline = Lifeline(self._memory, self._offset + _LINE_BYTES)
        self._lifeline.take()
        self._excused = self._leaves = False
        self.may_beat: Callable[[], bool] = lambda: True
        """Called before each beat to ask whether it may be sent, unless silence means nothing."""
        self._beat(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="odyssey-heartbeat", daemon=True)
        self._thread.start()

    @property
    def asked(self) -> Ask:
        """What the agent wants of this rank."""
        return Ask(self._memory[self._offset + _ASK_OFFSET])

    def leave(self) -> None:
        """Say that the rank is about to end, and its threads before it. It is then given longer."""
        self._leaves = True
        self._beat(-time.monotonic())

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """Return a context in which silence means nothing, for compiled code that keeps the GIL for any time."""
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
            beats = self._excused or self._leaves or self.may_beat()
            self._memory[self._offset + _GAVE_UP_OFFSET] = not beats
            if beats:
                self._beat(_EXCUSED if self._excused else -now_s if self._leaves else now_s)

    def _beat(self, value: float) -> None:
        struct.pack_into("d", self._memory, self._offset, value)


def _map(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)
