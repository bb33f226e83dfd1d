"""``--log-max-attention-logit``: over all layers, heads and microbatches of a step, whoever has computed them."""

from __future__ import annotations

from itertools import accumulate

import pytest

from odyssey_megatron.upstream.source import Source
from tests.launch.jobserver import CHECKOUT
from tests.megatron_lm.jobs import FLOAT32, FLOAT64, MOCK, assert_same_lines
from tests.megatron_lm.test_tensorboard import curves

SCRIPT = str(CHECKOUT / "tests" / "megatron_lm" / "logits.py")
HOW = {"before": [SCRIPT], "without": "--eval-iters"}
ALONE = HOW | {"before": [SCRIPT, "alone"]}
FLAGS = f"{MOCK} --log-max-attention-logit --eval-iters 0 --init-method-std 0.3"
CASES = {
    "pipelines": (6, 2, "", "rank=0,step=2,at=backward;rank=5,step=4,at=reduce"),
    "cells": (8, 2, "--tensor-model-parallel-size 2 --sequence-parallel", "rank=6,step=3,at=optimizer"),
    "window": (4, 2, "--window-size 5,0", "rank=3,step=3,at=agreement"),
}


def logits(folder, first=1):
    found = curves(folder)["max_attention_logit"]
    assert sorted(found) == [*range(first, 7)]
    return [found[step] for step in sorted(found)]


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=() if one == "cells" else pytest.mark.matrix) for one in CASES]
)
def test_the_largest_logit_is_plain_megatron_lms(jobs, name, case):
    assert_logits(jobs, name, case)


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_the_largest_logit_of_newer_versions(other_jobs, name, case):
    assert_logits(other_jobs, name, case)


def assert_logits(jobs, name, case):
    """Plain Megatron-LM logs that of the last rank's layers and heads, so here it has all; before 0.19 of all steps.
    What weights begin with depends on the stages: both go on from a checkpoint.
    """
    ranks, stages, flags, inject = CASES[case]
    folders = {who: jobs.folder / f"{name}-{who}" / "curves" for who in ("plain", "ours")}
    saved, alone = jobs.folder / f"{name}-saved", {"ranks": 2, "stages": 1, **ALONE}
    usual = f"{FLAGS} {flags}" if case == "window" else FLAGS
    save = f"--save {saved} --save-interval 2 --exit-interval 2"
    assert jobs.plain_once(f"{name}-first", f"{usual} {save}", **alone).exit_code == 0
    load = f"--load {saved} --tensorboard-dir"
    plain = jobs.plain_once(f"{name}-plain", f"{usual} {load} {folders['plain']}", **alone)
    how = {"ranks": ranks, "stages": stages, **HOW}
    run = jobs.odyssey(name, f"{FLAGS} {flags} {load} {folders['ours']}", inject=inject, **how)
    assert_same_lines(run, plain, first=3)
    assert len(run.killed) >= 1
    mine, theirs = logits(folders["ours"], 3), logits(folders["plain"], 3)
    if Source((jobs.checkout,)).version() < "0.19":
        mine = [*accumulate(mine, max)]
    assert mine == pytest.approx(theirs, rel=FLOAT32)
    assert 0.0 < min(mine)


@pytest.mark.matrix
def test_to_the_last_digits(jobs, name):
    """As written to TensorBoard, in 32 bits; of recomputed layers, and of ones that run again elsewhere."""
    more = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --odyssey-float64 on"
    how, folders = (
        {"ranks": 8, "stages": 4, **HOW},
        [jobs.folder / f"{name}-{who}" for who in ("whole", "shot")],
    )
    whole = jobs.odyssey(f"{name}-reference", f"{FLAGS} {more} --tensorboard-dir {folders[0]}", **how)
    inject = "rank=1,step=1,at=weight_grad;rank=6,step=3,at=forward"
    run = jobs.odyssey(name, f"{FLAGS} {more} --tensorboard-dir {folders[1]}", inject=inject, **how)
    assert_same_lines(run, whole, rel=FLOAT64)
    assert run.killed == [1, 6]
    assert logits(folders[1]) == logits(folders[0])
