"""Whether steps show what is said to make them longer."""

from __future__ import annotations

import pytest

from odyssey_megatron.diagnosis.steps import shown

BEFORE = {5: 1.00, 10: 1.02, 15: 0.99, 20: 1.01}


@pytest.mark.parametrize(
    ("after", "is_so"),
    [
        ((1.5, 1.48, 1.52), True),
        ((1.04,), True),
        ((1.02,), False),
        ((0.99, 1.01), False),
        ((1.0, 9.0, 1.0), False),
    ],
)
def test_steps_that_are_not_longer_do_not_show_it(after, is_so):
    steps_s = BEFORE | {25 + 5 * at: seconds for at, seconds in enumerate(after)}
    found = shown(steps_s, 25, 2.0, 3.0)
    assert found.is_so == is_so
    assert "as long as before, 1.50 times by the plan's simulation" in found.why


def test_the_simulation_need_not_be_right_where_there_are_steps_from_before():
    steps_s = {step: 7 * seconds for step, seconds in (BEFORE | {25: 1.5}).items()}
    assert shown(steps_s, 25, 2.0, 3.0).is_so


def test_slow_from_the_beginning():
    assert shown({5: 3.1, 10: 2.9}, 3, 2.0, 3.0).is_so
    found = shown({5: 2.0, 10: 2.02}, 3, 2.0, 3.0)
    assert not found.is_so
    assert (
        found.why
        == "steps take 1.00 times as long as the plan says without it, 1.50 times by the plan's simulation"
    )


def test_what_cannot_be_seen_is_believed():
    assert shown(BEFORE | {25: 1.0}, 25, 2.0, 2.01).is_so
    assert shown(BEFORE, 25, 2.0, 3.0).is_so, "no step since"
    assert shown(BEFORE, 25, 2.0, 3.0).why == ""
