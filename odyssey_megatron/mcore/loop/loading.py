"""Reads the checkpoint that a job begins from, on all ranks together."""

from __future__ import annotations

import contextlib
import errno
import itertools
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.loop import saving, tracker
from odyssey_megatron.names import first_few, first_texts
from odyssey_megatron.rebuild.world import Together
from odyssey_megatron.upstream import compat

_OF_CONTENT = (
    *(CheckpointingException, AssertionError),
    *(EOFError, ValueError, pickle.UnpicklingError),  # a file that was cut short, or overwritten
)
_OF_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EINVAL)
"""EINVAL: torch has sought before the start of an archive that was cut short."""
_UNKNOWN = re.compile(r"Unsupported global: GLOBAL (megatron\.[\w.]*\w)")
"""How torch says that a file has a class which this process cannot read it with."""
_SEARCHED, _LISTED = 10, 3
"""How many checkpoints, the newest ones, are searched for damage, and how many of those without are listed."""
_NEVER_LOADED = re.compile(
    r"rng_state|rerun_state_machine_state"
    r"|(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(optimizer|grad_scaler|per_bucket_numel(_unpadded)?)"
)
"""Keys of what plain Megatron-LM saves and Odyssey has no use for: randomness is a function of the step (I2), and steps
are not run again by Megatron. Of the buffers of a distributed optimizer the tensors are read, and one shard's settings
and loss scale.
"""


def load(
    args: Any,
    chunks: list[Any],
    optimizer: Any,
    scheduler: Any,
    context: Any,
    together: Together,
    *,
    replicas: int,
) -> None:
    """Run Megatron's own load into ``chunks``, the layers' optimizers and ``args``. Raises ConfigError.

    ``replicas``: of the launch line.
    """
    from megatron.training import training

    def work(world: Any) -> list[Any]:
        scheduler.num_steps = 0  # an earlier attempt may have counted
        _check_same(args, world)
        with refused(args.load or args.pretrained_checkpoint):
            args.iteration, args.num_floating_point_operations_so_far = training.load_checkpoint(
                chunks, optimizer, scheduler, checkpointing_context=context or {}
            )
        found: list[Any] = [None] * dist.get_world_size(world)
        dist.all_gather_object(found, optimizer.loaded, group=world)
        loaded = list(itertools.chain.from_iterable(found))
        return [one for place, one in enumerate(loaded) if one not in loaded[:place]]

    with _adapted(args, replicas):
        optimizer.take_over(together(work))


@contextlib.contextmanager
def _adapted(args: Any, replicas: int) -> Iterator[None]:
    """In the body ``args`` are as Megatron's load needs them.

    With --no-save-optim it would ask a checkpoint for no optimizer's state, and then apply what common.pt has of it
    (core_v0.16.1 megatron/training/checkpointing.py, ``generate_state_dict``). And it compares the number of replicas
    with that of the launch line that the checkpoint was saved under.
    """
    given = args.no_save_optim, args.data_parallel_size
    args.no_save_optim, args.data_parallel_size = None, replicas
    try:
        yield
    finally:
        args.no_save_optim, args.data_parallel_size = given


def report_keys(
    original: Callable[..., None],
    missing_keys: set[str],
    unexpected_keys: set[str],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Megatron's report of the keys by which a checkpoint and a job differ, without those that no job loads."""
    missed = {one for one in missing_keys if not _NEVER_LOADED.fullmatch(one)}
    original(missed, unexpected_keys, *args, **kwargs)


def _check_same(args: Any, world: Any) -> None:
    """Check that all ranks find the same checkpoint: otherwise they would take different paths, and wait for each other
    for ever. Collective. Raises ConfigError.
    """
    found: list[Any] = [None] * dist.get_world_size(world)
    dist.all_gather_object(found, _latest(args), group=world)
    others = [rank for rank, one in enumerate(found) if one != found[0]]
    if others:
        few, more = first_few(others)
        folder = args.load or args.pretrained_checkpoint
        raise ConfigError(
            f"not all ranks find the same checkpoint in {folder}: its latest file says {found[0]} on rank 0, and "
            f"{found[others[0]]} on rank(s) {', '.join(map(str, few))}{more}. Load from a folder that all nodes "
            "have in common."
        )


def _latest(args: Any) -> str:
    """The contents of the latest files in all folders that Megatron may load from."""
    from megatron.training import checkpointing

    beside = [Path(args.load) / checkpointing._NON_PERSISTENT_CKPT_SUBDIR] if args.load else []
    said = []
    for folder in (args.load, args.pretrained_checkpoint, args.non_persistent_global_ckpt_dir, *beside):
        if folder is not None:
            try:
                said.append(Path(checkpointing.get_checkpoint_tracker_filename(folder)).read_text().strip())
            except (OSError, UnicodeDecodeError):
                said.append("")
    return " and ".join(filter(None, said)) or "nothing"


def _is_of_checkpoint(error: BaseException) -> bool:
    """Whether ``error`` says that a checkpoint is gone, damaged, or at odds with the flags (which Megatron asserts). No
    peer's loss and no failing disk shows so.
    """
    if isinstance(error, OSError):
        return error.errno in _OF_PATH
    if isinstance(error, RuntimeError):
        return "PytorchStreamReader" in str(error)
    return isinstance(error, _OF_CONTENT)


def _told_of(error: BaseException) -> BaseException:
    """The error that says what is wrong where Megatron or torch has raised ``error``."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    # core_v0.16.1 fails while it reports that common.pt is missing (core/dist_checkpointing/strategies/common.py, line
    # 96: it lists a folder that is a str).
    if isinstance(error, AttributeError) and error.__context__ is not None:
        return error.__context__
    return error


def named(folder: str, args: Any) -> Path:
    """The checkpoint in ``folder`` that Megatron opens, unless there is one that is not persistent. Raises OSError."""
    return Path(folder) / (f"iter_{args.ckpt_step:07d}" if args.ckpt_step else tracker.tracked(Path(folder)))


def _damage(opened: Callable[[], Path]) -> str:
    """What is damaged in the checkpoint that ``opened`` returns, and which ones beside it are not, as sentences of a
    message; empty if that is unknown. Torch's errors do not name the file.
    """
    with contextlib.suppress(Exception):  # the failure is told all the same
        folder = opened()
        if not folder.is_dir():
            return _undamaged(folder.parent)
        if (folder / ".metadata").exists() or (folder / "metadata.json").exists():
            found = saving.damage(folder)
            return f" In {folder}: {first_texts(found)}.{_undamaged(folder.parent)}" if found else ""
    return ""


def _undamaged(folder: Path) -> str:
    """Which of the newest checkpoints in ``folder`` are undamaged, as a sentence of a message; empty if none is."""
    newest = sorted(folder.glob("iter_*"), key=lambda one: (len(one.name), one.name), reverse=True)
    whole = [one.name for one in newest[:_SEARCHED] if _is_whole(one)]
    return f" Undamaged in {folder}: {', '.join(whole[:_LISTED])}." if whole else ""


def _is_whole(folder: Path) -> bool:
    with contextlib.suppress(Exception):  # which says that it is not
        return not saving.damage(folder)
    return False


def _check_tracker(folder: str) -> None:
    """Raise ConfigError if the tracker file in ``folder`` names no checkpoint: Megatron reads it first, whatever
    --ckpt-step says.
    """
    why = ""
    with contextlib.suppress(OSError):
        why = tracker.fault(Path(folder))
    if why:
        raise ConfigError(
            f"no checkpoint can be loaded from {folder}: {why}. Write the number of one into that file; or remove it, "
            f"and name one by --ckpt-step.{_undamaged(Path(folder))}"
        )


@contextlib.contextmanager
def refused(folder: str, opened: Callable[[], Path] | None = None) -> Iterator[None]:
    """Turn a failure of Megatron's to load from ``folder`` in the body into a ConfigError, for the user to mend. No
    rank has died of it, and the job has not ended well, though Megatron would leave with exit code 0.

    ``opened``: returns the checkpoint that is loaded, which is then searched for damage.
    """
    try:
        yield
    except SystemExit as end:
        _check_tracker(folder)
        raise ConfigError(
            f"there is no checkpoint to load in {folder}; what Megatron-LM has printed of it stands above. Name a "
            f"folder whose {tracker.TRACKER} has the number of one, or name that by --ckpt-step."
            f"{_undamaged(Path(folder))}"
        ) from end
    except (Exception, CheckpointException) as error:  # that one is a BaseException
        first = _told_of(error)
        if not (isinstance(error, CheckpointException) or _is_of_checkpoint(first)):
            raise
        _check_tracker(folder)
        if isinstance(first, pickle.UnpicklingError) and (found := _UNKNOWN.search(str(first))):
            raise ConfigError(
                f"the checkpoint in {folder} was saved by another version of Megatron-LM, which has {found[1]}. "
                f"megatron-core {compat.check_version()} cannot read that. Load it with the version that saved it."
            ) from error
        said = traceback.format_exception_only(first)[-1].strip(" .\n")
        damage = _damage(opened) if opened else ""
        raise ConfigError(
            f"no checkpoint can be loaded from {folder}: {said}.{damage} Name another one by --load or --ckpt-step if "
            "it is damaged or gone; where it is of another model, give the flags that it was saved with; and where the "
            "schedule is to be another one, --override-opt_param-scheduler."
        ) from error
