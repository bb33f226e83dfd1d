"""What a job keeps outside of its run folder, and what killed ones have left there.

Whoever makes such a thing holds a lock on it, which the kernel drops when its process ends, however it does. What is
not locked is nobody's.
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
"""So long after it was made, something without a lock may still get one."""


def shared_memory() -> Path:
    return Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp")


def make(size_bytes: int) -> tuple[Path, int]:
    """A file of zeros in shared memory that is only this user's, and the descriptor that holds its lock."""
    name = f"{os.getpid()}-{time.monotonic_ns()}"
    new, path = (shared_memory() / f"{prefix}{name}" for prefix in (_NEW_PREFIX, PREFIX))
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Not a hole: where there is no room for it, that is better known now than at the first write.
        os.posix_fallocate(fd, 0, size_bytes)
        os.rename(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        os.close(fd)
        raise
    return path, fd


def _age_s(path: Path) -> float:
    """By the clock that is in its name: a wall clock may jump."""
    made = path.name.rpartition("-")[2]
    return time.monotonic() - int(made) / 1e9 if made.isdecimal() else math.inf


def remove(folder: Path | None = None) -> list[Path]:
    """Removes what killed jobs of this user have left, and nothing of a living one; what that was."""
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
