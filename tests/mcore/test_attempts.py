"""Jobs that save into one folder: what each of them leaves alone, and how it is told which of them live."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from odyssey_megatron.mcore.loop import attempts, deleting, saving, tracker
from odyssey_megatron.metrics.journal import host_name
from tests.mcore.test_saving import args_of, forget, names, track, written

RANK = """
import sys, time
from odyssey_megatron.mcore.loop import saving
from tests.mcore.test_saving import args_of
rank = int(sys.argv[2])
saving.check(args_of(save=sys.argv[1], rank=rank), joins=rank > 1, is_first=rank == 0)
print("holds", flush=True)
time.sleep(60)
"""


@pytest.fixture
def rank_of(tmp_path):
    """Starts a rank of another job, which saves into the same folder. Ranks from 2 on join it."""
    started = []

    def start(job, rank):
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank)],
            env=os.environ | {"ODYSSEY_JOB": job},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "holds\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def end(process):
    process.kill()
    process.wait()


def attempt_of(job, tmp_path, monkeypatch):
    monkeypatch.setenv("ODYSSEY_JOB", job)
    return written(attempts.unfinished(tmp_path / "iter_0000003"))


def starts(tmp_path):
    """This job's first rank."""
    saving.check(args_of(save=str(tmp_path), rank=0), joins=False, is_first=True)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("second", [1, 2], ids=["from the start", "joined"])
def test_what_a_job_is_writing_stays_while_one_of_its_ranks_lives(tmp_path, monkeypatch, rank_of, second):
    ranks = [rank_of("bbbb", rank) for rank in (0, second)]
    theirs, ours = (attempt_of(job, tmp_path, monkeypatch) for job in ("bbbb", "aaaa"))
    made = tmp_path / "iter_0000006"
    made.mkdir()
    end(ranks[0])
    starts(tmp_path)
    saving._sweep(tmp_path / "iter_0000003")
    assert names(tmp_path) == [theirs.name, made.name]
    assert saving.damage(theirs) == []
    assert not ours.exists()
    end(ranks[1])
    saving._sweep(tmp_path / "iter_0000003")
    assert names(tmp_path) == []
    assert [one.name for one in tmp_path.iterdir()] == [".odyssey.lock-aaaa"]


@pytest.mark.timeout(100)
def test_a_job_that_seems_to_save_there_is_said_and_another_one_starts(tmp_path, monkeypatch, capfd, rank_of):
    theirs = rank_of("bbbb", 0)
    monkeypatch.setenv("ODYSSEY_JOB", "aaaa")
    saving.check(args_of(save=str(tmp_path), rank=1), joins=False)
    saving.check(args_of(save=str(tmp_path), rank=0), joins=True, is_first=True)
    assert "seems to be running" not in capfd.readouterr().err
    starts(tmp_path)
    said = capfd.readouterr().err
    assert said.count(f"--save {tmp_path}: another job seems to be running") == 1
    assert f"(bbbb, whose first rank is process {theirs.pid} on {host_name()})" in said
    end(theirs)
    starts(tmp_path)
    assert "seems to be running" not in capfd.readouterr().err


@pytest.mark.timeout(100)
def test_a_job_whose_lock_was_removed_has_it_again_at_its_next_save(tmp_path, monkeypatch):
    def no_further(work):
        raise saving.NotSaved

    monkeypatch.setattr(saving, "_of_first_rank", no_further)
    monkeypatch.setattr(saving.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setenv("ODYSSEY_JOB", "aaaa")
    starts(tmp_path)
    lock = tmp_path / ".odyssey.lock-aaaa"
    lock.unlink()
    with pytest.raises(saving.NotSaved):
        saving.save(None, {}, tmp_path / "iter_0000003")
    assert lock.exists()
    monkeypatch.setenv("ODYSSEY_JOB", "bbbb")
    assert attempts._locks_of_others(tmp_path) == {lock: False}


def test_a_lock_that_another_user_has_made_tells_that_its_job_is_gone(tmp_path, monkeypatch):
    """In a folder of a group, its members can read, and not write it."""
    theirs = attempt_of("bbbb", tmp_path, monkeypatch)
    monkeypatch.setenv("ODYSSEY_JOB", "aaaa")
    (tmp_path / ".odyssey.lock-bbbb").touch()
    opened = os.open

    def open_to_read(path, how, *mode, **others):
        if how & os.O_RDWR and str(path).endswith("bbbb"):
            raise PermissionError(13, "Permission denied")
        return opened(path, how, *mode, **others)

    monkeypatch.setattr(os, "open", open_to_read)
    saving._sweep(tmp_path / "iter_0000003")
    assert not theirs.exists()
    assert not list(tmp_path.iterdir())


def test_all_who_may_write_into_the_folder_may_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("ODYSSEY_JOB", "aaaa")
    before = os.umask(0o002)
    try:
        starts(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / ".odyssey.lock-aaaa").stat().st_mode & 0o777 == 0o664


def test_where_no_locks_are_what_may_still_be_written_stays(tmp_path, monkeypatch, capfd):
    def no_locks(number, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    live, idle, ours = (attempt_of(job, tmp_path, monkeypatch) for job in ("bbbb", "cccc", "aaaa"))
    starts(tmp_path)
    monkeypatch.setattr(attempts, "_is_idle", lambda path: path == idle)
    saving._sweep(tmp_path / "iter_0000003")
    assert [one.name for one in tmp_path.iterdir()] == [live.name]
    assert not ours.exists()
    assert "seems to be running" not in capfd.readouterr().err


def test_where_no_locks_are_each_rank_asks_once(tmp_path, monkeypatch):
    """Thousands of ranks do so, at the start and at each save. What others have locked there stays."""
    asked = []

    def no_locks(number, how):
        asked.append(how)
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setenv("ODYSSEY_JOB", "aaaa")
    lock = tmp_path / ".odyssey.lock-aaaa"
    lock.touch()  # by a rank on a node with locks
    for _ in range(3):
        attempts.hold(tmp_path, is_first=False)
    assert len(asked) == 1
    assert lock.exists()


def test_names_of_others_that_look_alike_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("ODYSSEY_JOB", "aaaa")
    (tmp_path / ".odyssey-run").mkdir()
    (tmp_path / ".odyssey-iter_0000003-aaaa-0123-before.bak").touch()
    starts(tmp_path)
    saving._sweep(tmp_path / "iter_0000003")
    assert names(tmp_path) == [".odyssey-iter_0000003-aaaa-0123-before.bak", ".odyssey-run"]


def test_what_nobody_has_written_for_an_hour_is_idle_and_a_new_name_counts(tmp_path, monkeypatch):
    checkpoint = written(tmp_path / "iter_0000003")
    before_s = time.time() - 7200
    for one in (checkpoint, *checkpoint.iterdir()):
        os.utime(one, (before_s, before_s))
    moved = checkpoint.rename(tmp_path / "moved")
    assert not attempts._is_idle(moved)
    now_s = time.time()
    monkeypatch.setattr(attempts.time, "time", lambda: now_s + 3700)
    assert attempts._is_idle(moved)


def between_two_renames(job, tmp_path, monkeypatch):
    """``job`` saves an iteration again whose checkpoint is complete."""
    attempt = attempt_of(job, tmp_path, monkeypatch)
    written(tmp_path / "iter_0000003").rename(attempts.before(attempt))
    return attempt


@pytest.mark.timeout(100)
@pytest.mark.parametrize("flag", ["save", "load"])
def test_a_job_that_starts_leaves_another_one_between_its_two_renames(tmp_path, monkeypatch, rank_of, flag):
    theirs = rank_of("bbbb", 1)
    attempt = between_two_renames("bbbb", tmp_path, monkeypatch)
    before = names(tmp_path)
    monkeypatch.setenv("ODYSSEY_JOB", "aaaa")
    args = args_of(**{flag: str(tmp_path)}, rank=0)
    saving.check(args, joins=False, is_first=True)
    assert names(tmp_path) == before
    end(theirs)
    saving.check(args, joins=False, is_first=True)
    assert saving.damage(tmp_path / "iter_0000003") == []
    assert attempt.exists(), "whoever only loads removes nothing"


@pytest.mark.timeout(100)
@pytest.mark.parametrize("flag", ["save", "load"])
def test_the_latest_checkpoint_is_not_left_without_its_name(tmp_path, monkeypatch, rank_of, flag):
    """The lock of a node that was lost is held for a while. A job that lives needs no time for two renames."""
    rank_of("bbbb", 1)
    track(tmp_path, "3")
    between_two_renames("bbbb", tmp_path, monkeypatch)
    monkeypatch.setenv("ODYSSEY_JOB", "aaaa")
    monkeypatch.setattr(attempts, "_RENAMES_WITHIN_S", 0.3)
    saving.check(args_of(**{flag: str(tmp_path)}, rank=0), joins=False, is_first=True)
    assert saving.damage(tmp_path / "iter_0000003") == []


def test_what_has_lost_files_gets_no_name_back(tmp_path, monkeypatch):
    """It was being removed when its rank was killed, and what replaced it has been deleted since."""
    (tmp_path / ".odyssey.lock-aaaa").touch()
    attempt = between_two_renames("aaaa", tmp_path, monkeypatch)
    forget(attempts.before(attempt))
    monkeypatch.setenv("ODYSSEY_JOB", "bbbb")
    saving._sweep(tmp_path / "iter_0000006")
    assert names(tmp_path) == []
    attempt = between_two_renames("bbbb", tmp_path, monkeypatch)
    removed = []
    monkeypatch.setattr(saving.shutil, "rmtree", lambda path, ignore_errors: removed.append(path.name))
    saving.remove(attempts.before(attempt))
    (gone,) = removed
    assert (tmp_path / gone).exists()
    assert not attempts._part(tmp_path / gone, "before")


@pytest.mark.parametrize("by", ["aaaa", "bbbb"], ids=["the next save", "the next job"])
def test_a_complete_checkpoint_that_is_not_the_latest_survives_a_death_between_two_renames(
    tmp_path, monkeypatch, by
):
    """As after --ckpt-step, with which a job saves once more what an earlier one has saved."""
    track(tmp_path, "9")
    written(tmp_path / "iter_0000009")
    attempt = between_two_renames("aaaa", tmp_path, monkeypatch)
    (tmp_path / ".odyssey.lock-aaaa").touch()  # which nobody holds any more
    folder = tmp_path / "iter_0000003"
    folder.mkdir()  # by Megatron, when the iteration is saved next
    monkeypatch.setenv("ODYSSEY_JOB", by)
    saving._sweep(folder)
    assert saving.damage(folder) == []
    assert not attempt.exists()
    assert names(tmp_path) == [folder.name, "iter_0000009", "latest_checkpointed_iteration.txt"]


@pytest.fixture
def put(tmp_path, monkeypatch):
    """A job of one rank whose save of iteration 9 was put in place before a death; that of 6 was the latest."""
    monkeypatch.setattr(saving.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(saving.dist, "broadcast_object_list", lambda outcome, src: None)
    monkeypatch.setattr(saving, "where", lambda iteration: tmp_path / f"iter_{iteration:07d}")
    monkeypatch.setattr(attempts, "noted", attempts.Noted())
    written(tmp_path / "iter_0000006")
    track(tmp_path, "6")
    folder = saving.where(9)
    saving.begin(folder)
    attempt = written(attempts.unfinished(folder))
    attempts.noted.made(attempt)
    attempt.rename(folder)
    return folder


@pytest.mark.parametrize("latest", [6, 9])
def test_a_checkpoint_that_a_death_has_left_in_its_place_is_the_latest(tmp_path, put, latest):
    track(tmp_path, str(latest))
    saving.begin(put)  # another attempt
    assert saving.finish(9)
    assert tracker.tracked(tmp_path) == put.name
    assert attempts.noted.latest_before == "iter_0000006"


@pytest.mark.parametrize("why", ["damaged", "of an earlier job", "of an earlier save", "not there"])
def test_another_checkpoint_is_not_taken_for_what_is_saved(tmp_path, put, why):
    if why == "damaged":
        forget(put)
    elif why == "of an earlier save":
        saving.begin(saving.where(10))
    else:
        saving.remove(put)
        if why == "of an earlier job":
            written(tmp_path / "made_before").rename(put)
            attempts.noted.begin(tmp_path / "other", "")
            attempts.noted.begin(put, "iter_0000006")
    assert not saving.finish(9)
    assert tracker.tracked(tmp_path) == "iter_0000006"


def test_what_a_failed_save_has_put_in_place_goes_and_what_was_there_stays(tmp_path, put):
    earlier = written(saving.where(8))
    saving.tidy(8)
    saving.tidy(9)
    assert names(tmp_path) == ["iter_0000006", earlier.name, "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize(("every", "left"), [(None, True), (9, False), (3, True)])
def test_the_checkpoint_before_is_deleted_by_those_who_live(tmp_path, monkeypatch, put, every, left):
    args = args_of(save=str(tmp_path), save_retain_interval=every)
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(get_args=lambda: args))
    deleting.delete_before(put, attempts.noted.latest_before)
    assert saving.where(6).exists() == left
    deleting.delete_before(put, put.name)
    assert put.exists()
