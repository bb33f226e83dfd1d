"""The run folder belongs to one job at a time.

Each agent holds a lock on a file in it, which the kernel drops when the agent ends, however it does. The agents of a
job know each other by its name, so that several nodes can share a folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.metrics.outlet import say, within

_LOCK = "lock"
_ANSWERS_WITHIN_S = 30.0
_CHANGES_WITHIN_S = 1.0
"""So long an agent that has just made a lock its own may hold all of it."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_TAKEN = (
    "--odyssey-run-dir {folder}: a job that is running writes there, so this one would mix up both journals. Give this "
    "one another folder, or end that one first."
)
_UNUSABLE = (
    "--odyssey-run-dir {folder}: {why}. The journal, the profile and the report go there: name a folder that can "
    "be made and written to."
)


def claim(folder: Path, job: str) -> int:
    """A descriptor that holds ``folder`` for ``job`` as long as it is open.

    Args:
        job: known to all agents of a job, and to no other job; "" if there is only one agent.

    Raises:
        ConfigError: another job has it, or it cannot be used.
    """
    try:
        return within(_ANSWERS_WITHIN_S, lambda: _claim(folder, job))
    except TimeoutError:
        why = f"it has not answered for {_ANSWERS_WITHIN_S:.0f} s"
        raise ConfigError(_UNUSABLE.format(folder=folder, why=why)) from None


def _claim(folder: Path, job: str) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else str(error.strerror).lower()
        raise ConfigError(_UNUSABLE.format(folder=folder, why=why)) from None
    try:
        if not _is_ours(fd, job):
            raise ConfigError(_TAKEN.format(folder=folder))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(fd)
            raise ConfigError(_UNUSABLE.format(folder=folder, why=str(error.strerror).lower())) from None
        say(
            f"[odyssey] {folder} takes no locks ({error.strerror}): nobody sees to it that no second job writes there."
        )
    except ConfigError:
        os.close(fd)
        raise
    return fd


def _is_ours(fd: int, job: str) -> bool:
    """Whoever finds the file without a lock writes the job's name; with that name all share the lock."""
    ends_s = time.monotonic() + _CHANGES_WITHIN_S
    while True:
        if _lock(fd, fcntl.LOCK_EX):
            os.ftruncate(fd, 0)
            if job:
                _name(fd, job)
                fcntl.flock(fd, fcntl.LOCK_UN)  # another one may be first with it: see below
        elif not job:
            return False
        if not job:
            return True
        if _lock(fd, fcntl.LOCK_SH):
            found = os.pread(fd, len(job) + 1, 0).decode(errors="replace")
            # On a full disk there is no name: then it may be ours.
            return found in (job, "")
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.01)


def _name(fd: int, job: str) -> None:
    try:
        os.pwrite(fd, job.encode(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
