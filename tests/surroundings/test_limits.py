"""A node has no room for one more process, thread or file: ranks that train are not lost by that."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.launch.process import leftovers
from odyssey_megatron.launch.process.heartbeat import HeartbeatBoard
from tests.launch.jobserver import CHECKOUT, events, pid_of, wait_for

KILL = ("--odyssey-inject", "rank=2,step=20,at=backward")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(("who", "files"), [("zygote", 3), ("agent", 10)])
def test_a_rank_that_cannot_be_started_again_is_started_later(toy, tmp_path, who, files):
    job = toy(4, "--steps", 60, "--hold", tmp_path / "go", "--odyssey-respawn", 1, *KILL)
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) >= 4, 20, "all ranks in their groups")
    pid = job.pid if who == "agent" else parent_of(pid_of(tmp_path / "run", 0))
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (files, before[1]))
    wait_for(lambda: "dead=2" in job.log(), 20, "the loss")
    wait_for(lambda: "rank 2 cannot be started again" in job.log(), 20, "somebody says so")
    assert "Too many open files" in job.log()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    wait_for(
        lambda: len([e for e in events(tmp_path / "run", "rank_started") if e["target"] == 2]) == 2,
        20,
        "a start",
    )
    (tmp_path / "go").touch()
    assert job.wait(40) == 0, job.log()
    assert "Traceback" not in job.log()


def test_shared_memory_without_room_is_said(disk, monkeypatch):
    monkeypatch.setattr(leftovers, "shared_memory", lambda: disk.path)
    disk.fill()
    with pytest.raises(ConfigError, match="No space left on device"):
        HeartbeatBoard(4)
    disk.free()
    HeartbeatBoard(4).close()


@pytest.mark.parametrize(("error", "code"), [("MemoryError", 1), ("ValueError", 0)])
def test_a_rank_without_memory_for_a_thread_ends(error, code):
    """It would wait for the thread forever, as ``Thread.start`` does."""
    text = (
        "import threading, time\n"
        "from odyssey_megatron.launch.rank import environment\n"
        "environment.end_without_memory()\n"
        "class Thread(threading.Thread):\n"
        f"    def _bootstrap_inner(self): raise {error}\n"
        "threading.Timer(5, lambda: __import__('os')._exit(0)).start()\n"
        "Thread(daemon=True).start()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", text], cwd=CHECKOUT, timeout=60, capture_output=True, text=True
    )
    assert ended.returncode == code, ended.stderr
    assert ("no memory to begin a thread" in ended.stderr) == bool(code)
