"""Ranks that come late to the start of a job, and ones that are killed before they have met the others, or train."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.launch.jobserver import CHECKOUT, events, wait_for
from tests.megatron_lm.jobs import FLOAT32, MOCK, assert_same_lines

TESTS = CHECKOUT / "tests" / "megatron_lm"
LATE_S = 4
"""Longer than what connecting may take, below."""


@pytest.mark.parametrize("killed", [False, True])
def test_a_rank_that_comes_late(jobs, name, killed):
    """The others wait at their first groups, for as long as for any first contact; killed, it is started anew."""
    before = [str(TESTS / "late.py"), "2", str(LATE_S)]
    job = jobs.start(name, f"{MOCK} --odyssey-build-timeout-s 1", ranks=4, stages=2, before=before)
    run_dir = jobs.folder / name
    if killed:
        wait_for(lambda: len(events(run_dir, "rank_started")) == 4, 60, "all ranks are started")
        time.sleep(LATE_S / 2)
        (pid,) = (event["pid"] for event in events(run_dir, "rank_started") if event["target"] == 2)
        os.kill(pid, signal.SIGKILL)
    run = jobs.outcome(name, job)
    assert_same_lines(run, jobs.plain(ranks=4, stages=2), rel=FLOAT32)
    assert run.killed == []
    assert [event["target"] for event in run.named("rank_started")].count(2) == 1 + killed


def test_who_builds_the_indices_of_the_data_dies(jobs, name):
    """The others wait for the first rank meanwhile, on large data for hours; whoever is it then begins anew."""
    flags = f"{MOCK} --seed 4321"  # no other job has left its indices
    run = jobs.odyssey(name, flags, ranks=6, stages=2, before=[str(TESTS / "building.py")])
    assert_same_lines(run, jobs.plain(flags, ranks=6, stages=2), rel=FLOAT32)
    assert run.killed == [0, 1]
