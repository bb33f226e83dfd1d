"""What a job prints does not stop it when nobody reads.

A pipe that is full stops whoever writes to it: with ``odyssey run ... | less`` all ranks, and the agent that watches
over them. Therefore a process stands before a pipe that takes everything at once. While nobody reads, it keeps the
newest lines; where some are missing, a line says how many. It ends when the job has, and all that is left is read.
"""

from __future__ import annotations

import os
import select
import signal
import stat

from odyssey_megatron.metrics.outlet import KEPT_BYTES

_AT_ONCE_BYTES = 1 << 16


def stand_before(*descriptors: int) -> None:
    """Of ``descriptors`` those that are pipes are pipes to such processes from now on, for children of this one, too.

    Call it while this process has a single thread.
    """
    taps: dict[tuple[int, int], int] = {}
    for one in descriptors:
        try:
            found = os.fstat(one)
            if not stat.S_ISFIFO(found.st_mode):
                continue
            if (pipe := (found.st_dev, found.st_ino)) not in taps:
                # One of our own: what it is set to is nobody else's business.
                out = os.open(f"/proc/self/fd/{one}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                taps[pipe] = _start(out)
                os.close(out)
        except OSError:
            continue  # closed, or another user's
        os.dup2(taps[pipe], one)
    for tap in taps.values():
        os.close(tap)


def _start(out: int) -> int:
    """The end to write to. The process is nobody's child, and in no session that is sent signals."""
    source, tap = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                os.dup2(source, 0)
                os.dup2(out, 1)
                os.closerange(2, os.sysconf("SC_OPEN_MAX"))
                _Tap().run()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(source)
    return tap


class _Tap:
    """From descriptor 0 to descriptor 1."""

    def __init__(self, kept_bytes: int = KEPT_BYTES):
        self._kept_bytes, self._lost = kept_bytes, 0
        self._first, self._rest = bytearray(), bytearray()
        """What is being written; what comes after it, of which lines may be lost."""
        self._within_line = False
        """At the end of the former."""

    def run(self) -> None:
        source, sink = select.poll(), select.poll()
        source.register(0, select.POLLIN)
        both = select.poll()
        both.register(0, select.POLLIN)
        both.register(1, select.POLLOUT)
        sink.register(1, select.POLLOUT)
        ended = gone = False
        while (waits := bool(self._first or self._rest) and not gone) or not ended:
            for one, _ in (source if not waits else sink if ended else both).poll():
                if one == 0:
                    data = os.read(0, _AT_ONCE_BYTES)
                    ended = not data
                    self.take(b"" if gone else data)
                else:
                    try:
                        self.wrote(os.write(1, self.next()))
                    except BlockingIOError:
                        pass
                    except OSError:  # whoever read is gone
                        gone = True

    def take(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) > self._kept_bytes:
            # Half of it, so that this is not done for each line.
            end = self._rest.find(b"\n", len(self._rest) - self._kept_bytes // 2) + 1 or len(self._rest)
            self._lost += self._rest.count(b"\n", 0, end)
            del self._rest[:end]

    def next(self) -> bytes:
        """What is to be written now: whole lines, where there are any."""
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
