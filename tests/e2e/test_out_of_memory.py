"""A rank runs out of its device's memory: nobody is lost, the step is done again, by a plan that needs less.

ODYSSEY_SEEDS=0:200 bash tests/run.sh tests/e2e/test_out_of_memory.py -m matrix -k drawn      # 12 minutes
"""

from __future__ import annotations

import os
import random
from itertools import pairwise

import pytest

from odyssey_megatron.errors import EXIT_LAYERS_LOST
from tests.e2e.jobs import LONG, assert_equal_runs
from tests.e2e.test_shrinking import GANG
from tests.e2e.test_tensor_parallel import CELLS

pytestmark = pytest.mark.matrix

CASES = {
    "healthy": "rank=0,step=2,at=forward,microbatch=4,signal=FULL",
    "backward": "rank=6,step=2,at=backward,microbatch=2,signal=FULL",
    "agreement": "rank=6,step=2,at=agreement,signal=FULL",
    "behind-a-loss": "rank=5,step=1,at=backward;rank=4,step=3,at=weight_grad,signal=FULL",
    "while-layers-move": "rank=6,step=2,at=forward;rank=1,step=-1,at=transfer,generation=2,signal=FULL",
    "again": "rank=0,step=2,at=forward,signal=FULL;rank=0,step=2,at=backward,generation=2,signal=FULL",
}


@pytest.mark.parametrize(
    "case",
    CASES,
)
def test_a_rank_that_runs_out_of_memory(jobs, undisturbed, name, case):
    inject = CASES[case]
    batch = "--global-batch-size 24"  # of which early stages keep several microbatches
    flags = f"{batch} --odyssey-policy replan --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=8, stages=4, flags=flags)
    assert_equal_runs(shot, undisturbed(batch), kills=inject.count("rank="))
    lost = {rank for event in shot.named("failure_detected") for rank in event["dead"]}
    killed = [one for one in inject.split(";") if "FULL" not in one]
    assert lost == {int(one[len("rank=")]) for one in killed}, "nobody else is lost"
    decisions = shot.named("decision")
    for before, after in pairwise(decisions):
        if "out of memory" in after["why"]:
            assert after["schedule"] != before["schedule"]
    assert sum("out of memory" in one["why"] for one in decisions) == inject.count("FULL")


def test_a_rank_that_finds_no_memory_when_it_joins(jobs, undisturbed, name):
    """It fails, and is started once more. The others need no other plan for that."""
    inject = "rank=5,step=1,at=backward;rank=5,step=-1,at=transfer,incarnation=1,signal=FULL"
    flags = f"{LONG} --odyssey-respawn 2 --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=8, stages=4, flags=flags)
    assert_equal_runs(shot, undisturbed(LONG), kills=2)
    assert not any("out of memory" in one["why"] for one in shot.named("decision"))
    assert [event["target"] for event in shot.named("rank_joined")] == [5, 5]


def test_a_rank_that_no_plan_helps_is_left_out(jobs, undisturbed, name):
    """Of two pipelines one would be left if its stages were to keep less: something else may be in its memory."""
    again = ";".join(f"rank=3,step=2,at=forward,generation={one},signal=FULL" for one in range(1, 20))
    shot = jobs.run(name, ranks=4, stages=2, flags=f"--odyssey-inject {again}")
    assert_equal_runs(shot, undisturbed(), kills=len(shot.named("injected")))
    (lost,) = shot.named("failure_detected")
    assert (lost["dead"], lost["causes"]) == ([3], ["memory"])
    assert "rank(s) [3] have run out of memory and are left out" in shot.log


def test_a_rank_that_alone_has_layers_is_not_left_out(jobs, undisturbed, name):
    """A last stage keeps a microbatch at a time: no plan needs less."""
    shot = jobs.run(name, ranks=2, stages=2, flags="--odyssey-inject rank=1,step=2,at=forward,signal=FULL")
    assert_equal_runs(shot, undisturbed(), kills=1)
    assert not shot.named("failure_detected")
    assert "nobody else has their layers; they try once more" in shot.log


def test_a_rank_that_dies_while_others_make_room_for_one_that_ran_out(jobs, undisturbed, name):
    """By what is thought of memory since, those that are left have too little. Nothing is lost, so they try."""
    inject = "rank=3,step=0,at=commit;rank=2,step=2,at=weight_grad,signal=FULL;rank=0,step=-1,at=agree,generation=3"
    shot = jobs.run(name, ranks=4, stages=2, flags=f"--odyssey-policy reroute --odyssey-inject {inject}")
    assert_equal_runs(shot, undisturbed(), kills=3)


JOBS = {
    # what the job is, ranks, stages, ranks of a worker
    "two-pipelines": ("", 8, 4, 1),
    "four-pipelines": ("", 8, 2, 1),
    "cells": (CELLS, 8, 2, 2),
    "gangs": (GANG, 8, 2, 2),
    "slices": ("--use-distributed-optimizer", 8, 2, 1),
    "tied": ("--share-embeddings-and-output-weights", 8, 4, 1),
}
FLAGS = ("", "--odyssey-policy reroute", "--odyssey-policy replan", "--odyssey-interrupted-step redo",
         "--odyssey-respawn 1", "--odyssey-layout auto", "--odyssey-redundancy compute")  # fmt: skip
FIRST, LAST = (int(one) for one in os.environ.get("ODYSSEY_SEEDS", "0:12").split(":"))


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_drawn(jobs, undisturbed, name, seed):
    """Ranks run out of memory and die, up to four times at points that a seed draws."""
    draw = random.Random(seed)
    model, ranks, stages, group = JOBS[draw.choice(sorted(JOBS))]
    faults = []
    for _ in range(draw.randint(1, 4)):
        runs_out = draw.random() < 0.65
        points = ("forward", "backward", "weight_grad", "agreement") + ("reduce", "optimizer", "groups") * (
            not runs_out
        )
        at = draw.choice((*points, "transfer"))
        step = -1 if at in ("groups", "transfer") else draw.randint(0, 5)
        where = f",generation={draw.randint(1, 4)}" if step < 0 else ""
        signal = ",signal=FULL" if runs_out else ""
        faults.append(f"rank={draw.randrange(ranks)},step={step},at={at}{where}{signal}")
    job = f"{model} --train-iters 8".strip()
    flags = f"{job} {draw.choice(FLAGS)} --odyssey-inject {';'.join(faults)}"
    shot = jobs.run(name, ranks=ranks, stages=stages, flags=flags, timeout_s=120.0)
    if shot.exit_code == EXIT_LAYERS_LOST:
        assert "is left of" in shot.log, shot.log[-4000:]
        return
    assert_equal_runs(shot, undisturbed(job, ranks=group), kills=len(shot.named("injected")))
