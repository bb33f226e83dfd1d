"""Folders that are not checkpoints, not yet or not any more: their names, and which of them a save may remove.

Their names have that of the job. The rank that removes holds a lock on a file beside them, which the kernel drops when
the rank ends, however it does. So a second job that saves into the folder is refused at its start. Where a folder takes
no locks it is not, so there a save leaves what another job may still write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path

from odyssey_megatron.errors import ConfigError

UNFINISHED = ".odyssey-"
"""Prefix of the names of what is not a checkpoint, not yet, or not any more."""
BEFORE = "-before"
"""Suffix of the name that a checkpoint has while another one of its iteration takes its place."""
_LOCK = ".odyssey.lock"
_ENDS_WITHIN_S = 10.0
"""Limit for a job that was ended to be gone: processes that a rank has forked may hold its lock a little longer."""
_IDLE_S = 3600.0
"""Seconds in which a save that goes on writes something."""

_held: dict[Path, int] = {}
"""Folders whose lock this process holds, with its descriptor."""


class Noted:
    """What this process knows of the save that it takes part in, whose attempts may be cut short."""

    def __init__(self) -> None:
        self._folder = Path()
        """The checkpoint that is saved."""
        self.latest_before = ""
        """Name of the latest checkpoint before the first attempt; empty: there was none."""
        self._numbers: set[int] = set()
        """Numbers (inodes) of the attempts' folders, which they keep when they are renamed."""

    def begin(self, folder: Path, latest: str) -> None:
        """Note that an attempt at saving ``folder`` begins while ``latest`` is the name of the latest checkpoint."""
        if folder != self._folder:
            self._folder, self.latest_before, self._numbers = folder, latest, set()

    def made(self, attempt: Path) -> None:
        self._numbers.add(attempt.stat().st_ino)

    def has_put(self, folder: Path) -> bool:
        """Whether one of the attempts has become the checkpoint ``folder``."""
        with contextlib.suppress(FileNotFoundError):
            return folder == self._folder and folder.stat().st_ino in self._numbers
        return False


noted = Noted()


def unfinished(path: Path) -> Path:
    """A name beside ``path`` that is unknown to all others."""
    return path.with_name(f"{UNFINISHED}{path.name}-{_job()}-{secrets.token_hex(8)}")


def sync(folder: Path) -> None:
    """Make what was created or renamed in ``folder`` survive a loss of power."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _job() -> str:
    return os.environ.get("ODYSSEY_JOB", "") or "alone"


def refuse_second(flag: str, folder: Path) -> None:
    """Hold ``folder``, which was given by ``flag``, for this job. Raises ConfigError if another one saves there."""
    ends_s = time.monotonic() + _ENDS_WITHIN_S
    while True:
        try:
            _hold(folder)
            return
        except BlockingIOError:
            if time.monotonic() > ends_s:
                raise ConfigError(
                    f"{flag} {folder}: a job that is running saves its checkpoints there, so that each would take the "
                    "other's latest one for its own. Give this one another folder, or end that one first."
                ) from None
        time.sleep(0.2)


def _hold(folder: Path) -> bool:
    """Whether this process holds the lock in ``folder``; it tries to. Raises BlockingIOError if another one has it."""
    folder = folder.resolve()
    path = folder / _LOCK
    with contextlib.suppress(OSError):
        if folder in _held and os.path.samestat(path.stat(), os.fstat(_held[folder])):
            return True
    if folder in _held:  # the folder has been removed meanwhile
        os.close(_held.pop(folder))
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:  # made by another user, say
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(number)
        if isinstance(error, BlockingIOError):
            raise
        return False  # a file system without locks
    _held[folder] = number
    return True


def abandoned(parent: Path) -> tuple[list[Path], list[Path]]:
    """What no other job goes on writing in ``parent``: what is unfinished, and folders of checkpoints. The latter may
    be empty, or complete.
    """
    try:
        alone = _hold(parent)
    except BlockingIOError:
        alone = False
    left = [
        one for one in parent.glob(f"{UNFINISHED}*") if alone or f"-{_job()}-" in one.name or _is_idle(one)
    ]
    return left, [one for one in parent.glob("iter_*") if alone or _is_idle(one)]


def _is_idle(path: Path) -> bool:
    with contextlib.suppress(OSError):  # it is removed meanwhile
        inside = path.iterdir() if path.is_dir() else ()
        newest_s = max(one.lstat().st_mtime for one in (path, *inside))
        return bool(time.time() - newest_s > _IDLE_S)
    return False
