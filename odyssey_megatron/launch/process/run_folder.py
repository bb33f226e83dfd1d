"""Makes sure that the run folder exists, is writable, and is used by one job at a time.

The first agent of a job holds a lock on a file in it, which the kernel drops when the agent ends, however it does.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.metrics.outlet import say, within

T = TypeVar("T")

_LOCK = "lock"
_ANSWERS_WITHIN_S = 30.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_TAKEN = (
    "--odyssey-run-dir {folder}: a job that is running writes there, so this one would mix up both journals. Give this "
    "one another folder, or end that one first."
)
_UNUSABLE = (
    "--odyssey-run-dir {folder}: {why}. The journal, the profile and the report go there: name a folder that can "
    "be made and written to."
)


def prepare(folder: Path) -> None:
    """Make ``folder``. Raises ConfigError if it cannot be used."""
    _in_time(folder, lambda: _prepare(folder))


def claim(folder: Path) -> None:
    """Hold ``folder`` for this job until this process ends. Raises ConfigError if a running job has it."""
    _in_time(folder, lambda: _claim(folder))


def _in_time(folder: Path, work: Callable[[], T]) -> T:
    try:
        return within(_ANSWERS_WITHIN_S, work)
    except TimeoutError:
        why = f"it has not answered for {_ANSWERS_WITHIN_S:.0f} s"
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else str(error.strerror).lower()
    raise ConfigError(_UNUSABLE.format(folder=folder, why=why))


def _prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # The file is made or opened: one that is there already may be all that can be written in this folder.
    os.close(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))


def _claim(folder: Path) -> None:
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(fd)
        if isinstance(error, BlockingIOError):
            raise ConfigError(_TAKEN.format(folder=folder)) from None
        if error.errno not in _NO_LOCKS:
            raise
        say(
            f"[odyssey] {folder} takes no locks ({error.strerror}): a second job that writes there is not refused."
        )
