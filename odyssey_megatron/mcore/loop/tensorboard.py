"""Megatron's TensorBoard writer on every rank, so that the curves go on when the rank that wrote them has died.

Megatron gives a writer to the last rank. Here all ranks accept what the loop logs, which is the same on all of them,
and the last living one writes it to a file. The others keep the newest, since a killed rank loses what it had not
flushed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from odyssey_megatron.launch.rank.member import Member
from odyssey_megatron.metrics.outlet import Outlet

_KEPT = 2
"""Number of iterations kept. The last rank flushes an iteration before it begins the next, and nobody is two ahead of
it.
"""
_CALL_BYTES = 200
_PROBE_BYTES = 1 << 16

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name of a method of ``SummaryWriter``, and its arguments."""


class SurvivingWriter:
    """The part of ``SummaryWriter`` that Megatron uses.

    Args:
        open_file: makes the real writer, in a thread, whenever this rank has something to write and none is open.
        note: stores the number of the newest iteration whose scalars are in the file, for a successor.
        noted: returns that number, -1 if there is none.
    """

    def __init__(
        self,
        open_file: Callable[[], Any],
        note: Callable[[int], None],
        noted: Callable[[], int],
        name: str = "TensorBoard's folder",
    ):
        self._note, self._noted = note, noted
        self._outlet = Outlet(_File(open_file).carry_out, name=name)
        self._is_last = False
        self._iteration = -1
        self._calls: list[Call] = []
        self._kept: deque[tuple[int, Call]] = deque()

    def add_scalar(self, *args: Any, **kwargs: Any) -> None:
        """As SummaryWriter's: tag, value, and the step that it belongs to."""
        if self._is_last:
            self._calls.append(("add_scalar", args, kwargs))
        else:
            self._kept.append((self._iteration, ("add_scalar", args, kwargs)))

    def add_text(self, *args: Any, **kwargs: Any) -> None:
        """As SummaryWriter's; only used at the start, by the rank that is the last one then."""
        if self._is_last:
            self._calls.append(("add_text", args, kwargs))

    def hand_over(self) -> None:
        """Stop writing: another rank is the last one now."""
        if self._is_last:
            self._write(("close", (), {}))
            self._is_last = False

    def flush(self) -> None:
        self._write()

    def close(self) -> None:
        self.hand_over()
        self._outlet.close()

    def begin(self, iteration: int) -> None:
        """Begin ``iteration``: everything that earlier iterations had to log has been logged."""
        if self._is_last and self._iteration < iteration and self._write() and self._iteration >= 0:
            self._note(self._iteration)
        self._iteration = iteration
        while self._kept and self._kept[0][0] <= iteration - _KEPT:
            self._kept.popleft()

    def become_last(self) -> None:
        """Write from now on, beginning with what the predecessor has not written. A second call does nothing."""
        if self._is_last:
            return
        self._is_last, noted = True, self._noted()
        self._calls += [call for iteration, call in self._kept if iteration > noted]
        self._kept.clear()

    def _write(self, *last: Call) -> bool:
        """Hand over all calls for writing. Returns whether everything that was logged here is in the file."""
        calls, self._calls = [*self._calls, *last], []
        return self._outlet.put(calls, _CALL_BYTES * len(calls))


class _File:
    """The real writer. It is opened anew after an error, since it has then lost its buffer, and does not recover."""

    def __init__(self, open_file: Callable[[], Any]):
        self._open_file = open_file
        self._file: Any = None

    def carry_out(self, calls: list[Call]) -> None:
        """Make all of ``calls``, and flush. After an error all of them are repeated; a point that is written twice is
        drawn once.
        """
        folder = getattr(self._file, "log_dir", None)
        if folder is not None and not Path(folder).is_dir():
            self._file = None  # deleted: what is written now would be lost
        try:
            for name, args, kwargs in calls:
                if name == "close":
                    self._close()
                    continue
                self._open()
                getattr(self._file, name)(*args, **kwargs)
            if self._file is not None:
                self._file.flush()
        except Exception:
            self._file = None
            raise

    def _open(self) -> None:
        if self._file is None:
            self._file = self._open_file()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def replace_writer(args: Any, member: Member) -> SurvivingWriter | None:
    """Replace Megatron's writer; returns the new one, or None if the job has none."""
    from megatron.training import global_vars

    folder = args.tensorboard_dir
    if not folder:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None

    class Board(SurvivingWriter, SummaryWriter):
        """A SummaryWriter by type, since Megatron's timers write to nothing else."""

    board = global_vars._GLOBAL_TENSORBOARD_WRITER = Board(
        lambda: open_writer(folder, args.tensorboard_queue_size),
        note=lambda iteration: member.reports.note("tensorboard", str(iteration)),
        noted=lambda: int(member.reports.noted("tensorboard") or -1),
        name=f"TensorBoard's folder {folder}",
    )
    if args.rank == args.world_size - 1 and not member.joins:
        board.become_last()
    return board


def open_writer(folder: str, max_queue: int) -> Any:
    """A ``SummaryWriter``. Raises OSError where there is no room for its file: each one that is opened leaves a file
    behind.
    """
    from torch.utils.tensorboard import SummaryWriter

    _leave_errors_to_us()
    probe = Path(folder, ".room")
    probe.parent.mkdir(parents=True, exist_ok=True)
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    finally:
        probe.unlink(missing_ok=True)
    return SummaryWriter(log_dir=folder, max_queue=max_queue)


def _leave_errors_to_us() -> None:
    """Silence the tracebacks of TensorBoard's thread: it passes its error to the next writer anyway."""
    before = threading.excepthook
    if getattr(before, "spares_tensorboard", False):
        return

    def hook(args: Any) -> None:
        if not (
            issubclass(args.exc_type, OSError) and type(args.thread).__module__.startswith("tensorboard")
        ):
            before(args)

    hook.spares_tensorboard = True  # type: ignore[attr-defined]
    threading.excepthook = hook
