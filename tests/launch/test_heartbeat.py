"""Heartbeats in shared memory."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time

from odyssey_megatron.launch.process import leftovers
from odyssey_megatron.launch.process.heartbeat import Heartbeat, HeartbeatBoard


def test_a_rank_that_beats_is_not_silent():
    board = HeartbeatBoard(2)
    beating = Heartbeat(str(board.path), 1, 0.01)
    time.sleep(0.1)
    now_s = time.monotonic()
    assert board.silent_s(1, now_s) < 0.1
    assert board.silent_s(1, now_s + 9.0) > 8.0
    assert board.silent_s(0, now_s) == 0.0, "a rank that has not started to beat"
    beating.leave()
    assert board.silent_s(1, now_s + 9.0) == 0.0, "a rank that is about to end"
    board.close()
    assert not board.path.exists()


def test_no_other_user_can_write_into_it():
    """He would keep a rank alive that hangs, or ask all of them to end."""
    before = os.umask(0)
    try:
        board = HeartbeatBoard(1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(board.path.stat().st_mode) == 0o600
    board.close()


def test_code_that_keeps_the_gil_is_excused_and_only_then():
    board = HeartbeatBoard(1)
    beating = Heartbeat(str(board.path), 0, 0.01)
    with beating.excused():
        time.sleep(0.05)  # the thread beats meanwhile
        assert board.silent_s(0, time.monotonic() + 9.0) == 0.0
    assert board.silent_s(0, time.monotonic() + 9.0) > 8.0
    beating.leave()
    board.close()


def test_boards_of_killed_agents_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "shared_memory", lambda: tmp_path)
    code = (
        "import os, signal; from odyssey_megatron.launch.process import leftovers; from pathlib import Path;"
    )
    code += "leftovers.shared_memory = lambda: Path(os.environ['FOLDER']); leftovers.make(64);"
    code += "os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "FOLDER": str(tmp_path)}, check=False)
    (gone,) = tmp_path.iterdir()
    living, other = HeartbeatBoard(1), tmp_path / "something-else"
    other.touch()
    assert not gone.exists(), "the next start removes it"
    assert leftovers.remove() == []
    assert sorted(tmp_path.iterdir()) == sorted([living.path, other])
    living.close()
    assert list(tmp_path.iterdir()) == [other]


def test_what_is_being_made_is_spared_also_when_the_wall_clock_jumps(tmp_path):
    now_ns = time.monotonic_ns()
    new, old = (tmp_path / f"odyssey-new-1-{made_ns}" for made_ns in (now_ns, now_ns - 100 * 10**9))
    for one in (new, old):
        one.touch()
    os.utime(new, (0, 0))
    assert leftovers.remove(tmp_path) == [old]
    assert new.exists()
