"""Makes a checkpoint appear complete or not at all, whoever dies while it is saved, and whenever.

Each attempt at a save writes to a folder of its own, whose name is unknown to earlier attempts. When all ranks have
written, the lowest rank checks the folder against its ``.metadata``, and gives it its final name by one rename; then it
updates Megatron's tracker file, which is replaced and never rewritten. The next attempt removes what a failure leaves
behind. Nothing of an attempt outlives it: each rank writes its files itself, and keeps its results to itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from odyssey_megatron.errors import ConfigError, OdysseyError
from odyssey_megatron.mcore.loop import attempts, tracker
from odyssey_megatron.mcore.loop.tracker import TRACKER, tracked
from odyssey_megatron.metrics.outlet import say
from odyssey_megatron.names import first_few, first_texts
from odyssey_megatron.upstream import seam_table, seams

_OF_TORCHS_WRITER = ("inline_container", "Parent directory ")
"""What the RuntimeErrors of torch's archive writer say: a file cannot be opened or written, or its folder is gone."""
_SEEN_WITHIN_S = 5.0
"""Limit for a folder that one rank has made to be seen by the others."""


class NotSaved(OdysseyError):
    """A save has failed on all ranks alike. The previous checkpoint is still the latest."""


def install() -> None:
    """Replace Megatron's saving. Raises MegatronIncompatible."""
    seams.wrap(seam_table.SAVE_SHARDED, save)
    seams.apply(seam_table.WRITE_PRELOADED_DATA, _write)
    # Megatron has one queue for all saves, in which an attempt would leave results for the next one, and a process that
    # serves it.
    for queue_of_results in (seam_table.GET_WRITE_RESULTS_QUEUE, seam_table.WRITE_RESULTS_QUEUE):
        seams.apply(queue_of_results, lambda *args, **kwargs: queue.SimpleQueue())
    seams.wrap(seam_table.OPEN_FILE, tracker.open_file)
    seams.wrap(seam_table.MAYBE_MSC, lambda original, one, name: tracker.opening(original(one, name), name))


def check(args: Any, *, joins: bool, is_first: bool = False) -> None:
    """Check that checkpoints can be written, and renamed, where ``args`` want them, and hold the job's lock there. The
    rank that ``is_first`` of a job first puts back what jobs that are gone have left without its name, and says which
    other jobs save there. Raises ConfigError.

    Nothing is put back on a rank that ``joins`` a running job, nor is it checked whether a folder is writable: there a
    failed save is reported, and ends nothing.
    """
    read = (args.save, args.load, args.non_persistent_global_ckpt_dir) if is_first and not joins else ()
    for folder in filter(None, read):
        with contextlib.suppress(OSError, ValueError):
            _put_back(attempts.abandoned(Path(folder))[0])
            _put_back(attempts.await_latest(Path(folder), tracked(Path(folder))))
    if args.save and args.non_persistent_save_interval and args.non_persistent_ckpt_type is None:
        raise ConfigError(
            f"--non-persistent-save-interval {args.non_persistent_save_interval} says when to save, and nothing what: "
            "Megatron-LM would end the job there. Add --non-persistent-ckpt-type global, or leave it out."
        )
    for flag, folder in (
        ("--save", args.save),
        ("--non-persistent-global-ckpt-dir", args.non_persistent_global_ckpt_dir),
    ):
        if folder is None:
            continue
        if "://" in str(folder):
            raise ConfigError(
                f"checkpoints cannot be saved to {folder} with --odyssey: a save is made complete by renaming its "
                "folder, which an object store cannot do. Save to a file system, and copy from there."
            )
        if not joins and (why := _unusable(folder)):
            raise ConfigError(
                f"{flag} {folder}: {why}, so that no checkpoint could be saved. Name a folder that can be made and "
                "written to, or leave it out."
            )
        attempts.hold(Path(folder), is_first=is_first)
        if is_first and not joins:
            attempts.say_others(flag, Path(folder))
    if not joins:
        _check_trackers(args)


def _check_trackers(args: Any) -> None:
    """Check the tracker files of all folders that Megatron saves to. Raises ConfigError."""
    retains = getattr(args, "save_retain_interval", None) is not None
    kinds = [False] * bool(args.save) + [True] * bool(args.save and args.non_persistent_ckpt_type == "global")
    for non_persistent in kinds:
        folder = Path(_base_of(args, non_persistent=non_persistent))
        tracker.check(folder, retains=retains, says=args.rank == 0)


def _unusable(folder: str) -> str:
    """Why nothing can be written to ``folder``, which is made if it does not exist; empty if it can."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        return "it is a file" if isinstance(error, FileExistsError) else str(error.strerror).lower()
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"


def attempt(original: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> str:
    """Run Megatron's ``save_checkpoint``. Returns why it has failed on all ranks alike; empty if it has not."""

    def work() -> None:
        begin(where(iteration, **kwargs))
        original(iteration, *args, **kwargs)

    return _outcome(work, iteration, **kwargs)


def complete(finalize: Sequence[Callable[[], None]], iteration: int, **kwargs: Any) -> str:
    """Make a checkpoint of what all ranks have written beside training. Returns why that has failed, or "". Collective.

    Args:
        finalize: from Megatron's AsyncRequest.
        iteration: as for :func:`attempt`, like ``kwargs``.
    """
    from megatron.training import get_args

    def work() -> None:
        with _told():
            for one in finalize:
                one()

    settings = get_args()
    before = settings.async_save
    # From 0.17 on Megatron would delete the previous checkpoint in a process; otherwise it does so in a thread.
    settings.async_save = getattr(settings, "save_retain_interval", None) is None
    try:
        return _outcome(work, iteration, **kwargs)
    finally:
        settings.async_save = before


def _outcome(work: Callable[[], None], iteration: int, **kwargs: Any) -> str:
    try:
        work()
    except NotSaved as error:
        tidy(iteration, **kwargs)
        return str(error)
    return ""


def tidy(iteration: int, **kwargs: Any) -> None:
    """Remove what is left of a failed save, if the disk allows it: the job may not save again. Collective; arguments as
    for :func:`attempt`.
    """
    folder = where(iteration, **kwargs)

    def work() -> None:
        _sweep(folder)
        if attempts.noted.has_put(folder) and folder.name != tracked(folder.parent):
            remove(folder)

    with contextlib.suppress(NotSaved):
        _of_first_rank(work)


def finish(iteration: int, **kwargs: Any) -> bool:
    """Whether an attempt that a death has cut short had put its checkpoint in place, so that the save is done. It is
    the latest one then. Collective; arguments as for :func:`attempt`.
    """
    folder = where(iteration, **kwargs)

    def work() -> bool:
        if not attempts.noted.has_put(folder) or damage(folder):
            return False
        if folder.name != tracked(folder.parent):
            with tracker.replaced(folder.parent / TRACKER) as file:
                file.write(str(iteration))
            say(
                f"[odyssey] successfully saved checkpoint from iteration {iteration:7d} to {folder.parent}. A "
                "rank had died before the tracker file named it."
            )
        _sweep(folder)
        return True

    with contextlib.suppress(NotSaved):  # another attempt will say why
        return bool(_of_first_rank(work))
    return False


def where(iteration: int, **kwargs: Any) -> Path:
    """The folder to which Megatron saves. Arguments as for :func:`attempt`."""
    from megatron.training import get_args

    return _folder_of(get_args(), iteration, non_persistent=kwargs.get("non_persistent_ckpt", False))


def is_of_storage(error: Exception) -> bool:
    """Whether ``error`` means that a disk is full, or a folder or file system gone."""
    if isinstance(error, OSError):
        return not isinstance(error, ConnectionError)
    return any(words in str(error) for words in _OF_TORCHS_WRITER)


def _folder_of(args: Any, iteration: int, *, non_persistent: bool) -> Path:
    """The folder to which Megatron saves ``iteration``."""
    from megatron.training import checkpointing

    base = _base_of(args, non_persistent=non_persistent)
    return Path(checkpointing.get_checkpoint_name(base, iteration, return_base_dir=True))


def _base_of(args: Any, *, non_persistent: bool) -> Any:
    """The folder in which Megatron's checkpoints of one kind are."""
    if not non_persistent:
        return args.save
    if args.non_persistent_global_ckpt_dir:
        return args.non_persistent_global_ckpt_dir
    from megatron.training import checkpointing

    return os.path.join(args.save, checkpointing._NON_PERSISTENT_CKPT_SUBDIR)


# -- an attempt -------------------------------------------------------------------------------------------------------


def begin(folder: Path) -> None:
    """Remove what earlier attempts at any save, and deletions, have left beside ``folder``. Collective.

    Args:
        folder: the checkpoint that is about to be saved.

    Raises:
        NotSaved: on all ranks.
    """
    attempts.noted.begin(folder, _of_first_rank(lambda: _sweep(folder)))


def _put_back(left: list[Path]) -> list[Path]:
    return attempts.put_back(left, lambda one: not damage(one))


def _sweep(folder: Path) -> str:
    """Returns the name of the latest checkpoint."""
    leftovers, checkpoints = attempts.abandoned(folder.parent)
    for leftover in _put_back(leftovers):
        remove(leftover)
    for empty in (folder, *checkpoints):
        with contextlib.suppress(OSError):
            empty.rmdir()  # made but not filled
    attempts.forget_gone(folder.parent)
    return tracked(folder.parent)


def save(
    original: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    """Megatron's save of all ranks into ``checkpoint_dir``, which afterwards exists completely or not at all. An
    asynchronous save returns Megatron's request, to which the step that completes the checkpoint has been added.

    Raises:
        NotSaved: on all ranks.
    """
    folder = Path(checkpoint_dir)
    attempts.hold(folder.parent, is_first=dist.get_rank() == 0)  # Megatron may have made it for this save
    written = _of_first_rank(lambda: _made_beside(folder))
    _check_common(written)
    attempts.noted.made(written)

    def put_in_place() -> None:
        _of_first_rank(lambda: _put_in_place(written, folder))

    with _told():
        request = original(sharded_state_dict, str(written), *args, **kwargs)
    if request is None:
        put_in_place()
    else:  # Megatron's AsyncRequest
        request.add_finalize_fn(put_in_place)
    return request


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn Megatron's exception about what some rank could not write, which all ranks raise, into NotSaved."""
    try:
        yield
    except CheckpointException as error:
        said = "; ".join(f"rank {rank} of the living: {one[0]}" for rank, one in error.failures.items())
        raise NotSaved(f"not all could be written: {said}") from error


def _made_beside(folder: Path) -> Path:
    made = attempts.unfinished(folder)
    made.mkdir()
    return made


def _check_common(made: Path) -> None:
    """Check that all ranks see the folder that the first one has ``made``. What others wrote would be in a folder of
    their own node, where nobody would find it, or remove it. Collective. Raises NotSaved on all ranks.
    """
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, _is_seen(made))
    if blind := [rank for rank, one in enumerate(seen) if not one]:
        few, more = first_few(blind)
        raise NotSaved(
            f"{made.parent} is not one folder for all: what the first of the living ranks makes there does not exist "
            f"for number(s) {', '.join(map(str, few))}{more} of them. Save to a folder that all nodes have in common"
        )


def _is_seen(made: Path) -> bool:
    """Whether ``made`` is a folder here, too, or comes to be one: a client of NFS may go by what it has kept."""
    ends_s = time.monotonic() + _SEEN_WITHIN_S
    while not os.path.isdir(made):  # which has no error, whatever a file server says
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            os.listdir(made.parent)  # opened, a folder's entries are asked for anew
    return True


def _put_in_place(written: Path, folder: Path) -> None:
    if found := damage(written):
        remove(written)
        raise NotSaved(f"{folder} was written, but is not complete: {first_texts(found)}")
    attempts.sync(written)
    before = attempts.before(written)
    try:
        written.rename(folder)  # the folder that Megatron has made there is empty
    except FileNotFoundError:
        raise  # others have swept it and saved again, as this rank was cut off meanwhile: what is there is theirs
    except OSError:
        folder.rename(before)
        try:
            written.rename(folder)
        except OSError:
            before.rename(folder)
            raise
    attempts.sync(folder.parent)
    remove(before)


def _of_first_rank(work: Callable[[], Any]) -> Any:
    """What ``work`` returns on the first rank; if it fails there, it fails on all. Collective. Raises NotSaved."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except (NotSaved, OSError) as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise NotSaved(outcome[1])
    return outcome[0]


# -- a checkpoint -----------------------------------------------------------------------------------------------------


def damage(folder: Path) -> list[str]:
    """What is incomplete in the torch_dist checkpoint in ``folder``; empty: nothing.

    Every entry of its ``.metadata`` must lie in a file, and every file must have exactly the bytes that its entries
    claim.
    """
    try:
        json.loads((folder / "metadata.json").read_text())
    except (OSError, ValueError) as error:
        return [f"metadata.json cannot be read: {error!r}"]
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        return [f".metadata cannot be read: {error!r}"]
    stored = metadata.storage_data
    found = [f"{entry} stands in no file" for entry in _entries(metadata) if entry not in stored]
    claims: dict[str, list[tuple[int, int]]] = {}
    for info in stored.values():
        claims.setdefault(info.relative_path, []).append((info.offset, info.length))
    for name, pieces in sorted(claims.items()):
        end = 0
        for offset, length in sorted(pieces):
            if offset != end:
                found.append(f"the entries of {name} do not follow upon each other at byte {end}")
                break
            end = offset + length
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            found.append(f"{name} is missing")
        elif size != end:
            found.append(f"{name} has {size} bytes of {end}")
    common = folder / "common.pt"  # core_v0.19.0 writes none
    if common.is_file() and not zipfile.is_zipfile(common):
        found.append("common.pt is cut short, or no archive of torch's")
    written = {one.name for one in folder.glob("*.distcp")}
    found += [f"{name} belongs to no entry" for name in sorted(written - claims.keys())]
    return found + [f"{one.name} is empty" for one in folder.iterdir() if not one.stat().st_size]


def _entries(metadata: Any) -> Iterator[MetadataIndex]:
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                yield MetadataIndex(name, chunk.offsets)
        else:
            yield MetadataIndex(name)


def remove(path: Path) -> None:
    """Rename ``path``, then remove it: a folder that has lost some files must not have a checkpoint's name, nor one by
    which it gets that back.
    """
    if not attempts.is_unfinished(path):
        moved = attempts.unfinished(path)
        try:
            path.rename(moved)
        except FileNotFoundError:
            return
        path = moved
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# -- writing ----------------------------------------------------------------------------------------------------------


def _write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: Any) -> None:
    """Write the files of this rank, each in a thread, as Megatron does from 0.17 on.

    core_v0.16.1 (core/dist_checkpointing/strategies/filesystem_async.py, line 235) forks a process for each file. These
    would go on writing after the rank has died.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    written: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def write(index: int) -> None:
        own: Any = queue.SimpleQueue()  # Megatron expects queues of processes
        unused: Any = queue.Queue()
        unused.put(index)
        try:
            FileSystemWriterAsync.write_preloaded_data(
                transforms, index, buckets[index], own, unused, True, use_msc=use_msc
            )
            written.put(own.get_nowait())
        except Exception as error:  # noqa: BLE001 - of what it does before and behind the files: without psutil, say
            written.put((index, error))

    for index in range(len(buckets)):  # daemons: a dead disk must not keep a rank from ending
        threading.Thread(target=write, args=(index,), daemon=True).start()
    found = dict(written.get() for _ in buckets)
    failed = [one for one in found.values() if isinstance(one, Exception)]
    results.put(failed[0] if failed else found)
