"""Which errors two ranks have alike: those of one kind from one line, at about the same time, whatever clocks say."""

from __future__ import annotations

import time

import pytest

from odyssey_megatron.errors import EXIT_ALIKE
from odyssey_megatron.launch.rank import alike
from odyssey_megatron.launch.rank.alike import KnownSince, is_shared
from odyssey_megatron.launch.wire.verdict import after_training


def error():
    try:
        raise ValueError("nobody can do this step")
    except ValueError as raised:
        return raised


class Clock:
    """Of one host: ``time`` as the module there sees it."""

    def __init__(self, *, monotonic_s: float, wall_s: float):
        self._began_s, self._monotonic_s, self._wall_s = time.monotonic(), monotonic_s, wall_s
        self.sleep = time.sleep

    def monotonic(self):
        return time.monotonic() - self._began_s + self._monotonic_s

    def time(self):
        return self._wall_s


@pytest.mark.parametrize(
    ("ago_s", "wall_s", "shared"), [(1.0, 1.7e9 + 3600.0, True), (100.0, 1.7e9 - 3600.0, False)]
)
def test_the_second_host_s_clocks_may_say_anything(monkeypatch, connect, ago_s, wall_s, shared):
    first, second = (connect(writer=f"rank{rank}") for rank in range(2))

    monkeypatch.setattr(alike, "time", Clock(monotonic_s=5e6, wall_s=1.7e9))
    history = KnownSince()
    history.note(3)
    about = {"nodes": 2, "generation": 3}
    assert not is_shared(first, error(), rank=0, node=0, history=history, **about)

    monkeypatch.setattr(alike, "time", Clock(monotonic_s=100.0, wall_s=wall_s))
    history = KnownSince()
    history.note(3)
    history.note(4)
    monkeypatch.setattr(alike, "time", Clock(monotonic_s=100.0 + ago_s, wall_s=wall_s))
    assert is_shared(second, error(), rank=1, node=1, history=history, **about | {"generation": 4}) is shared


def test_a_generation_before_its_time_was_long_ago():
    history = KnownSince()
    history.note(7)
    assert history.ended_s(3) == float("inf")
    assert history.ended_s(7) == 0.0
    history.note(8)
    assert 0.0 <= history.ended_s(7) < 1.0


def test_an_error_that_all_have_behind_the_last_step_is_told():
    """The ranks leave it to the launcher to print it."""
    exits = dict.fromkeys(range(4), EXIT_ALIKE)
    verdict = after_training(exits, cut_short=[], refused="ValueError: my evaluation", ended_behind=-1)
    assert (verdict.code, verdict.why) == (1, "ValueError: my evaluation")
