"""A thread that the job cannot do without dies: the job ends at once, and says which."""

from __future__ import annotations

import time

import pytest

from tests.launch.jobserver import events, wait_for


@pytest.mark.parametrize(
    ("poison", "says"),
    [
        ("event", "the coordinator failed: RecursionError"),
        ("offer", "the thread that hears of generations failed"),
    ],
)
def test_a_message_that_kills_a_thread(toy, tmp_path, poison, says):
    job = toy(4, "--steps", 1000, "--poison", poison)
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 20, "all ranks in their groups")
    wait_for(lambda: says in job.log(), 20, "somebody says what has happened")
    began_s = time.monotonic()
    assert job.wait(20) == 1, job.log()
    assert time.monotonic() - began_s < 5
