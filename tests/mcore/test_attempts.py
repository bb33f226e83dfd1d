"""Jobs that save into one folder: what each of them leaves alone, and that the second is refused."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.loop import attempts, deleting, saving, tracker
from tests.mcore.test_saving import args_of, forget, names, track, written

SAVES = """
import sys, time
from pathlib import Path
from odyssey_megatron.mcore.loop import saving
saving._sweep(Path(sys.argv[1]) / "iter_0000003")
print("holds", flush=True)
time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """The first rank of another job, which saves into the same folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES, str(tmp_path)],
        env=os.environ | {"ODYSSEY_JOB": "bbbb"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "holds\n"
    yield process
    process.kill()
    process.communicate()


def attempt_of(job, tmp_path, monkeypatch):
    monkeypatch.setenv("ODYSSEY_JOB", job)
    return written(attempts.unfinished(tmp_path / "iter_0000003"))


@pytest.mark.timeout(100)
def test_what_a_job_that_lives_is_writing_stays(tmp_path, monkeypatch, other):
    theirs, ours = (attempt_of(job, tmp_path, monkeypatch) for job in ("bbbb", "aaaa"))
    made = tmp_path / "iter_0000006"
    made.mkdir()
    saving._sweep(tmp_path / "iter_0000003")
    assert names(tmp_path) == [theirs.name, made.name]
    assert saving.damage(theirs) == []
    assert not ours.exists()
    other.kill()
    other.wait()
    saving._sweep(tmp_path / "iter_0000003")
    assert names(tmp_path) == []


@pytest.mark.timeout(100)
def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path, monkeypatch, other):
    monkeypatch.setattr(attempts, "_ENDS_WITHIN_S", 0.5)
    args = args_of(save=str(tmp_path))
    with pytest.raises(
        ConfigError, match=f"--save {tmp_path}: a job that is running saves its checkpoints there"
    ):
        saving.check(args, joins=False, is_first=True)
    saving.check(args, joins=True, is_first=True)
    saving.check(args, joins=False, is_first=False)
    other.kill()
    saving.check(args, joins=False, is_first=True)
    saving.check(args, joins=False, is_first=True)  # this job has it


def test_where_no_locks_are_what_may_still_be_written_stays(tmp_path, monkeypatch):
    def no_locks(number, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    saving.check(args_of(save=str(tmp_path)), joins=False, is_first=True)
    live, dead, ours = (attempt_of(job, tmp_path, monkeypatch) for job in ("bbbb", "cccc", "aaaa"))
    before_s = time.time() - 7200
    for one in (dead, *dead.iterdir()):
        os.utime(one, (before_s, before_s))
    saving._sweep(tmp_path / "iter_0000003")
    assert names(tmp_path) == [live.name]
    assert not ours.exists()


@pytest.fixture
def put(tmp_path, monkeypatch):
    """A job of one rank whose save of iteration 9 was put in place before a death; that of 6 was the latest."""
    monkeypatch.setattr(saving.dist, "get_rank", lambda: 0)
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
