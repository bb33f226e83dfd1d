"""How often a rank is started again, and after which ends."""

from __future__ import annotations

import signal

import pytest

pytest.importorskip("torch")

from odyssey_megatron.errors import EXIT_BAD_INPUT, EXIT_FENCED, EXIT_LEFT_OUT, EXIT_NOT_SAVED
from odyssey_megatron.launch.agent.lives import ANEW, Lives

KILLED = -signal.SIGKILL


def lives(limit=2):
    return Lives(limit, anew_within_s=60.0, began_s=100.0)


def test_a_rank_that_dies_too_often_is_lost():
    one = lives()
    for _ in range(2):
        assert one.next_in_s(3, 3, KILLED, 1000.0) is not None
    assert one.next_in_s(3, 3, KILLED, 1000.0) is None
    assert one.next_in_s(4, 4, KILLED, 1000.0) is not None, "each has its own"
    one.moves(3)
    assert one.next_in_s(3, 3, KILLED, 1000.0) is not None, "on another GPU"


def test_what_is_a_day_ago_does_not_count():
    one, day_s = lives(), 86_400.0
    assert [one.next_in_s(3, 3, KILLED, at * day_s / 2) is None for at in range(2, 9)] == [False] * 7
    assert one.next_in_s(3, 3, KILLED, 4.1 * day_s) is None, "a third one within a day"


def test_it_waits_twice_as_long_after_each_short_life():
    one, now_s, waited_s = lives(limit=9), 1000.0, []
    for _ in range(6):
        waited_s.append(one.next_in_s(0, 0, KILLED, now_s))
        one.start(0, now_s)
        now_s += 1.0
    assert waited_s == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert one.next_in_s(0, 0, KILLED, now_s + 3600.0) == 0.5


def test_to_be_fenced_costs_nothing():
    one = lives(limit=1)
    assert all(one.next_in_s(0, 0, EXIT_FENCED, 1000.0) is not None for _ in range(5))


def test_wrong_numbers_twice_in_one_slot_are_its_gpu_s():
    one = lives(limit=9)
    assert one.next_in_s(0, 0, EXIT_LEFT_OUT, 1000.0) is not None
    assert one.next_in_s(1, 1, EXIT_LEFT_OUT, 1000.0) is not None
    assert one.was_wrong_before(0, EXIT_LEFT_OUT)
    assert one.next_in_s(0, 0, EXIT_LEFT_OUT, 1000.0) is None


@pytest.mark.parametrize("code", [0, EXIT_BAD_INPUT, EXIT_NOT_SAVED])
def test_some_ends_are_final(code):
    assert lives().is_over(0, code)
    assert not lives().is_over(0, KILLED)
    assert lives(limit=0).next_in_s(0, 0, KILLED, 101.0) is None, "it is given up"


def test_early_deaths_that_nobody_misses_are_counted_apart():
    one = lives(limit=1)
    for tries in range(1, ANEW + 1):
        assert one.may_begin_anew(0, KILLED, 101.0)
        assert one.begin_anew(0) == tries
        assert not one.is_over(0, KILLED)
        assert one.next_in_s(0, 0, KILLED, 101.0) == 0.5
        assert one.start(0, 101.0) == (tries, 0), "the job has missed none"
    assert not one.may_begin_anew(0, KILLED, 101.0)
    assert not lives().may_begin_anew(0, KILLED, 161.0), "that late it is missed"
    assert not lives().may_begin_anew(0, 1, 101.0), "it has ended by itself"
    assert not lives().may_begin_anew(0, -signal.SIGTERM, 101.0), "as it was asked to"
