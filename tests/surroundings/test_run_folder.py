"""The run folder fills up, becomes read-only, is deleted or hangs, at any moment: the job goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.launch.jobserver import events, pid_of, wait_for

KILL = ("--odyssey-inject", "rank=2,step=20,at=backward")


def in_groups(run, ranks=4):
    wait_for(lambda: len(events(run, "recovered")) == ranks, 20, "all ranks in their groups")


def assert_done(job, *, complains):
    assert job.wait(40) == 0, job.log()
    assert "Traceback" not in job.log()
    assert complains in job.log()
    assert "dead=2" in job.log(), "the failure that the job was to survive did not happen"
    said = [line for line in job.log().splitlines() if "The job goes on without it" in line]
    assert len(said) == len(set(said)), "one line a file"


def test_a_disk_that_fills_up_and_has_room_again(toy, disk, tmp_path):
    job = toy(4, "--steps", 60, "--hold", tmp_path / "go", *KILL)
    in_groups(disk.path)
    disk.fill()
    wait_for(lambda: "dead=2" in job.log(), 20, "a recovery on a full disk")
    wait_for(lambda: "No space left on device" in job.log(), 20, "somebody says so")
    disk.free()
    time.sleep(1.5)
    (tmp_path / "go").touch()
    assert_done(job, complains="is written again; 0 line(s) were lost")
    assert {e["rank"] for e in events(disk.path, "step_committed")} == {0, 1, 3}, "they are written later"
    assert [e["dead"] for e in events(disk.path, "decision")][1:] == [[2]]
    assert (disk.path / "profile.json").exists()


def test_a_disk_that_is_full_from_the_start_to_the_end(toy, disk):
    disk.fill()
    job = toy(4, "--steps", 30, *KILL)
    assert_done(job, complains="No space left on device")
    assert "line(s) were lost" in job.log()
    assert not (disk.path / "profile.json").exists()


def test_the_disk_of_the_ranks_logs_fills_up_and_has_room_again(toy, disk, tmp_path):
    """Megatron's loop prints in each iteration, on whichever rank is the last."""
    logs = ("--redirects", "3", "--log-dir", disk.path / "logs")
    job = toy(4, "--steps", 60, "--hold", tmp_path / "go", "--chatter", 2000, *KILL, launch=logs)
    in_groups(disk.path)
    disk.fill()
    wait_for(lambda: "dead=2" in job.log(), 20, "a recovery on a full disk")
    time.sleep(1.0)
    disk.free()
    (tmp_path / "go").touch()
    assert_done(job, complains="No space left on device")
    assert "dead=0" not in job.log(), "the rank that prints"
    (out,) = (disk.path / "logs").rglob("0/stdout.log")
    assert (
        "line(s) are missing here, as they could not be written (No space left on device)" in out.read_text()
    )


def test_a_folder_that_cannot_be_written_any_more(toy, disk, tmp_path):
    job = toy(4, "--steps", 60, "--hold", tmp_path / "go", *KILL)
    in_groups(disk.path)
    shutil.rmtree(disk.path / "journal")
    (disk.path / "journal").write_text("a file in the place of the folder")
    (tmp_path / "go").touch()
    assert_done(job, complains="cannot be written")


def test_a_folder_that_is_deleted_is_made_anew(toy, tmp_path):
    run = tmp_path / "run"
    job = toy(4, "--steps", 60, "--hold", tmp_path / "go", *KILL)
    in_groups(run)
    shutil.rmtree(run)
    (tmp_path / "go").touch()
    assert_done(job, complains="")
    assert {e["rank"] for e in events(run, "step_committed")} == {0, 1, 3}
    assert (run / "profile.json").exists()


@pytest.mark.parametrize("source", ["agent0", "rank1"])
def test_a_journal_that_hangs(toy, tmp_path, source):
    """A pipe that nobody reads: its writer stands still, in the middle of a line."""
    pipe = tmp_path / "run" / "journal" / f"{source}.jsonl"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    full = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(full, b"x" * 100):
            pass
    began_s = time.monotonic()
    job = toy(4, "--steps", 30, *KILL)
    assert_done(job, complains="line(s) were lost")
    assert time.monotonic() - began_s < 20
    os.close(full)


@pytest.mark.parametrize("kind", ["a file", "read-only"])
def test_a_folder_that_cannot_be_used_is_said_at_the_start(toy, tmp_path, kind, request):
    if kind == "read-only":
        request.getfixturevalue("disk").read_only(True)
    else:
        (tmp_path / "run").write_text("")
    job = toy(2, "--steps", 5)
    assert job.wait(20) == 2, job.log()
    (line,) = job.log().strip().splitlines()
    assert "--odyssey-run-dir" in line
    assert {"a file": "it is a file", "read-only": "read-only file system"}[kind] in line


def test_two_jobs_do_not_share_a_folder(toy, tmp_path):
    run = tmp_path / "run"
    first = toy(2, "--pipeline", 1, "--steps", 30, "--hold", tmp_path / "go")
    in_groups(run, 2)
    second = toy(2, "--pipeline", 1, "--steps", 5)
    assert second.wait(20) == 2, second.log()
    (line,) = second.log().strip().splitlines()
    assert "a job that is running writes there" in line
    (tmp_path / "go").touch()
    assert first.wait(20) == 0, first.log()
    assert len(events(run, "job_started")) == 1
    assert toy(2, "--pipeline", 1, "--steps", 5).wait(20) == 0, "the lock has ended with its job"


def test_a_killed_agent_leaves_nothing_that_the_next_start_does_not_remove(toy, tmp_path):
    """And no lock."""
    temporary = set(Path(os.environ.get("TMPDIR", "/tmp")).glob("torchelastic_*"))
    job = toy(2, "--pipeline", 1, "--steps", 1000)
    in_groups(tmp_path / "run", 2)
    pids = [pid_of(tmp_path / "run", rank) for rank in (0, 1)]
    (board,) = Path("/dev/shm").glob(f"odyssey-heartbeat-{job.pid}-*")
    job.kill()
    job.wait(10)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10, "its ranks end")
    assert toy(2, "--pipeline", 1, "--steps", 5).wait(20) == 0
    assert not board.exists()
    assert set(Path(os.environ.get("TMPDIR", "/tmp")).glob("torchelastic_*")) == temporary
