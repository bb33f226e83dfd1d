"""A lock that a process holds for all its life, so that its death is seen at once.

A pidfd, like the end of a socket, tells of a death only after the kernel has taken the process apart: tens of
milliseconds for a rank with its hundreds of megabytes, while its peers compute. Yet a robust mutex in shared memory
passes on as the first thing that happens to a dying thread (get_robust_list(2), pthread_mutexattr_setrobust(3)).
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
_taken: list[Lifeline] = []  # the C library chains what a thread holds: that memory must stay mapped
_EXIT_CODE_FIELD = -1  # of /proc/PID/stat: the last one, as wait(2) would return it


class Lifeline:
    """A robust mutex at ``offset`` of memory that two processes share."""

    def __init__(self, memory: mmap.mmap, offset: int):
        self._libc = ctypes.CDLL(None)
        self._room = (ctypes.c_char * SIZE_BYTES).from_buffer(memory, offset)

    def create(self) -> None:
        """Once, before anybody takes it."""
        attributes = (ctypes.c_char * SIZE_BYTES)()
        self._call("pthread_mutexattr_init", attributes)
        self._call("pthread_mutexattr_setpshared", attributes, _PROCESS_SHARED)
        self._call("pthread_mutexattr_setrobust", attributes, _ROBUST)
        self._call("pthread_mutex_init", self._room, attributes)

    def take(self) -> None:
        """The calling thread, a process's main one, holds it until it ends."""
        _taken.append(self)
        # Its last holder may have ended before anybody waited for that.
        self._call("pthread_mutex_lock", self._room, accept=errno.EOWNERDEAD)
        self._call("pthread_mutex_consistent", self._room, accept=errno.EINVAL)

    def await_end(self) -> None:
        """Returns once the holder has begun to end. Other threads of the caller go on."""
        self._call("pthread_mutex_lock", self._room, accept=errno.EOWNERDEAD)
        self._call("pthread_mutex_consistent", self._room, accept=errno.EINVAL)
        self._call("pthread_mutex_unlock", self._room)

    def _call(self, name: str, *arguments: object, accept: int = 0) -> None:
        code = getattr(self._libc, name)(*arguments)
        if code not in (0, accept):
            raise OSError(code, f"{name}: {os.strerror(code)}")


def exit_code(pid: int) -> int | None:
    """How ``pid``, which has begun to end, will end: as ``Popen.returncode``. None if it cannot be told yet."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_EXIT_CODE_FIELD])
    except (OSError, ValueError):
        return None
    # 0 is also shown to readers without permission.
    return os.waitstatus_to_exitcode(status) if status else None
