"""Folders that are not checkpoints, not yet or not any more: their names, and which of them a save may remove.

Their names have that of the job. Each rank that saves holds a shared lock on a file of its job beside them, which the
kernel drops when the rank ends, however it does. So who gets that lock for itself knows that the job is gone. If it
cannot be had, the job seems to live, and what it may still write stays until nobody has written there for an hour: it
may live, its node may be lost to a file server that does not know yet, or the file system takes no locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from odyssey_megatron.metrics.journal import host_name
from odyssey_megatron.metrics.outlet import say

_UNFINISHED = ".odyssey-"
"""Prefix of the names of what is not a checkpoint, not yet, or not any more."""
_BEFORE = "-before"
"""Suffix of the name that a checkpoint has while another one of its iteration takes its place."""
_NAME = re.compile(rf"{re.escape(_UNFINISHED)}(?P<of>.+?)(-(?P<job>[^-]+))?-[0-9a-f]+(?P<before>{_BEFORE})?")
"""Such names. Those of earlier versions have no job."""
_LOCK = ".odyssey.lock-"
"""Prefix of the names of files that ranks lock; the job's name follows."""
_TRIES, _AGAIN_S = 10, 0.02
"""For a lock that another job has for a moment, to see whether this one lives."""
_SHOWN_BYTES = 200
_RENAMES_WITHIN_S, _LOOK_S = 10.0, 0.1
"""Limit for a job that lives to put a new checkpoint into the place of the one before it, which are two renames."""
_IDLE_S = 3600.0
"""Seconds in which a save that goes on writes something."""

_held: dict[Path, int] = {}
"""Folders in which this process holds its job's lock, with the descriptors."""
_without_locks = set[Path]()
"""Folders in which no lock can be had."""


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
    return path.with_name(f"{_UNFINISHED}{path.name}-{_job()}-{secrets.token_hex(8)}")


def is_unfinished(path: Path) -> bool:
    """Whether ``path`` has no name of a checkpoint, nor one by which it gets such a name back."""
    return path.name.startswith(_UNFINISHED) and not path.name.endswith(_BEFORE)


def before(attempt: Path) -> Path:
    """The name of the checkpoint whose place ``attempt`` is about to take."""
    return attempt.with_name(attempt.name + _BEFORE)


def sync(folder: Path) -> None:
    """Make what was created or renamed in ``folder`` survive a loss of power."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _job() -> str:
    return os.environ.get("ODYSSEY_JOB", "") or "alone"


# -- which jobs live --------------------------------------------------------------------------------------------------


def hold(folder: Path, *, is_first: bool) -> None:
    """Hold the lock of this job in ``folder`` while this process lives, if that is possible. The rank that ``is_first``
    writes into it who it is.
    """
    folder = folder.resolve()
    path = folder / (_LOCK + _job())
    if folder in _without_locks:
        return
    if folder in _held:
        if _is_at(path, _held[folder]):
            return
        os.close(_held.pop(folder))  # somebody has removed it
    for _ in range(_TRIES):
        number, is_new = _made(path)
        if number < 0:
            return
        is_locked = _is_locked(number, fcntl.LOCK_SH)
        if is_locked and _is_at(path, number):
            _held[folder] = number
            break
        os.close(number)
        if is_locked is None:
            _without_locks.add(folder)
            if is_new:  # nobody could tell later that the job is gone
                path.unlink(missing_ok=True)
            return
        time.sleep(_AGAIN_S)
    if is_first and folder in _held:
        with contextlib.suppress(OSError):
            os.ftruncate(_held[folder], 0)
            os.pwrite(_held[folder], f"process {os.getpid()} on {host_name()}".encode(), 0)


def _made(path: Path) -> tuple[int, bool]:
    """A descriptor of the file ``path``, and whether this call has made it; -1 if it cannot be opened."""
    for more in (os.O_EXCL, 0):
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | more, 0o666), bool(more)
    return -1, False


def say_others(flag: str, folder: Path) -> None:
    """Say which other jobs seem to save into ``folder``, which was given by ``flag``. None is refused for that: the
    locks of a node that was lost stay for a while, and look the same.
    """
    for path, is_gone in _locks_of_others(folder).items():
        if is_gone is not False:
            continue
        first = ""
        with contextlib.suppress(OSError):
            first = path.read_bytes()[:_SHOWN_BYTES].decode(errors="replace")
        say(
            f"[odyssey] {flag} {folder}: another job seems to be running that saves its checkpoints there "
            f"({path.name.removeprefix(_LOCK)}, whose first rank is {first or 'unknown'}). Each would take the other's "
            "latest checkpoint for its own. If it is running, end one of the two, and give it another folder. If it "
            "is not, nothing needs to be done: its lock may stay for some minutes where its node was lost. If this is "
            f"said later, too, remove {path.name} there."
        )


def _locks_of_others(parent: Path) -> dict[Path, bool | None]:
    """The lock files of other jobs in ``parent``, and whether each of these jobs is gone; None: nobody can tell."""
    found = dict[Path, bool | None]()
    for path in parent.glob(f"{_LOCK}*"):
        if path.name != _LOCK + _job():
            with _to_itself(path) as is_gone:
                found[path] = is_gone
    return found


@contextlib.contextmanager
def _to_itself(path: Path) -> Iterator[bool | None]:
    """Whether this process has the lock ``path`` for itself, so that no rank of its job lives, or takes it now; None:
    nobody can tell.
    """
    number = None
    # NFS has an exclusive lock only for who may write; another user's file may allow reading alone.
    for how in (os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(OSError):
            number = os.open(path, how | os.O_CLOEXEC)
            break
    if number is None:
        yield None
        return
    try:
        is_locked = _is_locked(number, fcntl.LOCK_EX)
        yield is_locked and _is_at(path, number)
    finally:
        os.close(number)


def _is_locked(number: int, how: int) -> bool | None:
    """Whether the lock was free, and is had now; None: it cannot be had here."""
    try:
        fcntl.flock(number, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system takes no locks, or, over NFS, this user may not write
        return None
    return True


def _is_at(path: Path, number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(number))
    return False


# -- what is left of a save -------------------------------------------------------------------------------------------


def abandoned(parent: Path) -> tuple[list[Path], list[Path]]:
    """What no other job goes on writing in ``parent``: what is unfinished, and folders of checkpoints. The latter may
    be empty, or complete.
    """
    # Before the locks: whoever has made one of these has its own by then.
    found = [one for one in parent.glob(f"{_UNFINISHED}*") if _NAME.fullmatch(one.name)]
    gone, alone = {_job()}, True
    for path, is_gone in _locks_of_others(parent).items():
        alone = alone and bool(is_gone)
        if is_gone:
            gone.add(path.name.removeprefix(_LOCK))
    left = []
    for one in found:
        job = _part(one, "job")
        if job in gone or (alone and not job) or _is_idle(one):
            left.append(one)
    return left, [one for one in parent.glob("iter_*") if alone or _is_idle(one)]


def put_back(left: list[Path], is_whole: Callable[[Path], bool]) -> list[Path]:
    """Give checkpoints among what is ``left`` of saves their names back, if they lost them to a save of the same
    iteration that did not come to its end, and are whole. Returns the rest. Raises OSError.
    """
    rest = []
    for one in left:
        folder = one.with_name(_part(one, "of"))
        if _part(one, "before") and not _is_there(folder) and is_whole(one):
            one.rename(folder)
        else:
            rest.append(one)
    return rest


def await_latest(parent: Path, latest: str) -> list[Path]:
    """What is left of ``latest``, the checkpoint that the tracker file names, where it is not there for long: another
    job's save has taken its name, and has not come to its end. Waits for that.
    """
    ends_s = time.monotonic() + _RENAMES_WITHIN_S
    while latest and not _is_there(parent / latest):
        left = parent.glob(f"{_UNFINISHED}{latest}-*{_BEFORE}")
        found = [one for one in left if _part(one, "of") == latest]
        if not found or time.monotonic() > ends_s:
            return found
        time.sleep(_LOOK_S)
    return []


def _is_there(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def forget_gone(parent: Path) -> None:
    """Remove the locks in ``parent`` of jobs that are gone, and of which nothing is left to remove."""
    for path in parent.glob(f"{_LOCK}*"):
        job = path.name.removeprefix(_LOCK)
        if job == _job() or any(_part(one, "job") == job for one in parent.glob(f"{_UNFINISHED}*")):
            continue
        with _to_itself(path) as is_gone, contextlib.suppress(OSError):
            if is_gone:
                path.unlink()


def _part(path: Path, part: str) -> str:
    """A part of the name of what is unfinished; empty if it has none."""
    found = _NAME.fullmatch(path.name)
    return (found[part] or "") if found else ""


def _is_idle(path: Path) -> bool:
    with contextlib.suppress(OSError):  # it is removed meanwhile
        inside = path.iterdir() if path.is_dir() else ()
        newest_s = max(one.lstat().st_ctime for one in (path, *inside))  # a new name counts
        return bool(time.time() - newest_s > _IDLE_S)
    return False
