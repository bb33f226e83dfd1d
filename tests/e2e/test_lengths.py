"""A job of one's own whose samples are of unequal lengths: steps are dealt by them, and the numbers stay the same."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import PAIRS, assert_equal_runs

SCRIPT = PAIRS.with_name("lengths.py")
BALANCED = "--odyssey-sequence-balance auto"
pytestmark = pytest.mark.timeout(200)


def test_steps_are_dealt_and_a_loss_in_one_changes_nothing(jobs, undisturbed, name):
    shot = jobs.run(
        name,
        ranks=4,
        stages=2,
        script=SCRIPT,
        flags=f"{BALANCED} --odyssey-inject rank=3,step=3,at=backward",
    )
    assert_equal_runs(shot, undisturbed(), kills=1)
    dealt = {event["step"]: (event["natural"], event["dealt"]) for event in shot.named("step_dealt")}
    assert dealt.keys() == set(range(1, 6)), "the first step is in its own order"
    assert all(1.0 <= balanced <= natural for natural, balanced in dealt.values())
    assert any(balanced < natural for natural, balanced in dealt.values())


def test_what_does_not_say_its_lengths_is_refused(jobs, name):
    shot = jobs.run(name, ranks=1, stages=1, flags=BALANCED)
    assert shot.exit_code == 2
    assert "does not say how long these are. Give it squared_lengths, or leave the flag out" in shot.log
