"""Jobs that save into one folder: what each of them leaves alone, and that the second is refused."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch")

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.loop import attempts, saving
from tests.mcore.test_saving import args_of, names, written

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
