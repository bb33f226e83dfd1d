"""Keeps a job from stopping when nobody reads what it prints.

A full pipe stops every process that writes to it: with ``odyssey run ... | less`` all ranks, and the agent that watches
over them. Therefore a process, the tap, stands before such a pipe and takes everything, after a second of waiting at
most. While nobody reads, it keeps the newest lines; where lines are missing, it writes how many. It ends when the job
has ended and all that is left has been read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator

from odyssey_megatron.launch.process.signals import HANDLED
from odyssey_megatron.metrics.outlet import KEPT_BYTES

_AT_ONCE_BYTES = 1 << 16
_FAREWELL_S = 2.0
_PATIENCE_S = 1.0
"""Seconds in all, until everything is read, that printing waits when no more can be kept, as a reader may be slow."""


@contextlib.contextmanager
def before(*descriptors: int) -> Iterator[None]:
    """In the body, put taps before those of ``descriptors`` that are pipes, for this process and its children.

    At the end of the body the taps have a moment to write what is left, as in a container they may end with this
    process. Does nothing in a process of several threads, which cannot be forked safely.
    """
    if threading.active_count() > 1:
        descriptors = ()
    taps: dict[tuple[int, int], tuple[int, int]] = {}
    own: dict[int, int] = {}
    for one in descriptors:
        with contextlib.suppress(OSError):  # closed, or another user's
            found = os.fstat(one)
            if stat.S_ISFIFO(found.st_mode):
                pipe = found.st_dev, found.st_ino
                if pipe not in taps:
                    # A file description of our own, so that non-blocking writes affect no other process.
                    out = os.open(f"/proc/self/fd/{one}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                    taps[pipe] = _start(out)
                    os.close(out)
                own[one] = os.dup(one)
                os.dup2(taps[pipe][0], one)
    for tap, _ in taps.values():
        os.close(tap)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for one, original in own.items():
            os.dup2(original, one)
            os.close(original)
        ends_s = time.monotonic() + _FAREWELL_S
        for _, works in taps.values():
            select.select([works], [], [], max(ends_s - time.monotonic(), 0.0))
            os.close(works)


def _start(out: int) -> tuple[int, int]:
    """Start a tap that writes to ``out``, as no child of this process and in a session that is sent no signals.

    Returns:
        The descriptor to write to, and one that is closed at its other end when the tap ends.
    """
    source, tap = os.pipe()
    works, held = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                for number in HANDLED:
                    signal.signal(number, signal.SIG_IGN)
                ours = [fcntl.fcntl(one, fcntl.F_DUPFD, 3) for one in (source, out, held)]
                for descriptor, one in enumerate(ours):
                    os.dup2(one, descriptor)
                for name in os.listdir("/proc/self/fd"):
                    if int(name) > 2:
                        with contextlib.suppress(OSError):
                            os.close(int(name))
                _Tap().run()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    for one in (source, held):
        os.close(one)
    return tap, works


class _Tap:
    """Passes data from descriptor 0 to descriptor 1."""

    def __init__(self, kept_bytes: int = KEPT_BYTES):
        self._kept_bytes, self._lost = kept_bytes, 0
        self._first, self._rest = bytearray(), bytearray()
        """The data that is being written, and the data after it, of which lines may be dropped."""
        self._within_line = False
        """Whether the former ends within a line."""

    def run(self) -> None:
        source, sink = select.poll(), select.poll()
        source.register(0, select.POLLIN)
        both = select.poll()
        both.register(0, select.POLLIN)
        both.register(1, select.POLLOUT)
        sink.register(1, select.POLLOUT)
        ended = gone = False
        patience_s = _PATIENCE_S
        while (waits := bool(self._first or self._rest) and not gone) or not ended:
            patience_s = patience_s if waits else _PATIENCE_S
            holds, began_s = waits and not ended and patience_s > 0 and self._is_full, time.monotonic()
            looks = source if not waits else sink if ended or holds else both
            for one, _ in looks.poll(1e3 * patience_s if holds else None):
                if one == 0:
                    data = os.read(0, _AT_ONCE_BYTES)
                    ended = not data
                    self.take(b"" if gone else data)
                else:
                    try:
                        self.wrote(os.write(1, self.next()))
                    except BlockingIOError:
                        pass
                    except OSError:  # the reader is gone
                        gone = True
            if holds:
                patience_s -= time.monotonic() - began_s

    @property
    def _is_full(self) -> bool:
        return len(self._rest) + _AT_ONCE_BYTES > self._kept_bytes

    def take(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) > self._kept_bytes:
            # Drop half of it, so that this is not done for each line.
            end = self._rest.find(b"\n", len(self._rest) - self._kept_bytes // 2) + 1 or len(self._rest)
            self._lost += self._rest.count(b"\n", 0, end)
            del self._rest[:end]

    def next(self) -> bytes:
        """Return the data to write now: whole lines, if there are any."""
        if not self._first:
            if self._lost:
                self._first += b"\n" * self._within_line
                self._first += b"[odyssey] %d line(s) are missing here, as nobody read them.\n" % self._lost
                self._lost = 0
            end = self._rest.rfind(b"\n", 0, _AT_ONCE_BYTES) + 1 or _AT_ONCE_BYTES
            self._first += self._rest[:end]
            del self._rest[:end]
            self._within_line = not self._first.endswith(b"\n")
        return bytes(self._first)

    def wrote(self, size: int) -> None:
        del self._first[:size]
