"""Leaving operations that will never end, because a peer is gone.

Behind one small interface, ``Abort``: what one generation's groups hang on. NCCL has an abort that works
(:class:`NcclAbort`); for gloo, which has none, see ``abort_gloo.py``.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from odyssey_megatron.errors import PeerFailed, Superseded

T = TypeVar("T")

_LONGEST_CALL_S = 0.2
"""So long a call of NCCL's is waited for that may be about to return; one that waits for a peer never does."""


class Abort(Protocol):
    """The emergency exit of one generation's groups."""

    fired: bool

    @property
    def patience(self) -> timedelta | None:
        """How long a wait is told to wait. None: the operation knows."""

    @property
    def holds(self) -> torch.Tensor | None:
        """See ``execute/ledger.py``: None where whoever waits for an operation that was ended hears of it."""

    def fall(self) -> None:
        """Nothing counts any more that a device does with what others' :meth:`fire` leaves. Any thread."""

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
            return self.connected and self.begun == given and (last is None or _is_through(last))
        return False

    def failed(self) -> None:
        """What has begun was refused: it is never clean again."""
        self.given, self.connected = self.given + 1, False

    def rest(self) -> None:
        """Lets go of the last operation, and of its tensors, if it is through."""
        if self.is_clean:
            self.last = None


def _is_through(work: Any) -> bool:
    """Of a work of NCCL's: its kernel has ended. Where a peer's end was noticed it is said to be completed, with an
    error, while the kernel goes on until it is aborted. Source: torch 2.13 ``WorkNCCL::isCompleted``.
    """
    return bool(work.is_completed()) and work.exception() is None


class NcclAbort:
    """NCCL has an abort that works, also for the kernels on the device, so waiting needs no helper.

    Connecting does: torch knows a communicator's handle, by which it could be ended, only once it is connected
    (``ProcessGroupNCCL::initNCCLComm``, unless NCCL's calls do not block). So whoever connects with a rank that has
    died meanwhile is left behind in it, in a thread of its own (:meth:`side_by_side`).

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
        self._connecting: list[queue.SimpleQueue[Any]] = []

    def adopt(self, backend: Any, use: Use) -> None:
        with self._lock:
            self.uses[backend] = use

    def give(self, backends: Iterable[Any], to: NcclAbort) -> None:
        """They go with that generation from now on. Raises Superseded, and gives nothing, if either is fired."""
        # Under both locks whoever fires finds each of them once. An earlier generation gives to a later one.
        with self._lock, to._lock:
            if self.fired or to.fired:
                raise Superseded("a newer generation exists")
            for backend in backends:
                to.uses[backend] = self.uses.pop(backend)

    def connected(self, backend: Any, *, may_be_given: bool = True) -> None:
        """It is, and may be given operations, or first one that connects more of it. Raises Superseded if that is too
        late; then it is gone.
        """
        with self._lock:
            if not self.fired:
                self.uses[backend].connected = may_be_given
                return
        backend.abort()  # there was nothing to abort when all others were, and torch does not remember that
        raise Superseded("a newer generation exists")

    def side_by_side(self, functions: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """What each returns, of threads that are left behind once fired. Raises Superseded, or what one raised."""
        ended: queue.SimpleQueue[tuple[str, Any, Exception | None] | None] = queue.SimpleQueue()
        with self._lock:
            self._connecting.append(ended)

        def run(name: str) -> None:
            try:
                ended.put((name, functions[name](), None))
            except Exception as error:  # noqa: BLE001 - handed to the caller's thread
                ended.put((name, None, error))

        for name in functions:
            threading.Thread(target=run, args=(name,), name=f"odyssey-connect {name}", daemon=True).start()
        found: dict[str, T] = {}
        while len(found) < len(functions) and not self.fired:
            if (one := ended.get()) is None:
                break
            name, result, error = one
            if error is not None and not self.fired:
                raise error
            found[name] = result
        if self.fired:
            raise Superseded("a newer generation exists")
        return found

    def use_of(self, backend: Any) -> Use | None:
        return self.uses.get(backend)

    def fall(self) -> None:
        self.fired = True
        self.holds.numpy()[...] = 0.0

    def fire(self) -> None:
        self.fall()
        with self._lock:
            unclean = {backend: use for backend, use in self.uses.items() if not use.is_clean}
            for backend in unclean:
                del self.uses[backend]
            for ended in self._connecting:
                ended.put(None)
        within = {backend: use for backend, use in unclean.items() if use.begun != use.given}
        abort_all([backend for backend in unclean if backend not in within])
        # An abort frees what the thread that trains may be using, in a call of NCCL's that looks at nothing.
        ends_s = time.monotonic() + _LONGEST_CALL_S
        while any(use.begun != use.given for use in within.values()) and time.monotonic() < ends_s:
            time.sleep(0.001)
        abort_all([*within])

    def hand_over(self) -> dict[Any, Use]:
        with self._lock:
            uses, self.uses = self.uses, {}
        # One that is connecting may have come behind :meth:`fire`: it goes when it is connected.
        return {backend: use for backend, use in uses.items() if use.is_clean}

    def close(self) -> None:
        self.fire()
        abort_all(list(self.hand_over()))

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
        except NotImplementedError:  # no other generation can do it either
            raise
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


def abort_all(backends: Sequence[Any]) -> None:
    """Returns when all are gone."""
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
            _as_work([*args, *kwargs.values()])
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
            if use is not None:
                use.failed()
            if isinstance(error, NotImplementedError):  # no other generation can do it either
                raise
            if self._abort.fired:
                raise Superseded("the generation of this group is over") from error
            raise PeerFailed(f"{operation}: {error}") from error


def _as_work(arguments: Iterable[Any]) -> None:
    """From torch 2.8 on NCCL's backend returns nothing of a collective that is asked for with ``async_op=False``, and
    runs it on the caller's stream. Here each has a work that can be waited for and looked at; who does not want to
    wait for it himself has it waited for by ``torch.distributed``.
    """
    for one in arguments:
        if hasattr(one, "asyncOp"):
            one.asyncOp = True


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
