"""Whether a training thread gets on, from what it does and what it is called to; times are the test's."""

from __future__ import annotations

import pytest

from odyssey_megatron.config import HEARTBEAT_S
from odyssey_megatron.launch.rank.attention import TRIES, Attention


@pytest.fixture
def attention() -> Attention:
    """Of a thread that has done a step, and begins the next one at 100 s: 60 s an instruction, 30 s a recovery."""
    one = Attention(60.0, 30.0, 0.0)
    one.heed()
    one.look(1, 50.0)
    one.rest(behind_step=True)
    one.look(1, 100.0)
    return one


def test_an_instruction_that_takes_too_long_is_overdue(attention):
    assert not overdue(attention, 160.0)
    assert overdue(attention, 160.1) == 1
    attention.look(1, 161.0)
    assert not overdue(attention, 162.0)


def test_an_instruction_that_takes_too_long_is_overdue_at_the_longest_heartbeat(attention):
    """Which is when the other thread looks; on a busy machine it comes later."""
    looks_s = [100.0 + 2 * HEARTBEAT_S.high * look for look in range(40)]
    assert any(attention.overdue(now_s) for now_s in looks_s)


def test_a_process_that_stood_still_is_not_overdue(attention):
    """Nor are the others, which stood still with it."""
    overdue(attention, 120.0)
    assert not attention.overdue(300.0)
    assert not attention.overdue(301.0)


def test_what_the_script_does_between_steps_is_its_own_affair(attention):
    attention.rest(behind_step=True)
    assert not overdue(attention, 1e4)


def test_the_first_step_may_take_much_longer():
    """It compiles. Where nothing that is sent has a limit of its own, as on NCCL, nobody else would end it."""
    one = Attention(60.0, 30.0, 0.0)
    one.heed()
    one.look(1, 0.0)
    assert not overdue(one, 660.0)
    assert overdue(one, 660.1) == 1
    one.rest(behind_step=False)  # a barrier, or an evaluation, before it
    one.look(1, 700.0)
    assert not overdue(one, 1360.0)
    assert overdue(one, 1360.1)
    call(one, 1400.0, 1405.0, 1410.0)
    assert not one.is_lost(1469.0)
    assert one.is_lost(1471.0), "the others do not wait for ever"


def overdue(attention: Attention, now_s: float) -> int:
    """As the thread that beats has it, which has looked all along."""
    for looked_s in range(int(now_s)):
        attention.overdue(float(looked_s))
    return attention.overdue(now_s)


def call(attention: Attention, *times_s: float) -> None:
    for now_s in times_s:
        attention.call(now_s)


def test_a_thread_that_is_stuck_misses_one_generation_after_another(attention):
    call(attention, 161.0, 166.0, 171.0)
    assert TRIES == 3
    assert not overdue(attention, 1e4), "somebody has asked by now"
    call(attention, 176.0)
    assert not attention.is_lost(200.9)
    assert attention.is_lost(201.1), "30 s after they had tried for the third time"


def test_one_that_comes_late_is_not_lost(attention):
    call(attention, 161.0, 166.0, 171.0)
    attention.heed()
    assert not attention.is_lost(1e4)
    call(attention, 200.0)
    assert not attention.is_lost(1e4), "one generation may come while it is rightly busy"


def test_one_that_writes_a_checkpoint_while_the_others_recover_is_not_lost(attention):
    """A rank dies while all write, at 170 s; the first one is through with it at 278 s."""
    attention.rest(behind_step=True)
    call(attention, 170.0, 278.0, 284.0, 290.0)
    assert not attention.is_lost(343.0), "the others have waited for 60 s then, as they would for a message"
    assert attention.is_lost(345.0)


def test_how_long_messages_may_take_is_said_later(attention):
    """By Megatron-LM's arguments."""
    attention.op_timeout_s = 600.0
    assert not overdue(attention, 699.0)
    assert overdue(attention, 701.0)


def test_one_that_has_not_been_in_a_generation_is_not_lost():
    """It may be reading its checkpoint."""
    one = Attention(60.0, 30.0, 0.0)
    call(one, 1.0, 6.0, 11.0)
    assert not one.is_lost(1e4)
