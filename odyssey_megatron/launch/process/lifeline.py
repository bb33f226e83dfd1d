"""A lock that a process holds for all its life, so that its death is seen at once.

A pidfd, like the end of a socket, tells of a death only after the kernel has taken the process apart. For a rank with
its hundreds of megabytes that takes tens of milliseconds while its peers compute. A robust mutex in shared memory is
released earlier: that is the first thing that happens to a dying thread (get_robust_list(2),
pthread_mutexattr_setrobust(3)).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

SIZE_BYTES = 64
"""Room for a ``pthread_mutex_t``: 40 bytes on x86-64, 48 on AArch64."""
_PROCESS_SHARED, _ROBUST = 1, 1
_taken: list[Lifeline] = []  # the C library links what a thread holds: its memory must stay mapped
_EXIT_CODE_FIELD = -1  # the last field of /proc/PID/stat, as wait(2) would return it


class Lifeline:
    """A robust mutex at ``offset`` of memory that two processes share."""

    def __init__(self, memory: mmap.mmap, offset: int):
        self._libc = ctypes.CDLL(None)
        self._room = (ctypes.c_char * SIZE_BYTES).from_buffer(memory, offset)

    def create(self) -> None:
        """Initialize the mutex: to be called once, before it is taken."""
        attributes = (ctypes.c_char * SIZE_BYTES)()
        self._call("pthread_mutexattr_init", attributes)
        self._call("pthread_mutexattr_setpshared", attributes, _PROCESS_SHARED)
        self._call("pthread_mutexattr_setrobust", attributes, _ROBUST)
        self._call("pthread_mutex_init", self._room, attributes)

    def take(self) -> None:
        """Have the calling thread, which is the main thread of its process, hold the mutex until it ends."""
        _taken.append(self)
        # The last holder may have ended before any thread waited for its end.
        self._call("pthread_mutex_lock", self._room, accept=errno.EOWNERDEAD)
        self._call("pthread_mutex_consistent", self._room, accept=errno.EINVAL)

    def await_end(self) -> None:
        """Wait until the holder has begun to end. Other threads of the caller go on meanwhile."""
        self._call("pthread_mutex_lock", self._room, accept=errno.EOWNERDEAD)
        self._call("pthread_mutex_consistent", self._room, accept=errno.EINVAL)
        self._call("pthread_mutex_unlock", self._room)

    def _call(self, name: str, *arguments: object, accept: int = 0) -> None:
        code = getattr(self._libc, name)(*arguments)
        if code not in (0, accept):
            raise OSError(code, f"{name}: {os.strerror(code)}")


def exit_code(pid: int) -> int | None:
    """Return the exit code of ``pid``, which has begun to end, as ``Popen.returncode``; None if it is not known yet."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_EXIT_CODE_FIELD])
    except (OSError, ValueError):
        return None
    # 0 may mean no permission to read the code.
    return os.waitstatus_to_exitcode(status) if status else None
