"""Heartbeats in shared memory."""

from __future__ import annotations

import time

from odyssey_megatron.launch import heartbeat
from odyssey_megatron.launch.heartbeat import Heartbeat, HeartbeatBoard


def test_a_rank_that_beats_is_not_silent():
    board = HeartbeatBoard(2)
    beating = Heartbeat(str(board.path), 1, 0.01)
    time.sleep(0.1)
    now_s = time.monotonic()
    assert board.silent_s(1, now_s) < 0.1
    assert board.silent_s(1, now_s + 9.0) > 8.0
    assert board.silent_s(0, now_s) == 0.0, "a rank that has not started to beat"
    beating.stop()
    assert board.silent_s(1, now_s + 9.0) == 0.0, "a rank that is about to end"
    board.close()
    assert not board.path.exists()


def test_code_that_keeps_the_gil_is_excused_and_only_then():
    board = HeartbeatBoard(1)
    beating = Heartbeat(str(board.path), 0, 0.01)
    with beating.excused():
        time.sleep(0.05)  # the thread beats meanwhile
        assert board.silent_s(0, time.monotonic() + 9.0) == 0.0
    assert board.silent_s(0, time.monotonic() + 9.0) > 8.0
    beating.stop()
    board.close()


def test_boards_of_killed_agents_are_removed(tmp_path):
    gone, alive = (tmp_path / f"{heartbeat._PREFIX}{pid}-7" for pid in (999_999_999, 1))
    other = tmp_path / "something-else"
    for path in (gone, alive, other):
        path.touch()
    heartbeat._remove_orphans(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive.name, other.name])
