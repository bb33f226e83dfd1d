"""Experts that are spread over ranks: a worker is a gang of ranks, each with a microbatch of its own, and with one of
them all are lost.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import corrupted, not_finite
from tests.e2e.jobs import BFLOAT16, assert_alike_runs, assert_equal_runs
from tests.e2e.test_experts import DEEPSEEK, MIXTRAL
from tests.e2e.test_rejoin import members

pytestmark = pytest.mark.matrix

JOB = "--num-layers 4 --global-batch-size 12"
GANGS = "--expert-model-parallel-size 2"
MODELS = {"mixtral": f"{JOB} {MIXTRAL} {GANGS}", "deepseek": f"{JOB} {DEEPSEEK} {GANGS}"}
CASES = {
    "forward": (4, 1, "mixtral", "", "rank=1,step=2,at=forward"),
    "in-a-row": (8, 2, "deepseek", "", "rank=3,step=2,at=backward;rank=4,step=4,at=reduce"),
    "reduce": (4, 1, "deepseek", "", "rank=3,step=2,at=reduce"),
    "agreement": (4, 1, "mixtral", "", "rank=0,step=2,at=agreement"),
    "optimizer": (4, 1, "deepseek", "", "rank=2,step=2,at=optimizer"),
    "commit": (4, 1, "mixtral", "", "rank=0,step=2,at=commit"),
    "weight-grad": (8, 2, "mixtral", "", "rank=6,step=1,at=weight_grad;rank=0,step=3,at=commit"),
    "transfer": (
        8, 2, "deepseek", "--odyssey-policy replan",
        "rank=5,step=2,at=forward;rank=2,step=2,at=transfer,generation=2",
    ),
    "shared-out": (
        6, 1, "deepseek", "--use-distributed-optimizer", "rank=1,step=1,at=param_gather;rank=4,step=3,at=agreement",
    ),
    "alone": (4, 2, "mixtral", "--odyssey-redundancy state", "rank=1,step=2,at=backward"),
    "redone": (8, 2, "mixtral", "--odyssey-interrupted-step redo", "rank=7,step=2,at=backward"),
    "ran-ahead": (8, 4, "mixtral", "--odyssey-redundancy compute", "rank=7,step=2,at=backward"),
    "all-of-one": (6, 1, "mixtral", "", "rank=2,step=2,at=backward;rank=3,step=2,at=backward"),
    "two-at-once": (6, 1, "deepseek", "", "rank=2,step=2,at=backward;rank=5,step=2,at=weight_grad"),
    "gathered": (4, 1, "mixtral", "--moe-token-dispatcher-type allgather", "rank=1,step=2,at=backward"),
    "dropped-tokens": (4, 1, "mixtral", "--moe-expert-capacity-factor 1.25", "rank=2,step=1,at=forward"),
    "context": (8, 2, "mixtral", "--context-parallel-size 2", "rank=1,step=2,at=backward;rank=6,step=4,at=reduce"),
    "wide": (8, 1, "deepseek", "--context-parallel-size 2 --expert-model-parallel-size 4", "rank=7,step=2,at=reduce"),
    "cells": (
        8, 1, "mixtral", "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
        "rank=6,step=2,at=optimizer",
    ),
    "on-cells": (
        8, 2, "deepseek", "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        "rank=7,step=2,at=weight_grad",
    ),
    "twice-on-cells": (
        8, 1, "mixtral",
        "--tensor-model-parallel-size 4 --sequence-parallel --expert-tensor-parallel-size 1 --num-query-groups 4",
        "rank=2,step=2,at=reduce",
    ),
    "dropout": (4, 1, "mixtral", "--hidden-dropout 0.1", "rank=2,step=1,at=forward"),
}  # fmt: skip
SAME = ("--moe", "--hidden", "--context", "--tensor")
"""Flags of the model, which the run without a failure has, too."""
SIZES = ("--context-parallel-size", "--tensor-model-parallel-size")
"""With which a gang has more ranks, or as many may be two of them."""


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_loses_gangs_equals_one_that_does_not(jobs, undisturbed, name, case):
    ranks, stages, model, more, inject = CASES[case]
    flags = MODELS[model]
    shot = jobs.run(name, ranks=ranks, stages=stages, flags=f"{flags} {more} --odyssey-inject {inject}")
    size = 4 if {*SIZES} & {*more.split()} else 2
    reference = undisturbed(f"{flags} {more}" if more.startswith(SAME) else flags, ranks=size)
    assert_equal_runs(shot, reference, kills=inject.count("rank="))


def test_bfloat16_over_gangs(jobs, undisturbed, name):
    flags = f"--use-distributed-optimizer {BFLOAT16} {MODELS['deepseek']}"
    shot = jobs.run(name, ranks=6, stages=1, flags=f"{flags} --odyssey-inject rank=1,step=2,at=backward")
    assert_alike_runs(shot, undisturbed(f"{BFLOAT16} {MODELS['deepseek']}", ranks=2), kills=1)


def test_optimizer_state_besides_experts_is_cut_over_lanes_too(jobs, undisturbed, name):
    """As in Megatron's distributed optimizer, and kept twice."""
    mixtral = MODELS["mixtral"]
    alone, gang = undisturbed(f"{JOB} {MIXTRAL}", ranks=1), undisturbed(mixtral, ranks=2)
    shot = jobs.run(name, ranks=6, stages=1, flags=f"{mixtral} --use-distributed-optimizer")
    assert_equal_runs(shot, gang, kills=0)
    of_all, of_lane, most = (
        max(event["optimizer_bytes"] for event in one.named("weights")) for one in (alone, gang, shot)
    )
    besides = 2 * of_lane - of_all  # half of the experts are on each of the lanes
    assert most <= 1.05 * 2 / 3 * (of_lane - besides / 2)


@pytest.mark.parametrize(
    "more", ["", ";rank=2,step=-1,at=transfer,generation=3", ";rank=4,step=-1,at=transfer,incarnation=1"]
)
def test_a_gang_comes_back(jobs, undisturbed, name, more):
    """All its ranks join, and each is filled by the one in the same place; once more if another one is lost by then, or
    one of its own is again.
    """
    job = f"{MODELS['deepseek']} --train-iters 60"
    inject = f"rank=5,step=2,at=backward{more}"
    flags = f"{job} --odyssey-respawn 2 --odyssey-policy replan --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=8, stages=2, flags=flags)
    assert_equal_runs(shot, undisturbed(job, ranks=2), kills=inject.count("rank="))
    assert members(shot)[0] == members(shot)[-1] == 8


@pytest.mark.parametrize(
    ("ranks", "script", "fault", "gone"),
    [
        (6, corrupted, "--check-weight-hash-across-dp-replicas-interval 1 --corrupt 3:2:weights", [2, 3]),
        (4, not_finite, "--not-finite 3:2:weight_grad", [2, 3]),
        (4, not_finite, "--not-finite 0:2:forward", [0, 1]),
    ],
)
def test_a_gang_with_wrong_numbers_is_left_out(jobs, undisturbed, name, ranks, script, fault, gone):
    flags = MODELS["mixtral"]
    shot = jobs.run(name, ranks=ranks, stages=1, flags=f"{flags} {fault}", script=Path(script.__file__))
    assert [event["target"] for event in shot.named("left_out")] == gone
    assert_equal_runs(shot, undisturbed(flags), kills=0)
