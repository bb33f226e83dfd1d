"""A checkpoint is complete or it is not there, whoever dies in its save and when.

Each attempt at a save writes in a folder of its own, whose name nobody of an earlier attempt can know. When all have
written, the lowest rank checks the folder against its ``.metadata``, and gives it its name in one rename; Megatron's
tracker file, which is replaced and never rewritten, follows. What a failure leaves behind is removed by the next
attempt. Nothing of an attempt outlives it: each rank writes its files itself, and keeps its results to itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from odyssey_megatron.errors import ConfigError, OdysseyError
from odyssey_megatron.upstream import seam_table, seams

_UNFINISHED = ".odyssey-"
"""What names begin with that are no checkpoints, or not yet, or not any more."""
_TRACKER = "latest_checkpointed_iteration.txt"


class NotSaved(OdysseyError):
    """A save has failed on all ranks alike. The checkpoint before is still the latest."""


def install() -> None:
    """Replaces what saves in Megatron. Raises MegatronIncompatible."""
    seams.wrap(seam_table.SAVE_SHARDED, save)
    seams.apply(seam_table.WRITE_PRELOADED_DATA, _write)
    # Megatron has one queue for all saves, in which an attempt leaves results to the next one; and a process for it.
    for queue_of_results in (seam_table.GET_WRITE_RESULTS_QUEUE, seam_table.WRITE_RESULTS_QUEUE):
        seams.apply(queue_of_results, lambda *args, **kwargs: queue.SimpleQueue())
    seams.wrap(seam_table.OPEN_FILE, open_file)
    seams.wrap(seam_table.MAYBE_MSC, lambda original, one, name: _opening(original(one, name), name))


def delete_as_a_whole() -> None:
    """What Megatron-LM deletes loses its name before it loses a file: what is left of a deletion that was cut short is
    known by that. Megatron-LM looks ``shutil`` up in its module.
    """
    from megatron.training import checkpointing

    checkpointing.shutil = _Shutil()


class _Shutil:
    @staticmethod
    def rmtree(path: str | Path) -> None:
        _remove(Path(path))

    def __getattr__(self, name: str) -> Any:
        return getattr(shutil, name)


def check(args: Any, *, joins: bool) -> None:
    """Raises ConfigError if a checkpoint could not be written, or renamed, where ``args`` would have it. In a job that
    runs, which this rank ``joins``, a save that fails is said, and ends nothing.
    """
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


def _unusable(folder: str) -> str:
    """Why nothing can be written into ``folder``, which is made if it is not there; nothing if it can."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        return "it is a file" if isinstance(error, FileExistsError) else str(error.strerror).lower()
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"


def attempt(original: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> str:
    """Megatron's ``save_checkpoint``; why it has failed on all ranks alike, if it has."""

    def work() -> None:
        _begin(iteration, **kwargs)
        original(iteration, *args, **kwargs)

    return _outcome(work, iteration, **kwargs)


def complete(finalize: Sequence[Callable[[], None]], iteration: int, **kwargs: Any) -> str:
    """Makes a checkpoint of what all ranks have written beside training; why that has failed, if it has. Collective.

    Args:
        finalize: of Megatron's AsyncRequest.
        iteration: with ``kwargs`` as of :func:`attempt`.
    """
    from megatron.training import get_args

    def work() -> None:
        with _told():
            for one in finalize:
                one()

    settings = get_args()
    before = settings.async_save
    # Megatron would delete the one before in a process from 0.17 on, and deletes it in a thread otherwise.
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
    """Removes what is left of a save that has failed, if the disk lets us: it may have been the last one of the job.
    Collective; arguments as of :func:`attempt`.
    """
    with contextlib.suppress(NotSaved):
        _begin(iteration, **kwargs)


def _begin(iteration: int, **kwargs: Any) -> None:
    from megatron.training import get_args

    begin(_folder_of(get_args(), iteration, non_persistent=kwargs.get("non_persistent_ckpt", False)))


def is_of_storage(error: Exception) -> bool:
    """Whether a disk is full, or a file system gone. Torch says so in its own way: its writer of archives fails."""
    if isinstance(error, OSError):
        return not isinstance(error, ConnectionError)
    return "inline_container" in str(error)


def _folder_of(args: Any, iteration: int, *, non_persistent: bool) -> Path:
    """Where Megatron saves ``iteration``."""
    from megatron.training import checkpointing

    base = args.save
    if non_persistent:
        base = args.non_persistent_global_ckpt_dir or os.path.join(
            args.save, checkpointing._NON_PERSISTENT_CKPT_SUBDIR
        )
    return Path(checkpointing.get_checkpoint_name(base, iteration, return_base_dir=True))


# -- an attempt -------------------------------------------------------------------------------------------------------


def begin(folder: Path) -> None:
    """Removes what earlier attempts, at this save and others, and deletions have left beside ``folder``. Collective.

    Args:
        folder: the checkpoint that is about to be saved.

    Raises:
        NotSaved: on all ranks.
    """
    _of_first_rank(lambda: _sweep(folder))


def _sweep(folder: Path) -> None:
    for leftover in folder.parent.glob(f"{_UNFINISHED}*"):
        _remove(leftover)
    for other in folder.parent.glob("iter_*"):
        with contextlib.suppress(OSError):
            other.rmdir()  # made and not filled
    if folder.name != _tracked(folder.parent):  # complete perhaps, but nobody has been told
        _remove(folder)


def save(
    original: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    """Megatron's save of all ranks into ``checkpoint_dir``, which is there as a whole afterwards, or not at all; or the
    request for it, with what makes it complete.

    Raises:
        NotSaved: on all ranks.
    """
    folder = Path(checkpoint_dir)
    written = _of_first_rank(lambda: _made_beside(folder))

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
    """Megatron has told all ranks of what one could not write in the body, and they all raise it. Raises NotSaved."""
    try:
        yield
    except CheckpointException as error:
        said = "; ".join(f"rank {rank} of the living: {one[0]}" for rank, one in error.failures.items())
        raise NotSaved(f"not all could be written: {said}") from error


def _made_beside(folder: Path) -> Path:
    made = folder.with_name(f"{_UNFINISHED}{folder.name}-{secrets.token_hex(8)}")
    made.mkdir()
    return made


def _put_in_place(written: Path, folder: Path) -> None:
    if found := damage(written):
        _remove(written)
        raise NotSaved(
            f"{folder} was written, but is not complete: {'; '.join(found[:3])}"
            + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
        )
    _sync(written)
    before = folder.with_name(written.name + "-before")
    try:
        written.rename(folder)  # what Megatron has made there is empty
    except OSError:
        folder.rename(before)
        written.rename(folder)
    _sync(folder.parent)
    _remove(before)


def _of_first_rank(work: Callable[[], Any]) -> Any:
    """What ``work`` returns on the first rank; if it fails there, it has failed on all. Collective."""
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
    """What keeps the torch_dist checkpoint in ``folder`` from being complete; empty: nothing.

    Every entry of its ``.metadata`` must lie in a file, and every file must have the bytes that its entries claim.
    """
    if not (folder / "metadata.json").is_file():
        return ["metadata.json is missing"]
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


def _tracked(parent: Path) -> str:
    """The name of the checkpoint that is the latest; empty: there is none."""
    try:
        text = (parent / _TRACKER).read_text().strip()
    except FileNotFoundError:
        return ""
    return f"iter_{int(text):07d}" if text.isdecimal() else text


def _remove(path: Path) -> None:
    """A folder that has lost some of its files must not have a checkpoint's name."""
    if not path.name.startswith(_UNFINISHED):
        moved = path.with_name(f"{_UNFINISHED}{path.name}-{secrets.token_hex(8)}")
        try:
            path.rename(moved)
        except FileNotFoundError:
            return
        path = moved
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """What was created or renamed in ``folder`` outlasts a loss of power."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# -- the tracker file -------------------------------------------------------------------------------------------------


def open_file(original: Callable[..., Any], path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """Megatron's way to open files; its tracker file is replaced as a whole."""
    if os.path.basename(str(path)) == _TRACKER and mode == "w":
        return _replaced(Path(path))
    return original(path, mode, *args, **kwargs)


def _opening(value: Any, name: str) -> Any:
    """core_v0.19.0 gets ``open`` from an object (core/msc_utils.py, line 76)."""
    if name != "open":
        return value
    return lambda *args, **kwargs: open_file(value, *args, **kwargs)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    unfinished = path.with_name(f"{_UNFINISHED}{path.name}-{secrets.token_hex(8)}")
    with unfinished.open("w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    _sync(path.parent)


# -- writing ----------------------------------------------------------------------------------------------------------


def _write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: Any) -> None:
    """The files of this rank, each in a thread, as Megatron does from 0.17 on.

    core_v0.16.1 (core/dist_checkpointing/strategies/filesystem_async.py, line 235) forks a process for each. They
    would go on writing when the rank has died.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    written: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def write(index: int) -> None:
        own: queue.SimpleQueue[Any] = queue.SimpleQueue()
        unused: queue.Queue[int] = queue.Queue()
        unused.put(index)
        try:
            FileSystemWriterAsync.write_preloaded_data(
                transforms, index, buckets[index], own, unused, True, use_msc=use_msc
            )
            written.put(own.get_nowait())
        except Exception as error:  # noqa: BLE001 - of what it does before and behind the files: without psutil, say
            written.put((index, error))

    for index in range(len(buckets)):  # no thread of a disk that does not answer keeps a rank from ending
        threading.Thread(target=write, args=(index,), daemon=True).start()
    found = dict(written.get() for _ in buckets)
    failed = [one for one in found.values() if isinstance(one, Exception)]
    results.put(failed[0] if failed else found)
