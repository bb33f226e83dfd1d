"""Leaving operations that will never end, because a peer is gone.

Behind one small interface, ``Abort``: what one generation's groups hang on. gloo has no abort that works
(measured with torch 2.13: abort, shutdown and destroy of a group leave an operation in flight waiting for its
timeout), so two things stand in for it. Its connections are shut down from outside, which frees most
operations within milliseconds. But gloo does not signal an operation whose payload is already in flight, so
every wait also runs in a helper thread, which the waiting thread can leave behind.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from odyssey_megatron.errors import PeerFailed, Superseded

T = TypeVar("T")


class Abort(Protocol):
    """The emergency exit of one generation's groups."""

    fired: bool

    @property
    def patience(self) -> timedelta | None:
        """How long a wait is told to wait. None: the operation knows."""

    @property
    def holds(self) -> torch.Tensor | None:
        """See ``execute/ledger.py``: None where whoever waits for an operation that was ended hears of it."""

    def fire(self) -> None:
        """Ends every operation of the generation with Superseded. Any thread, any number of times."""

    def connecting(self) -> contextlib.AbstractContextManager[None]:
        """Groups of this generation connect in the body. Raises Superseded at its end if fired."""

    def meet(self, published: Iterable[bytes]) -> None:
        """What the ranks of one of its groups have published to each other to connect."""

    def call(self, function: Callable[[], T]) -> T:
        """``function()``; raises Superseded as soon as fired, PeerFailed for its RuntimeError."""

    def drain(self) -> None:
        """Returns when the accelerator has done what it was given."""

    def settle(self) -> None:
        """As :meth:`drain`. Raises Superseded if it may have computed with what an operation left that :meth:`fire` has
        ended: before a rank goes by what others have sent it.
        """

    def adopt(self, backend: Any, use: Use) -> None:
        """``backend`` goes with this generation, or, if it is clean then, outlives it."""

    def use_of(self, backend: Any) -> Use | None:
        """None where nothing outlives an abort, or it has been ended."""

    def hand_over(self) -> dict[Any, Use]:
        """Once fired: the clean ones, which are the caller's from now on."""

    def close(self) -> None:
        """No more operations will come."""


class GlooAbort:
    """Shuts the generation's sockets down, and waits where waiting can be left.

    Any thread may wait. Helpers are reused; one that was left behind in an operation lives until that ends, at
    the latest by the operation's timeout.
    """

    holds = None

    def __init__(self, patience: timedelta | None = None) -> None:
        """``patience``: with a message, which gloo would otherwise wait for no longer than it may take to connect."""
        self.fired, self.patience = False, patience
        self._lock = threading.Lock()
        self._sockets: set[str] = set()
        self._published: list[bytes] = []
        self._calls: set[_Call] = set()
        self._helpers = _Helpers()

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
        """Whether ``fd`` is connected to where a rank of these groups listens: other threads open sockets, too."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            ends = [_as_published(copy.family, end()) for end in (copy.getsockname, copy.getpeername)]
            return any(end and end in each for end in ends for each in self._published)
        return False

    def call(self, function: Callable[[], T]) -> T:
        self._check()
        call = _Call(function)
        self._calls.add(call)
        self._helpers.start(call)
        if self.fired:  # between the check above and the moment from which ``fire`` can see the call
            call.leave()
        call.done.acquire()
        self._calls.discard(call)
        if not call.finished:
            raise Superseded("a newer generation exists; this operation was left behind")
        if call.error is None:
            return call.result
        try:
            self._check()
            if isinstance(call.error, RuntimeError):  # all that gloo raises
                raise PeerFailed(str(call.error)) from call.error
            raise call.error
        finally:
            del call  # error -> traceback -> this frame -> call -> error would keep the group's threads

    def drain(self) -> None:
        """Nothing to do: a wait that returns has the whole message."""

    settle = drain

    def adopt(self, backend: Any, use: Use) -> None:
        """Nothing to do: its sockets are found."""

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


class Use:
    """What one rank has given a communicator. It is clean while all of that is through: then it may outlive an abort.

    Whoever ends a generation does so from another thread, and must not wait for the one that gives: so an operation is
    counted before it is given, and again behind that.
    """

    def __init__(self) -> None:
        self.connected = False
        self.begun = self.given = 0
        self.last: Any = None

    @property
    def is_clean(self) -> bool:
        given, last = self.given, self.last
        with contextlib.suppress(RuntimeError):  # of an operation that has failed
            return self.connected and self.begun == given and (last is None or bool(last.is_completed()))
        return False

    def rest(self) -> None:
        """Lets go of the last operation, and of its tensors, if it is through."""
        if self.is_clean:
            self.last = None


class NcclAbort:
    """NCCL has an abort that works, also for the kernels on the device, so waiting needs no helper.

    Not run on a GPU by this project's tests; the facts are those of PyTorch's documentation of
    ``_abort_process_group`` and of libraries that abort in the same way. ``tests/strict`` runs it by these rules.

    Args:
        holds: 1.0, in pinned memory.
    """

    patience = None
    """A wait with a limit would make the host wait for its device."""

    def __init__(self, holds: torch.Tensor) -> None:
        self.fired, self.holds = False, holds
        self.uses: dict[Any, Use] = {}
        self._lock = threading.Lock()

    def adopt(self, backend: Any, use: Use) -> None:
        with self._lock:
            self.uses[backend] = use

    def use_of(self, backend: Any) -> Use | None:
        return self.uses.get(backend)

    def fire(self) -> None:
        with self._lock:
            self.fired = True
            self.holds.numpy()[...] = 0.0  # before anything is aborted
            backends = [backend for backend, use in self.uses.items() if not use.is_clean]
            for backend in backends:
                del self.uses[backend]
        _abort_all(backends)

    def hand_over(self) -> dict[Any, Use]:
        with self._lock:
            clean, self.uses = self.uses, {}
        return clean

    def close(self) -> None:
        self.fire()
        _abort_all(list(self.hand_over()))

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        yield
        if self.fired:
            raise Superseded("a newer generation exists")

    def meet(self, published: Iterable[bytes]) -> None:
        """Nothing to do: it knows its backends."""

    def call(self, function: Callable[[], T]) -> T:
        if self.fired:
            raise Superseded("a newer generation exists")
        try:
            result = function()
        except RuntimeError as error:
            if self.fired:
                raise Superseded("a newer generation exists") from error
            raise PeerFailed(str(error)) from error
        if self.fired:  # of a barrier, for which the host waits, the end may have been this
            raise Superseded("a newer generation exists")
        return result

    def drain(self) -> None:
        torch.cuda.current_stream().synchronize()

    def settle(self) -> None:
        # A wait only orders streams: the host runs ahead, and after an abort the kernels go on with garbage.
        self.drain()
        if self.fired:  # which is set before anything is aborted
            raise Superseded("a newer generation exists")


def _abort_all(backends: list[Any]) -> None:
    # One thread each: an abort waits for its communicator's kernels, and they may wait for one another.
    threads = [threading.Thread(target=backend.abort, daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class AbortableWork(dist._Work):
    """A gloo or NCCL work whose wait goes through the generation's abort."""

    def __init__(self, abort: Abort, work: Any):
        super().__init__()
        self._abort, self._work, self._waited = abort, work, False

    def wait(self, timeout: Any = None) -> bool:
        wait_all([self])
        return True

    def is_completed(self) -> bool:
        return self._waited or self._work.is_completed()

    def result(self) -> Any:
        return self._work.result()

    def get_future(self) -> Any:
        return self._work.get_future()


def wait_all(works: Sequence[AbortableWork]) -> None:
    """Waits for all of ``works``, of one generation; one hop to a helper thread for all of them."""
    waiting = [work for work in works if not work._waited]
    if waiting:
        abort, waits = waiting[0]._abort, [work._work.wait for work in waiting]
        limit = () if abort.patience is None else (abort.patience,)
        abort.call(lambda: [wait(*limit) for wait in waits])
        for work in waiting:
            work._waited = True


class AbortableGroup(dist.ProcessGroup):
    """A process group whose every operation ends with Superseded once its generation is over.

    ``torch.distributed`` functions take it like any group: library code that waits needs no change.
    """

    def __init__(self, inner: dist.ProcessGroup, abort: Abort, use: Use | None = None):
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg] # its stub lacks this one
        self._inner: dist.ProcessGroup | None = inner
        self._abort, self._use = abort, use

    def getBackendName(self) -> str:  # torch's name
        return "odyssey"  # by "gloo", DDP would look for a ProcessGroupGloo in this very object

    def _get_backend(self, device: torch.device) -> Any:  # torch's name
        return self  # from torch 2.14 on it is asked whether several messages go as one; they do not

    def detach(self) -> dist.ProcessGroup | None:
        """Hands over the inner group; from now on every operation raises Superseded."""
        inner, self._inner = self._inner, None
        return inner

    def post(self, operation: str, *args: Any, **kwargs: Any) -> AbortableWork:
        """Starts ``operation`` of the inner group."""
        inner, use = self._inner, self._use
        if use is not None:
            use.begun += 1  # before the look at ``fired``: whoever fires looks here afterwards
        if self._abort.fired or inner is None:
            if use is not None:
                use.begun -= 1
            raise Superseded("the generation of this group is over")
        try:
            work = getattr(inner, operation)(*args, **kwargs)
            if use is not None:
                use.last, use.given = work, use.given + 1
            return AbortableWork(self._abort, work)
        except RuntimeError as error:
            if self._abort.fired:
                raise Superseded("the generation of this group is over") from error
            raise PeerFailed(f"{operation}: {error}") from error


def _operation(name: str) -> Callable[..., AbortableWork]:
    def operation(self: AbortableGroup, *args: Any, **kwargs: Any) -> AbortableWork:
        return self.post(name, *args, **kwargs)

    operation.__name__ = name
    return operation


OPERATIONS = tuple(
    name
    for name in (
        "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced",
        "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "gather", "scatter",
        "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
        "alltoall", "alltoall_base", "all_to_all_single", "barrier", "send", "recv", "recv_anysource",
    )
    if hasattr(dist.ProcessGroup, name)  # some are newer than others
)  # fmt: skip
"""What ``torch.distributed`` calls on a group."""

for _name in OPERATIONS:
    setattr(AbortableGroup, _name, _operation(_name))


class _Call:
    """A function call that runs elsewhere and can be left."""

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
        with contextlib.suppress(RuntimeError):  # released before
            self.done.release()


class _Helpers:
    """Threads that run calls: as many as there are calls at a time."""

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
        """Ends the threads, each after the call that it may be busy with."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for calls in idle:
            calls.put(None)

    def _run(self, calls: queue.SimpleQueue[_Call | None]) -> None:
        while (call := calls.get()) is not None:
            # Free again before the caller goes on, who may have the next call for it.
            call.run(before_done=lambda: self._release(calls))
            del call  # it keeps tensors alive

    def _release(self, calls: queue.SimpleQueue[_Call | None]) -> None:
        with self._lock:
            if not self._closed:
                return self._idle.append(calls)
        calls.put(None)


def _open_sockets() -> dict[int, str]:
    """By fd, ``socket:[inode]``. An inode, unlike an fd, is not reused while anyone may mean the old one."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{fd}")
            if link.startswith("socket:"):
                found[int(fd)] = link
    return found


def _as_published(family: int, address: Any) -> bytes:
    """The beginning of the ``sockaddr`` by which gloo tells others where it listens; empty: it is no such address."""
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
            same = os.readlink(f"/proc/self/fd/{copy.fileno()}") == inode  # the fd may be another one by now
            # gloo ends the process if accepting fails on its listening socket.
            if same and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                copy.shutdown(socket.SHUT_RDWR)
