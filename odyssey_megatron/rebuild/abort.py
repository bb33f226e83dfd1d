"""Leave operations that will never end because a peer is gone.

Each generation has one object with the small interface ``Abort``, which ends the operations of all its groups. NCCL
has an abort that works (:class:`NcclAbort`); for gloo, which has none, see ``abort_gloo.py``.
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
"""The longest wait for an NCCL call that may be about to return; a call that waits for a peer never does."""


class Abort(Protocol):
    """The emergency exit of one generation's groups."""

    fired: bool

    @property
    def patience(self) -> timedelta | None:
        """The timeout to pass to an operation's wait. None: the operation has its own."""

    @property
    def holds(self) -> torch.Tensor | None:
        """The word that falls before anything is aborted (``execute/ledger.py``). None where a wait for an operation
        that was ended raises, so that no word is needed.
        """

    def fall(self) -> None:
        """Declare void what a device computes from now on, as the other ranks' :meth:`fire` may leave garbage in
        messages. May be called from any thread.
        """

    def fire(self) -> None:
        """End every operation of the generation with Superseded. May be called from any thread, and repeatedly."""

    def connecting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which groups of this generation connect. It raises Superseded at its end if fired."""

    def meet(self, published: Iterable[bytes]) -> None:
        """Take note of what the ranks of one of the groups have published to each other in order to connect."""

    def call(self, function: Callable[[], T]) -> T:
        """Return ``function()``. Raises Superseded as soon as fired, and PeerFailed for a RuntimeError of it."""

    def drain(self) -> None:
        """Return when the accelerator has done all the work that it was given."""

    def settle(self) -> None:
        """Do as :meth:`drain`, and raise Superseded if the accelerator may have computed with the garbage of an
        operation that :meth:`fire` has ended. A rank calls this before it acts on what others have sent it.
        """

    def adopt(self, backend: Any, use: Use) -> None:
        """Make ``backend`` end with this generation, unless it is clean at the end: then it outlives it."""

    def use_of(self, backend: Any) -> Use | None:
        """Return the record of what ``backend`` was given. None where nothing outlives an abort, or once ``backend``
        has been ended.
        """

    def hand_over(self) -> dict[Any, Use]:
        """Return the clean backends, once fired. From now on they belong to the caller."""

    def close(self) -> None:
        """End the operations that are left, and free what waiting needs. No more operations may follow."""


class Use:
    """A record of the operations that one rank has given a communicator.

    The communicator is clean while all of them are complete; then it may outlive an abort. The thread that ends a
    generation is not the thread that gives operations, and must not wait for it. So each operation is counted twice:
    before it is given (``begun``) and afterwards (``given``).
    """

    def __init__(self) -> None:
        self.connected = False
        self.begun = self.given = 0
        self.last: Any = None

    @property
    def is_clean(self) -> bool:
        given, last = self.given, self.last
        with contextlib.suppress(RuntimeError):  # raised for an operation that has failed
            return self.connected and self.begun == given and (last is None or _is_through(last))
        return False

    def failed(self) -> None:
        """Note that an operation that had begun was refused. The communicator is never clean again."""
        self.given, self.connected = self.given + 1, False

    def rest(self) -> None:
        """Release the last operation and its tensors if the communicator is clean."""
        if self.is_clean:
            self.last = None


def _is_through(work: Any) -> bool:
    """Return whether the kernel of an NCCL work has ended without an error.

    ``is_completed`` alone does not say so: once the end of a peer is noticed, a work counts as completed, with an
    error, while its kernel runs on until it is aborted. Source: torch 2.13 ``WorkNCCL::isCompleted``.
    """
    return bool(work.is_completed()) and work.exception() is None


class NcclAbort:
    """The abort of a generation's NCCL communicators.

    NCCL's own abort works, also for kernels on the device, so waiting needs no helper thread. Connecting does need one:
    torch learns a communicator's handle, by which it could be aborted, only once it is connected
    (``ProcessGroupNCCL::initNCCLComm``, unless NCCL's calls do not block). So each connection is made in a thread of
    its own, which is left behind if it waits for a rank that has died (:meth:`side_by_side`).

    This project's tests do not run it on a GPU. The facts are taken from PyTorch's documentation of
    ``_abort_process_group`` and from libraries that abort in the same way. ``tests/strict`` runs it by these rules.

    Args:
        holds: A scalar tensor of 1.0, in pinned memory.
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
        """Hand ``backends`` over to a later generation. Raises Superseded, and gives nothing, if either is fired."""
        # Under both locks, whoever fires finds each backend exactly once. The locks cannot be taken in a circle, as an
        # earlier generation always gives to a later one.
        with self._lock, to._lock:
            if self.fired or to.fired:
                raise Superseded("a newer generation exists")
            for backend in backends:
                to.uses[backend] = self.uses.pop(backend)

    def release(self, backends: Iterable[Any]) -> None:
        """Let go of ``backends``, which from now on belong to the caller. Raises Superseded, and lets none go, if the
        generation is over.
        """
        with self._lock:
            if self.fired:
                raise Superseded("a newer generation exists")
            for backend in backends:
                del self.uses[backend]

    def connected(self, backend: Any, *, may_be_given: bool = True) -> None:
        """Note that ``backend`` is connected. Raises Superseded if the generation is over, and then aborts ``backend``.

        Args:
            may_be_given: Whether it may be given operations, and thus be clean. False if a first message is still to
                connect the rest of it.
        """
        with self._lock:
            if not self.fired:
                self.uses[backend].connected = may_be_given
                return
        # When the others were aborted this one had nothing to abort yet, and torch does not remember that it was asked.
        backend.abort()
        raise Superseded("a newer generation exists")

    def side_by_side(self, functions: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Run each function in a thread of its own, and return their results by name.

        Once fired, the threads are left behind. Raises Superseded then, or else what one of the functions raised.
        """
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
        # An abort frees memory that the training thread may be using within an NCCL call, which does not check for it.
        ends_s = time.monotonic() + _LONGEST_CALL_S
        while any(use.begun != use.given for use in within.values()) and time.monotonic() < ends_s:
            time.sleep(0.001)
        abort_all([*within])

    def hand_over(self) -> dict[Any, Use]:
        with self._lock:
            uses, self.uses = self.uses, {}
        # A backend that was connecting may have been adopted after :meth:`fire`. ``connected`` then aborts it.
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
        """Do nothing: the backends are known."""

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
        if self.fired:  # the host waits for a barrier, which may have ended only because it was aborted
            raise Superseded("a newer generation exists")
        return result

    def drain(self) -> None:
        torch.cuda.current_stream().synchronize()

    def settle(self) -> None:
        # A wait only orders streams. The host runs ahead, and after an abort the kernels go on with garbage.
        self.drain()
        if self.fired:  # it is set before anything is aborted
            raise Superseded("a newer generation exists")


def abort_all(backends: Sequence[Any]) -> None:
    """Abort all ``backends``, and return when that is done."""
    # One thread for each: an abort waits for its communicator's kernels, and these may wait for one another.
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

    @property
    def is_through(self) -> bool:
        """Whether it has ended without an error, so that nobody reads its tensors any more. Gloo tells only who waits
        for it.
        """
        return self._waited or _is_through(self._work)

    def result(self) -> Any:
        return self._work.result()

    def get_future(self) -> Any:
        return self._work.get_future()


def wait_all(works: Sequence[AbortableWork]) -> None:
    """Wait for all of ``works``, which belong to one generation, in a single call of its abort."""
    waiting = [work for work in works if not work._waited]
    if waiting:
        abort, waits = waiting[0]._abort, [work._work.wait for work in waiting]
        limit = () if abort.patience is None else (abort.patience,)
        abort.call(lambda: [wait(*limit) for wait in waits])
        for work in waiting:
            work._waited = True


class AbortableGroup(dist.ProcessGroup):
    """A process group whose operations all end with Superseded once its generation is over.

    Functions of ``torch.distributed`` take it like any group, so library code that waits needs no change.
    """

    def __init__(self, inner: dist.ProcessGroup, abort: Abort, use: Use | None = None):
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg] # its stub lacks this one
        self._inner: dist.ProcessGroup | None = inner
        self._abort, self._use = abort, use

    def getBackendName(self) -> str:  # torch's name
        return "odyssey"  # if it were "gloo", DDP would expect this very object to be a ProcessGroupGloo

    def _get_backend(self, device: torch.device) -> Any:  # torch's name
        return self  # torch 2.14 and later ask it whether several messages may go as one; they may not

    def detach(self) -> dist.ProcessGroup | None:
        """Return the inner group and let go of it. From now on every operation raises Superseded."""
        inner, self._inner = self._inner, None
        return inner

    def post(self, operation: str, *args: Any, **kwargs: Any) -> AbortableWork:
        """Start ``operation`` of the inner group."""
        inner, use = self._inner, self._use
        if use is not None:
            # Counted before ``fired`` is read: whoever fires sets that first, and reads this afterwards.
            use.begun += 1
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
    """Make collectives return a work object, by setting ``asyncOp`` on the options among ``arguments``.

    From torch 2.8 on NCCL's backend returns no work for a collective that is asked for with ``async_op=False``, and
    runs it on the caller's stream. With a work it can be waited for and examined; ``torch.distributed`` waits for it
    where the caller does not.
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
    if hasattr(dist.ProcessGroup, name)  # older versions of torch lack some
)  # fmt: skip
"""The names of the methods that ``torch.distributed`` calls on a group."""

for _name in OPERATIONS:
    setattr(AbortableGroup, _name, _operation(_name))
