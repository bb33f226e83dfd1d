"""Writing that nobody waits for: a full, read-only, deleted or hanging folder costs lines, never a step."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, NoReturn, TypeVar

T = TypeVar("T")

_PATIENCE_S = 0.2
"""So long a caller waits until what it has put is written, unless something is wrong by then."""
_RETRY_S = 1.0
_HANGS_AFTER_S = 5.0
_SAID_EVERY_S = 60.0
_FAREWELL_S = 2.0
KEPT_BYTES = 4 << 20


def say(text: str) -> None:
    """A line for people. That their terminal or log is gone, or full, is no reason to end."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def within(limit_s: float, work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, done in a thread; TimeoutError if it hangs, and then it does so alone."""
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
        """``write`` raises if it cannot; ``resumed`` is told how many items were lost once it can again."""
        self._write, self._name, self._kept_bytes, self._resumed = write, name, kept_bytes, resumed
        self._changed = threading.Condition()
        self._waiting: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._put = self._settled = 0
        """Items so far; and how many of them have been written, or lost."""
        self._lost = 0
        self._writes_since_s = 0.0
        self._error: Exception | None = None
        self._attempts = 0
        self._behind = self._ends = False
        self._said_s = -_SAID_EVERY_S
        self._complained = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        atexit.register(self.close)

    def put(self, item: T, size_bytes: int) -> bool:
        """Whether ``item`` is written, with all before it; else it will be later, or is lost."""
        with self._changed:
            self._start()
            self._waiting.append((item, size_bytes))
            self._bytes, self._put = self._bytes + size_bytes, self._put + 1
            self._make_room()
            self._changed.notify_all()
            if not self._behind and threading.current_thread() is not self._thread:
                self._behind = not self._await(self._put, _PATIENCE_S)
            hangs_s = time.monotonic() - self._writes_since_s if self._writes_since_s else 0.0
            written = self._settled == self._put
        if hangs_s > _HANGS_AFTER_S:
            self._complain(f"has not answered for {hangs_s:.0f} s")
        return written

    def flush(self, limit_s: float = _FAREWELL_S) -> bool:
        """Tries at once, for ``limit_s`` at most; whether all that was put is written."""
        if os.getpid() != self._process:
            return False  # a fork has no thread, and its parent writes
        with self._changed:
            self._await(self._put, limit_s)
            return self._settled == self._put

    def close(self) -> None:
        """Flushes; says what is lost for good."""
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return
        written = self.flush()
        with self._changed:
            self._ends = written
            missing = self._lost + self._put - self._settled
            self._changed.notify_all()
        if missing:
            say(f"[odyssey] {self._name}: {missing} line(s) were lost.")

    def _await(self, number: int, limit_s: float) -> bool:
        """Whether the first ``number`` items are settled; False as soon as an attempt has failed."""
        attempts = self._attempts
        if self._error is not None:
            self._error = None  # try at once
            self._changed.notify_all()
        self._changed.wait_for(lambda: self._settled >= number or self._attempts > attempts, limit_s)
        return self._settled >= number

    def _make_room(self) -> None:
        while self._bytes > self._kept_bytes and len(self._waiting) > 1:
            _, size_bytes = self._waiting[1]  # part of the first may be written
            del self._waiting[1]
            self._bytes -= size_bytes
            self._lost, self._settled = self._lost + 1, self._settled + 1

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._ends = False
            self._thread = threading.Thread(target=self._run, name="odyssey-outlet", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends)
                if not self._waiting:
                    self._thread = None
                    return
                item, size_bytes = self._waiting[0]
                self._writes_since_s = time.monotonic()
            try:
                self._write(item)
            except Exception as error:  # noqa: BLE001 - whatever it is, the job goes on
                self._failed(error)
            else:
                self._wrote(size_bytes)

    def _failed(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        self._complain(f"cannot be written ({reason})")
        with self._changed:
            self._writes_since_s, self._error, self._behind = 0.0, error, True
            self._attempts += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is None, _RETRY_S)

    def _wrote(self, size_bytes: int) -> None:
        with self._changed:
            self._waiting.popleft()
            self._bytes, self._settled = self._bytes - size_bytes, self._settled + 1
            self._writes_since_s = 0.0
            lost, caught_up = 0, not self._waiting
            if caught_up:
                lost, self._lost, self._behind, self._error = self._lost, 0, False, None
            self._changed.notify_all()
        if caught_up and lost:
            self._resumed(lost)
        if caught_up and self._complained:
            self._complained = False
            say(f"[odyssey] {self._name} is written again; {lost} line(s) were lost.")

    def _complain(self, what: str) -> None:
        """Once an outage, and not more often than people can read."""
        now_s = time.monotonic()
        if self._complained or now_s - self._said_s < _SAID_EVERY_S:
            return
        self._complained, self._said_s = True, now_s
        say(
            f"[odyssey] {self._name} {what}. The job goes on without it; the newest {self._kept_bytes >> 20} MiB are "
            "kept, and written once they can be."
        )


class Lines:
    """A file that whole lines are appended to; it, its folder or its room may be gone between two of them."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = os.fspath(path)
        self._fd = -1
        self._begun: tuple[bytes, bytes] | None = None
        """A line of which a part is written, and its rest."""

    def write(self, line: bytes) -> None:
        """Raises OSError; a part may then be written, and the next call must be with the same line."""
        try:
            if self._fd >= 0 and not os.fstat(self._fd).st_nlink:
                self.close()  # deleted
            rest = self._begun[1] if self._begun else line
            if self._fd < 0:
                rest = self._open(line, rest)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
                self._begun = (line, rest) if rest else None
        except OSError:
            self.close()
            raise

    def _open(self, line: bytes, rest: bytes) -> bytes:
        """What is left to write: a file that ends within a line ends within ours, or in that of a killed process."""
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        if torn:
            return rest if rest != line else b"\n" + line
        return line

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
