"""Leave gloo operations that will never end.

gloo has no abort that works (measured with torch 2.13: abort, shutdown and destroy of a group leave an operation in
flight waiting for its timeout). Two things stand in for it. Its connections are shut down from outside, which frees
most operations within milliseconds. But gloo does not signal an operation whose payload is already in flight. So every
wait also runs in a helper thread, which the waiting thread can leave behind.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from odyssey_megatron.errors import PeerFailed, Superseded
from odyssey_megatron.rebuild.abort import Use

T = TypeVar("T")


class GlooAbort:
    """The abort of a generation's gloo groups: it shuts their sockets down, and waits in helper threads.

    Any thread may wait. Helper threads are reused. One that was left behind in an operation lives until the operation
    ends, at the latest by its timeout.
    """

    holds = None

    def __init__(self, patience: timedelta | None = None) -> None:
        """``patience``: the limit of a wait for a message. By default gloo would apply the limit for connecting."""
        self.fired, self.patience = False, patience
        self._lock = threading.Lock()
        self._sockets: set[str] = set()
        self._published: list[bytes] = []
        self._calls: set[_Call] = set()
        self._helpers = _Helpers()

    def fall(self) -> None:
        """Do nothing: a wait for an operation that was ended raises."""

    def fire(self) -> None:
        with self._lock:
            self.fired = True
            sockets, self._sockets = self._sockets, set()
            _shut_down(sockets)
        for call in list(self._calls):
            call.leave()

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        before = set(_open_sockets().values())
        try:
            yield
        finally:
            with self._lock:
                opened = {
                    inode for fd, inode in _open_sockets().items() if inode not in before and self._is_own(fd)
                }
                if self.fired:
                    _shut_down(opened)
                else:
                    self._sockets |= opened
        self._check()

    def meet(self, published: Iterable[bytes]) -> None:
        self._published += published

    def _is_own(self, fd: int) -> bool:
        """Return whether one end of ``fd`` is an address at which a rank of these groups listens.

        Other threads open sockets, too, while the groups connect.
        """
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            ends = [_as_published(copy.family, end()) for end in (copy.getsockname, copy.getpeername)]
            return any(end and end in each for end in ends for each in self._published)
        return False

    def call(self, function: Callable[[], T]) -> T:
        self._check()
        call = _Call(function)
        self._calls.add(call)
        self._helpers.start(call)
        if self.fired:  # it may have been set after the check above, before ``fire`` could see the call
            call.leave()
        call.done.acquire()
        self._calls.discard(call)
        if not call.finished:
            raise Superseded("a newer generation exists; this operation was left behind")
        if call.error is None:
            result: T = call.result
            return result
        try:
            self._check()
            if isinstance(call.error, RuntimeError) and not isinstance(call.error, NotImplementedError):
                raise PeerFailed(str(call.error)) from call.error
            raise call.error
        finally:
            del call  # the cycle error -> traceback -> this frame -> call -> error would keep the group's threads alive

    def drain(self) -> None:
        """Do nothing: when a wait returns, the whole message is here."""

    settle = drain

    def adopt(self, backend: Any, use: Use) -> None:
        """Do nothing: the backend's sockets are found by :meth:`connecting`."""

    def use_of(self, backend: Any) -> None:
        return None

    def hand_over(self) -> dict[Any, Use]:
        return {}

    def close(self) -> None:
        self.fire()
        self._helpers.close()

    def _check(self) -> None:
        if self.fired:
            raise Superseded("a newer generation exists")


class _Call:
    """A function call that runs in another thread, and that its caller can leave behind."""

    __slots__ = ("done", "error", "finished", "function", "result")

    def __init__(self, function: Callable[[], Any]):
        self.function: Callable[[], Any] | None = function
        self.done = threading.Lock()  # a bare lock wakes a waiter faster than an Event
        self.done.acquire()
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self, before_done: Callable[[], None]) -> None:
        function, self.function = self.function, None
        done = self.done
        try:
            self.result = function() if function else None
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            self.error = error
        self.finished = True
        del self, function  # error -> traceback -> this frame -> self -> error: see GlooAbort.call
        before_done()
        with contextlib.suppress(RuntimeError):
            done.release()

    def leave(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been released already
            self.done.release()


class _Helpers:
    """A pool of threads that run calls. It grows to the largest number of calls at one time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Call | None]] = []
        self._closed = False

    def start(self, call: _Call) -> None:
        with self._lock:
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(calls,), name="odyssey-wait", daemon=True).start()
        calls.put(call)

    def close(self) -> None:
        """End the threads. A thread that is busy with a call ends after it."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for calls in idle:
            calls.put(None)

    def _run(self, calls: queue.SimpleQueue[_Call | None]) -> None:
        while (call := calls.get()) is not None:
            # The thread is idle again before the caller goes on, which may have the next call for it.
            call.run(before_done=lambda: self._release(calls))
            del call  # it keeps tensors alive

    def _release(self, calls: queue.SimpleQueue[_Call | None]) -> None:
        with self._lock:
            if not self._closed:
                return self._idle.append(calls)
        calls.put(None)


def _open_sockets() -> dict[int, str]:
    """Return ``socket:[inode]`` for each open socket of this process, by fd.

    An inode, unlike an fd, is not reused while anyone may still refer to the old socket.
    """
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{fd}")
            if link.startswith("socket:"):
                found[int(fd)] = link
    return found


def _as_published(family: int, address: Any) -> bytes:
    """Return the first bytes of the ``sockaddr`` with which gloo would publish ``address``.

    Empty if ``family`` is neither IPv4 nor IPv6.
    """
    if family == socket.AF_INET:
        return struct.pack("=H", family) + struct.pack("!H", address[1]) + socket.inet_aton(address[0])
    if family == socket.AF_INET6:
        host = socket.inet_pton(family, address[0].partition("%")[0])
        return struct.pack("=H", family) + struct.pack("!HI", *address[1:3]) + host
    return b""


def _shut_down(sockets: set[str]) -> None:
    for fd, inode in _open_sockets().items():
        if inode not in sockets:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            same = os.readlink(f"/proc/self/fd/{copy.fileno()}") == inode  # the fd may have been reused
            # gloo ends the process if accepting fails on its listening socket.
            if same and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                copy.shutdown(socket.SHUT_RDWR)
