"""Files that a job keeps outside its run folder, and the removal of those that killed jobs have left.

The process that makes such a file holds a lock on it, which the kernel drops when the process ends, however it does. A
file that is not locked is no longer in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from pathlib import Path

PREFIX = "odyssey-heartbeat-"
_NEW_PREFIX = "odyssey-new-"
_NEW_S = 60.0
"""Seconds after it was made in which a file without a lock may still get one."""


def shared_memory() -> Path:
    return Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp")


def make(size_bytes: int) -> tuple[Path, int]:
    """Make a file of zeros in shared memory, for this user only; return its path and the descriptor that holds its
    lock.
    """
    name = f"{os.getpid()}-{time.monotonic_ns()}"
    new, path = (shared_memory() / f"{prefix}{name}" for prefix in (_NEW_PREFIX, PREFIX))
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        # The memory is allocated now: if there is no room, an error here is better than one at the first write.
        os.posix_fallocate(fd, 0, size_bytes)
        os.rename(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        os.close(fd)
        raise
    return path, fd


def _age_s(path: Path) -> float:
    """Return the age of ``path`` by the monotonic time in its name, as a wall clock may jump."""
    made = path.name.rpartition("-")[2]
    return time.monotonic() - int(made) / 1e9 if made.isdecimal() else math.inf


def remove(folder: Path | None = None) -> list[Path]:
    """Remove what killed jobs of this user have left, and nothing of a living one; return the removed paths."""
    folder = folder or shared_memory()
    removed = []
    for path in sorted((*folder.glob(PREFIX + "*"), *folder.glob(_NEW_PREFIX + "*"))):
        with contextlib.suppress(OSError):  # another user's, locked, or just gone
            if path.name.startswith(_NEW_PREFIX) and 0 <= _age_s(path) < _NEW_S:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
            finally:
                os.close(fd)
    return removed
