"""A save is complete or it is not there."""

from __future__ import annotations

import argparse
import pickle
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import checkpoint as dcp  # noqa: E402

from odyssey_megatron.errors import ConfigError, OdysseyError  # noqa: E402
from odyssey_megatron.mcore.loop import attempts, background, deleting, saving, tracker  # noqa: E402

SCRIPT = Path(__file__).with_name("save_and_die.py")


def written(folder: Path) -> Path:
    """A complete checkpoint of two tensors and an object."""
    state = {"a": torch.arange(10.0), "b": torch.ones(3, 5), "object": {"x": 1}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text("{}")
    torch.save({"args": {}}, folder / "common.pt")
    return folder


def change_metadata(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def the_file(folder):
    (found,) = folder.glob("*.distcp")
    return found


def forget(folder):
    change_metadata(folder, lambda one: one.storage_data.pop(next(iter(one.storage_data))))


def shift(folder):
    def change(metadata):
        info = next(one for one in metadata.storage_data.values() if one.offset)
        info.offset += 1

    change_metadata(folder, change)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-10])


DAMAGE = {
    "an entry without a file": (forget, "stands in no file"),
    "entries of two attempts": (shift, "do not follow upon each other"),
    "a file that is missing": (lambda folder: the_file(folder).unlink(), "is missing"),
    "a file cut short": (lambda folder: cut_short(the_file(folder)), "bytes of"),
    "a file too long": (lambda folder: the_file(folder).write_bytes(the_file(folder).read_bytes() + b"x"), "bytes of"),
    "a file of another attempt": (lambda folder: (folder / "__7_0.distcp").write_bytes(b"x"), "belongs to no entry"),
    "an empty file": (lambda folder: (folder / "common.pt").write_bytes(b""), "common.pt is empty"),
    "metadata cut short": (lambda folder: (folder / ".metadata").write_bytes(b"\x80"), ".metadata cannot be read"),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), ".metadata cannot be read"),
    "no metadata.json": (lambda folder: (folder / "metadata.json").unlink(), "metadata.json cannot be read"),
    "metadata.json cut short": (lambda folder: (folder / "metadata.json").write_text("{"), "metadata.json cannot"),
    "common.pt cut short": (lambda folder: cut_short(folder / "common.pt"), "common.pt is cut short"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_missing_in_a_checkpoint_is_found(tmp_path, what):
    damaging, words = DAMAGE[what]
    folder = written(tmp_path / "iter_0000002")
    assert saving.damage(folder) == []
    damaging(folder)
    assert any(words in one for one in saving.damage(folder)), saving.damage(folder)


def track(folder, text):
    with tracker.open_file(open, folder / "latest_checkpointed_iteration.txt", "w") as file:
        file.write(text)


def names(folder):
    return sorted(one.name for one in folder.iterdir() if not one.name.startswith(".odyssey.lock-"))


def test_the_tracker_file_is_replaced_as_a_whole(tmp_path):
    track(tmp_path, "2")
    path = tmp_path / "latest_checkpointed_iteration.txt"
    with tracker.open_file(open, path, "w") as file:
        file.write("4")
        file.flush()
        assert path.read_text() == "2"
    assert path.read_text() == "4"
    assert names(tmp_path) == [path.name]


def test_what_earlier_attempts_have_left_is_removed(tmp_path):
    for iteration in (2, 4, 6):
        written(tmp_path / f"iter_{iteration:07d}")
    track(tmp_path, "4")
    written(tmp_path / ".odyssey-iter_0000006-0123")
    (tmp_path / "iter_0000008").mkdir()
    for iteration in (4, 6):  # either stays until another is in its place
        saving._sweep(tmp_path / f"iter_{iteration:07d}")
    assert names(tmp_path) == [
        "iter_0000002",
        "iter_0000004",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
    ]


def test_what_is_saved_later_than_a_checkpoint_to_retain_stays_in_its_place(tmp_path, monkeypatch):
    """After a death while that of iteration 100 was written, Megatron deletes 101 behind the save of 120."""
    args = argparse.Namespace(save=str(tmp_path), save_retain_interval=100)
    checkpointing = SimpleNamespace()
    training = SimpleNamespace(checkpointing=checkpointing, get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    deleting.install()
    for iteration in (80, 101, 120, 140):
        written(tmp_path / f"iter_{iteration:07d}")
    (tmp_path / "iter_0000100").mkdir()  # Megatron makes it before it is written
    with pytest.raises(OdysseyError, match="stands for that of iteration 100"):
        checkpointing.shutil.rmtree(str(tmp_path / "iter_0000101"))
    for iteration in (80, 120):
        checkpointing.shutil.rmtree(str(tmp_path / f"iter_{iteration:07d}"))
    assert names(tmp_path) == ["iter_0000100", "iter_0000101", "iter_0000140"]
    passing = written(tmp_path / "non_persistent" / "iter_0000130")
    checkpointing.shutil.rmtree(str(passing))
    assert not passing.exists()


def test_what_others_have_saved_beside_stays(tmp_path):
    """As --save-retain-interval deletes none but the one before: of another format, or without a file, it may be what
    somebody needs.
    """
    for iteration in (2, 3):
        written(tmp_path / f"iter_{iteration:07d}")
    the_file(tmp_path / "iter_0000002").unlink()
    (tmp_path / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"weights")
    track(tmp_path, "3")
    before = names(tmp_path)
    saving._sweep(tmp_path / "iter_0000004")
    assert names(tmp_path) == before


def test_a_complete_attempt_takes_the_place_of_the_checkpoint_before(tmp_path):
    folder = written(tmp_path / "iter_0000004")
    (folder / "old").write_text("old")
    saving._put_in_place(written(tmp_path / ".odyssey-iter_0000004-1"), folder)
    assert names(tmp_path) == ["iter_0000004"]
    assert saving.damage(folder) == []
    assert not (folder / "old").exists()


def saves_again(tmp_path, monkeypatch, then):
    """The latest checkpoint is saved once more; ``then()`` comes in place of the second rename."""
    folder, rename = written(tmp_path / "iter_0000004"), Path.rename
    track(tmp_path, "4")
    again = written(tmp_path / ".odyssey-iter_0000004-1")

    def renamed(path, target):
        if path == again and not folder.exists():
            then()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises((OSError, SystemExit)):
        saving._put_in_place(again, folder)
    return folder


def test_a_checkpoint_has_its_name_again_if_another_one_cannot_take_its_place(tmp_path, monkeypatch):
    def fails():
        raise OSError(116, "Stale file handle")

    folder = saves_again(tmp_path, monkeypatch, fails)
    saving._sweep(folder)
    assert names(tmp_path) == ["iter_0000004", "latest_checkpointed_iteration.txt"]
    assert saving.damage(folder) == []


@pytest.mark.parametrize("by", ["the next save", "the next job"])
def test_the_latest_checkpoint_is_there_after_a_death_between_two_renames(tmp_path, monkeypatch, by):
    """A rank dies there, so that nothing of the save runs any more."""
    folder = saves_again(tmp_path, monkeypatch, sys.exit)
    assert not folder.exists()
    folder.mkdir()  # by Megatron, when the iteration is saved next
    if by == "the next save":
        saving._sweep(folder)
    else:
        settings = args_of(save=str(tmp_path))
        saving.check(settings, joins=True, is_first=True)
        assert not list(folder.iterdir()), "a rank that joins cannot know whether others save"
        saving.check(settings, joins=False, is_first=True)
    assert saving.damage(folder) == []


def test_a_rank_that_was_cut_off_meanwhile_leaves_what_the_others_have_saved(tmp_path, monkeypatch):
    """While it waits for its disk the others count it as lost, sweep up what it has written, and save again."""
    folder, waits = tmp_path / "iter_0000004", attempts.sync

    def others_save(_):
        monkeypatch.setattr(attempts, "sync", waits)
        saving._sweep(folder)
        saving._put_in_place(written(tmp_path / ".odyssey-iter_0000004-2"), folder)
        track(tmp_path, "4")

    monkeypatch.setattr(attempts, "sync", others_save)
    with pytest.raises(FileNotFoundError):
        saving._put_in_place(written(tmp_path / ".odyssey-iter_0000004-1"), folder)
    assert saving.damage(folder) == []


def test_an_attempt_with_a_hole_does_not(tmp_path):
    folder = written(tmp_path / "iter_0000004")
    attempt = written(tmp_path / ".odyssey-iter_0000004-1")
    forget(attempt)
    with pytest.raises(saving.NotSaved, match="stands in no file"):
        saving._put_in_place(attempt, folder)
    assert names(tmp_path) == ["iter_0000004"]
    assert saving.damage(folder) == []


def test_a_folder_that_is_another_one_on_other_nodes_is_said_before_anything_is_written(
    tmp_path, monkeypatch
):
    """Their files would be missing in the checkpoint, and stay on their own disks."""

    def found(all_of_them: list[bool], mine: bool) -> None:
        all_of_them[:] = [mine, False, mine]

    monkeypatch.setattr(saving.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(saving.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(saving.dist, "broadcast_object_list", lambda outcome, src: None)
    monkeypatch.setattr(saving.dist, "all_gather_object", found)
    with pytest.raises(
        saving.NotSaved, match=r"does not exist for number\(s\) 1 of them. Save to a folder that all"
    ):
        saving.save(lambda *others: pytest.fail("something was written"), {}, tmp_path / "iter_0000002")


def test_a_folder_may_be_seen_a_little_later(tmp_path, monkeypatch):
    """As through a client of a file server that goes by what it has kept."""
    made = tmp_path / "made"
    threading.Timer(0.3, made.mkdir).start()
    assert saving._is_seen(made)
    monkeypatch.setattr(saving, "_SEEN_WITHIN_S", 0.2)
    assert not saving._is_seen(tmp_path / "of another node")


@pytest.mark.parametrize("gone", ["the folder", "the file"])
def test_what_torch_cannot_write_is_of_storage(tmp_path, gone):
    """So that a save folder which vanishes fails the save, and ends no rank."""
    path = tmp_path if gone == "the file" else tmp_path / "gone" / "common.pt"
    with pytest.raises(RuntimeError) as raised:
        torch.save({}, path)
    assert saving.is_of_storage(raised.value), raised.value
    assert not saving.is_of_storage(RuntimeError("Connection closed by peer"))


def args_of(**given):
    nothing = [
        "save",
        "load",
        "non_persistent_global_ckpt_dir",
        "non_persistent_save_interval",
        "non_persistent_ckpt_type",
        "rank",
    ]
    return argparse.Namespace(**dict.fromkeys(nothing) | given)


def test_what_is_said_of_a_folder_behind_a_failed_save(tmp_path, monkeypatch):
    monkeypatch.setattr(
        background.os, "statvfs", lambda folder: SimpleNamespace(f_frsize=4096, f_bavail=3, f_blocks=1 << 20)
    )
    free = "12,288 bytes of 4.0 GiB are free"
    assert background.standing(tmp_path) == f"In {tmp_path} there is no checkpoint, and {free}"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert (
        background.standing(tmp_path)
        == f"In {tmp_path} iter_0000007 is still the latest checkpoint, and {free}"
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff")
    unread = "latest_checkpointed_iteration.txt names no checkpoint: it holds b'\\xff'"
    assert background.standing(tmp_path) == f"In {tmp_path} {unread}, and {free}"
    monkeypatch.undo()
    assert background.standing(tmp_path / "gone") == f"In {tmp_path / 'gone'} there is no checkpoint"


def test_an_interval_of_saves_of_no_type_is_refused(tmp_path, monkeypatch):
    """Megatron ends a job at the first of them."""
    checkpointing = SimpleNamespace(_NON_PERSISTENT_CKPT_SUBDIR="non_persistent")
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(checkpointing=checkpointing))
    args = args_of(save=str(tmp_path), non_persistent_save_interval=3)
    with pytest.raises(ConfigError, match="--non-persistent-ckpt-type global"):
        saving.check(args, joins=False)
    args.non_persistent_ckpt_type = "global"
    saving.check(args, joins=False)


def test_object_stores_are_refused():
    args = args_of(save="msc://bucket/run")
    for joins in (False, True):
        with pytest.raises(ConfigError, match="msc://bucket/run"):
            saving.check(args, joins=joins)


def test_a_folder_that_takes_no_checkpoint_is_refused_and_not_of_a_job_that_runs(tmp_path):
    (tmp_path / "file").touch()
    for folder, why in {"file": "it is a file", "file/below": "not a directory"}.items():
        path = tmp_path / folder
        for flag, name in {"save": "--save", "non_persistent_global_ckpt_dir": "--non-persistent-"}.items():
            args = args_of(**{flag: str(path)})
            with pytest.raises(ConfigError, match=f"{name}.* {path}: {why}"):
                saving.check(args, joins=False)
            saving.check(args, joins=True)
    args = args_of(save=str(tmp_path / "new" / "one"))
    saving.check(args, joins=False)
    assert (tmp_path / "new" / "one").is_dir()


def test_a_rank_dies_while_it_writes_and_the_other_saves_again(tmp_path):
    """Real processes, Megatron's own writer; nothing of the first attempt is in the second."""
    both = [
        subprocess.Popen([sys.executable, SCRIPT, str(rank), tmp_path], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    texts = [one.communicate(timeout=100)[1] for one in both]
    assert [one.returncode for one in both] == [0, -signal.SIGKILL], texts
    assert saving.damage(tmp_path / "checkpoint") == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_writer_that_fails_beside_its_files_is_an_error_and_no_wait_for_ever(when, monkeypatch):
    """As Megatron's does without psutil."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async as megatron

    def failing(transforms, index, bucket, results, counts, use_fsync, **others):
        if when == "behind":
            results.put((index, [bucket]))
        if index == 1:
            raise RuntimeError("psutil is not installed")
        results.put((index, [bucket]))

    monkeypatch.setattr(megatron.FileSystemWriterAsync, "write_preloaded_data", staticmethod(failing))
    results = queue.SimpleQueue()
    saving._write([], False, 0, ["first", "second"], results)
    error = results.get_nowait()
    assert isinstance(error, RuntimeError)
    assert "psutil" in str(error)
