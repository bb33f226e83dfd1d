"""Whether a training thread gets on, from what it does and what it is called to; times are the test's."""

from __future__ import annotations

import pytest

from odyssey_megatron.launch.attention import TRIES, Attention


@pytest.fixture
def attention() -> Attention:
    """Of a thread that has done a step, and begins the next one at 100 s: 60 s an instruction, 30 s a recovery."""
    one = Attention(60.0, 30.0, 0.0)
    one.heed()
    one.look(1, 50.0)
    one.rest()
    one.look(1, 100.0)
    return one


def test_an_instruction_that_takes_too_long_is_overdue(attention):
    assert not attention.overdue(160.0)
    assert attention.overdue(160.1) == 1
    attention.look(1, 161.0)
    assert not attention.overdue(162.0)


def test_what_the_script_does_between_steps_is_its_own_affair(attention):
    attention.rest()
    assert not attention.overdue(1e6)


def test_the_first_step_may_take_as_long_as_it_does():
    """It compiles."""
    one = Attention(60.0, 30.0, 0.0)
    one.heed()
    one.look(1, 0.0)
    assert not one.overdue(1e6)


def call(attention: Attention, *times_s: float) -> None:
    for now_s in times_s:
        attention.call(now_s)


def test_a_thread_that_is_stuck_misses_one_generation_after_another(attention):
    call(attention, 161.0, 166.0, 171.0)
    assert TRIES == 3
    assert not attention.overdue(1e6), "somebody has asked by now"
    assert not attention.is_lost(190.9)
    assert attention.is_lost(191.1)


def test_one_that_comes_late_is_not_lost(attention):
    call(attention, 161.0, 166.0, 171.0)
    attention.heed()
    assert not attention.is_lost(1e6)
    call(attention, 200.0)
    assert not attention.is_lost(1e6), "one generation may come while it is rightly busy"


def test_one_that_writes_a_checkpoint_while_the_others_recover_is_not_lost(attention):
    call(attention, 101.0, 106.0, 111.0)
    assert not attention.is_lost(159.0), "no operation may take longer than 60 s, but this is one"
    assert attention.is_lost(161.0)


def test_one_that_has_not_been_in_a_generation_is_not_lost():
    """It may be reading its checkpoint."""
    one = Attention(60.0, 30.0, 0.0)
    call(one, 1.0, 6.0, 11.0)
    assert not one.is_lost(1e6)
