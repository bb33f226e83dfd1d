"""Megatron's tracker file, which names the latest checkpoint in its folder. It may hold anything: people write to it,
too, and disks fail.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.loop import attempts
from odyssey_megatron.metrics.outlet import say

TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
"""What it says of a checkpoint of no iteration: weights that were converted, say."""
_SHOWN_BYTES = 20


def tracked(parent: Path) -> str:
    """The name of the latest checkpoint in ``parent`` by the tracker file; empty if there is no file, or it names none.
    Raises OSError.
    """
    return _name(_contents(parent) or b"")


def fault(parent: Path) -> str:
    """Why the tracker file in ``parent`` names no checkpoint, for a message; empty if it names one, or is not there.
    Raises OSError.
    """
    found = _contents(parent)
    if found is None or _name(found):
        return ""
    holds = f"it holds {found[:_SHOWN_BYTES]!r}" if found else "it is empty"
    return f"{TRACKER} names no checkpoint: {holds}"


def check(folder: Path, *, retains: bool, says: bool) -> None:
    """Check the tracker file in ``folder``, to which a job saves. One that names no checkpoint counts as none; the rank
    that ``says`` so prints a line.

    With --save-retain-interval (``retains``) Megatron reads a number there before it writes one (core_v0.16.1
    megatron/training/checkpointing.py, line 722), and fails behind a save that is complete. Raises ConfigError then.
    """
    why = latest = ""
    with contextlib.suppress(OSError):  # a failed save is reported
        why, latest = fault(folder), tracked(folder)
    if retains and (why or latest == _RELEASE):
        mend = "Write the number of an iter_* there into it, or remove it."
        if not why:
            why, mend = f"{TRACKER} says {_RELEASE}", "Save to another folder, or leave out that flag."
        raise ConfigError(
            f"in {folder}, to which checkpoints are to be saved, {why}. With --save-retain-interval Megatron-LM reads "
            f"the number of an iteration from it at each save, and would end the job at the first. {mend}"
        )
    if why and says:
        say(
            f"[odyssey] in {folder}, to which checkpoints are to be saved, {why}. The first save replaces it."
        )


def open_file(original: Callable[..., Any], path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """Megatron's way to open files, except that its tracker file is replaced as a whole."""
    if os.path.basename(str(path)) == TRACKER and mode == "w":
        return replaced(Path(path))
    return original(path, mode, *args, **kwargs)


def opening(value: Any, name: str) -> Any:
    """``value``, except that ``open`` is replaced: core_v0.19.0 gets it from an object (core/msc_utils.py, line 76)."""
    if name != "open":
        return value
    return lambda *args, **kwargs: open_file(value, *args, **kwargs)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[str]]:
    """A file that takes the place of ``path`` when it is closed."""
    written = attempts.unfinished(path)
    with written.open("w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    attempts.sync(path.parent)


def _contents(parent: Path) -> bytes | None:
    """None: there is no tracker file."""
    with contextlib.suppress(FileNotFoundError):
        return (parent / TRACKER).read_bytes().strip()
    return None


def _name(contents: bytes) -> str:
    if contents.isdigit():
        return f"iter_{int(contents):07d}"
    return _RELEASE if contents == _RELEASE.encode() else ""
