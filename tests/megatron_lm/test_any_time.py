"""Ranks of jobs of all kinds die at random moments, killed from outside, and nobody takes their place: in a step of
Megatron's loop or between two, in an evaluation or a save. Those who are left go on.

``ODYSSEY_SEED`` is the seed of victims and moments.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time

import pytest

from tests.e2e.jobs import assert_holders_agree
from tests.launch.jobserver import pid_of
from tests.megatron_lm.jobs import FLOAT64, MOCK, assert_equal_checkpoints, assert_same_lines
from tests.megatron_lm.test_experts import CELLS, DEEPSEEK, GANGS, MIXTRAL

pytestmark = [pytest.mark.timeout(900), pytest.mark.matrix]
SEED = os.environ.get("ODYSSEY_SEED", "1")
RANKS, STAGES, LAST, KILLS = 12, 2, 10, 2
FLAGS = f"{MOCK} --odyssey-float64 on --train-iters {LAST} --save-interval {LAST // 2} --log-params-norm"
CASES = {
    "plain": (1, ""),
    "optimizer": (1, "--use-distributed-optimizer --async-save"),
    "cells": (2, CELLS),
    "cells-optimizer": (2, f"{CELLS} --use-distributed-optimizer --async-save"),
    "contexts": (2, "--context-parallel-size 2"),
    "experts": (1, MIXTRAL),
    "gangs": (2, f"{DEEPSEEK} {GANGS} --use-distributed-optimizer"),
    "gangs-of-cells": (2, f"{DEEPSEEK} {GANGS} {CELLS} --expert-tensor-parallel-size 1"),
    "ahead": (1, "--mtp-num-layers 1 --odyssey-redundancy state"),
}
"""Ranks of a worker, more flags."""


@pytest.fixture(scope="module")
def undisturbed(jobs):
    """Case -> that job without failures, and the folder of its checkpoints; run once."""

    @functools.cache
    def run(case):
        saved = jobs.folder / f"undisturbed-{case}" / "saved"
        flags = f"{FLAGS} {CASES[case][1]} --save {saved}"
        return jobs.odyssey(f"undisturbed-{case}", flags, ranks=RANKS, stages=STAGES), saved

    return run


def victims_of(draw, ranks_of_worker):
    """Ranks of unlike workers: each stage has three of them at least, and so one that is left."""
    workers = draw.sample(range(RANKS // ranks_of_worker), KILLS)
    return [one * ranks_of_worker + draw.randrange(ranks_of_worker) for one in workers]


@pytest.mark.parametrize("moment", range(3))
@pytest.mark.parametrize("case", CASES)
def test_those_who_are_left_go_on(jobs, undisturbed, name, case, moment):
    reference, expected = undisturbed(case)
    ranks_of_worker, more = CASES[case]
    draw = random.Random(f"{SEED} {case} {moment}")
    saved = jobs.folder / name / "saved"
    job = jobs.start(name, f"{FLAGS} {more} --save {saved}", ranks=RANKS, stages=STAGES)
    behind = sorted(draw.sample(range(1, LAST - 1), KILLS))
    for victim, iteration in zip(victims_of(draw, ranks_of_worker), behind, strict=True):
        begun_s = time.monotonic()
        while job.log().count(" iteration   ") < iteration and time.monotonic() < begun_s + 300:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1.2) * steps_s(job))
        os.kill(pid_of(jobs.folder / name, victim), signal.SIGKILL)
    run = jobs.outcome(name, job, limit_s=500.0)
    assert_same_lines(run, reference, rel=FLOAT64)
    assert len(run.killed) == KILLS * ranks_of_worker
    assert_holders_agree(run)
    assert_equal_checkpoints(saved, expected, LAST)
    if "--async-save" not in more:  # what is in flight when somebody dies is given up for one of a later step
        assert_equal_checkpoints(saved, expected, LAST // 2)


def steps_s(job):
    """Of the last iteration, which Megatron has printed in milliseconds."""
    return float(job.log().rsplit("elapsed time per iteration (ms):", 1)[1].split("|", 1)[0]) / 1000
