"""Deletes the checkpoints that Megatron-LM deletes (--save-retain-interval, --non-persistent-save-interval): each loses
its name before it loses a file, and what stands for a checkpoint to retain stays.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.mcore.loop import saving


def install() -> None:
    """Make Megatron-LM delete in this way. It looks ``shutil`` up in its module."""
    from megatron.training import checkpointing

    checkpointing.shutil = _Shutil()


class _Shutil:
    @staticmethod
    def rmtree(path: str | Path) -> None:
        """Raises OdysseyError for a checkpoint that is retained: Megatron-LM prints it, and goes on."""
        from megatron.training import get_args

        args, folder = get_args(), Path(path)
        every = getattr(args, "save_retain_interval", None) or 0
        if folder.parent == Path(args.save) and (missing := stands_for(folder, every)):
            raise OdysseyError(f"kept: it stands for that of iteration {missing}, which was not saved")
        saving.remove(folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(shutil, name)


def delete_before(folder: Path, name: str) -> None:
    """Delete the checkpoint ``name``, which was the latest before that in ``folder`` was saved, if Megatron-LM would:
    the rank that was to do it has died.
    """
    from megatron.training import get_args

    args = get_args()
    every = getattr(args, "save_retain_interval", None)
    if not every or folder.parent != Path(args.save) or name in ("", folder.name):
        return
    before = folder.with_name(name)
    iteration = _iteration(before)
    if iteration and iteration % every and not before.is_symlink():
        with contextlib.suppress(OSError, OdysseyError):
            _Shutil.rmtree(before)


def stands_for(folder: Path, every: int) -> int:
    """The multiple of ``every`` for which ``folder`` is retained, as it has no checkpoint of its own; 0: none.

    A save that a failure has cut short is made of a later iteration (``background.py``). So what is retained is the
    first checkpoint from that iteration on. By the folders, as it has to be the same for a rank that has come back, or
    for the next job.
    """
    iteration = _iteration(folder)
    due = iteration - iteration % every if every else 0
    if due in (0, iteration):
        return 0
    earlier = (one for one in folder.parent.glob("iter_*") if due <= _iteration(one) < iteration)
    return 0 if any(_has_files(one) for one in earlier) else due


def _iteration(folder: Path) -> int:
    number = folder.name.removeprefix("iter_")
    return int(number) if number.isdecimal() else 0


def _has_files(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # it is deleted meanwhile
        return any(folder.iterdir())
    return False
