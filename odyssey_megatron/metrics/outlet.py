"""Writing that nobody waits for: a full, read-only, deleted or hanging folder costs lines, never a step."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Generic, NoReturn, TypeVar

from odyssey_megatron.metrics.backlog import Backlog

T = TypeVar("T")

_PATIENCE_S = 0.2
"""Seconds for which a caller waits until what it has put is written, unless something is wrong by then."""
_RETRY_S = 1.0
_HANGS_AFTER_S = 5.0
_SAID_EVERY_S = 60.0
_FAREWELL_S = 2.0
KEPT_BYTES = 4 << 20


def say(text: str) -> None:
    """Print a line for people. If their terminal or log is gone, or full, that is no reason to end."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Return or raise what ``work`` does, run in a thread of its own. TimeoutError if it takes longer."""
    done: list[Callable[[], T]] = []

    def run() -> None:
        try:
            result = work()
            done.append(lambda: result)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            done.append(partial(_raise, error))

    thread = threading.Thread(target=run, name="odyssey-within", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not done:
        raise TimeoutError(f"nothing within {limit_s} s")
    return done[0]()


def _raise(error: BaseException) -> NoReturn:
    raise error


class Outlet(Generic[T]):
    """Writes items in order, in a thread, again and again until it works.

    As long as it works, :meth:`put` returns when the item is written, so that a process that is killed right
    afterwards has lost nothing. Once it does not, the newest ``kept_bytes`` wait, and nobody waits for them.
    """

    def __init__(
        self,
        write: Callable[[T], None],
        *,
        name: str,
        kept_bytes: int = KEPT_BYTES,
        resumed: Callable[[int], None] = lambda lost: None,
    ):
        """Create an outlet.

        Args:
            write: Raises if it cannot write the item.
            resumed: Called, once all that waited is written again, with the number of items that were lost, if any.
        """
        self._write, self._resumed = write, resumed
        self._complaints = _Complaints(name, kept_bytes)
        self._changed = threading.Condition()
        """Guards all attributes below."""
        self._backlog: Backlog[T] = Backlog(kept_bytes)
        self._writes_since_s = 0.0
        """The time when the write at hand began; 0.0: there is none."""
        self._failures = 0
        self._pauses = False
        """An attempt has failed, and the next one has not begun."""
        self._behind = False
        """An attempt has failed, and not all is written since: callers do not wait."""
        self._ends = False
        """The outlet is closed: the thread ends when nothing waits."""
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        atexit.register(self.close)

    def put(self, item: T, size_bytes: int) -> bool:
        """Put ``item``; return whether it is written, with all before it. If not, it will be written later,
        or is lost.
        """
        with self._changed:
            self._start()
            self._backlog.put(item, size_bytes)
            self._changed.notify_all()
            if not self._behind and threading.current_thread() is not self._thread:
                self._behind = not self._await(self._backlog.put_so_far, _PATIENCE_S)
            hangs_s = time.monotonic() - self._writes_since_s if self._writes_since_s else 0.0
            written = self._backlog.is_settled
        if hangs_s > _HANGS_AFTER_S:
            self._complaints.wrong(f"has not answered for {hangs_s:.0f} s", time.monotonic())
        return written

    def flush(self, limit_s: float = _FAREWELL_S) -> bool:
        """Try to write at once, for ``limit_s`` at most; return whether all that was put is written."""
        if os.getpid() != self._process:
            # A fork has no thread, and its parent writes.
            return False
        with self._changed:
            self._await(self._backlog.put_so_far, limit_s)
            return self._backlog.is_settled

    def close(self) -> None:
        """Flush, and say what is lost for good."""
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return
        written = self.flush()
        with self._changed:
            self._ends = written
            missing = self._backlog.missing
            self._changed.notify_all()
        if missing:
            say(f"[odyssey] {self._complaints.name}: {missing} line(s) were lost.")

    def _await(self, number: int, limit_s: float) -> bool:
        """Return whether the first ``number`` items are settled; False as soon as an attempt has failed."""
        failures = self._failures
        if self._pauses:
            self._pauses = False  # try at once
            self._changed.notify_all()
        self._changed.wait_for(lambda: self._backlog.settled >= number or self._failures > failures, limit_s)
        return self._backlog.settled >= number

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._ends = False
            self._thread = threading.Thread(target=self._run, name="odyssey-outlet", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog or self._ends)
                if not self._backlog:
                    self._thread = None
                    return
                item = self._backlog.first
                self._writes_since_s = time.monotonic()
            try:
                self._write(item)
            except Exception as error:  # noqa: BLE001 - whatever it is, the job goes on
                self._failed(error)
            else:
                self._wrote()

    def _failed(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        self._complaints.wrong(f"cannot be written ({reason})", time.monotonic())
        with self._changed:
            self._writes_since_s, self._pauses, self._behind = 0.0, True, True
            self._failures += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pauses, _RETRY_S)

    def _wrote(self) -> None:
        with self._changed:
            self._backlog.written()
            self._writes_since_s = 0.0
            lost, caught_up = 0, not self._backlog
            if caught_up:
                lost, self._behind, self._pauses = self._backlog.take_lost(), False, False
            self._changed.notify_all()
        if caught_up and lost:
            self._resumed(lost)
        if caught_up:
            self._complaints.mended(lost)


class _Complaints:
    """What people are told about an outlet: once in each outage, and not more often than they can read."""

    def __init__(self, name: str, kept_bytes: int):
        self.name, self._kept_bytes = name, kept_bytes
        self._said_s = -inf
        self._complained = False
        """Whether people were told of the outage at hand."""

    def wrong(self, what: str, now_s: float) -> None:
        """Say that the items are not written."""
        if self._complained or now_s - self._said_s < _SAID_EVERY_S:
            return
        self._complained, self._said_s = True, now_s
        say(
            f"[odyssey] {self.name} {what}. The job goes on without it; the newest {self._kept_bytes >> 20} MiB are "
            "kept, and written once they can be."
        )

    def mended(self, lost: int) -> None:
        """Say that they are written again, but for those that were lost."""
        if self._complained:
            self._complained = False
            say(f"[odyssey] {self.name} is written again; {lost} line(s) were lost.")
