"""``--log-max-attention-logit``: over all layers, heads and microbatches of a step, whoever has computed them."""

from __future__ import annotations

from itertools import accumulate

import pytest

from odyssey_megatron.upstream.source import Source
from tests.launch.jobserver import CHECKOUT
from tests.megatron_lm.jobs import FLOAT32, FLOAT64, MOCK, assert_same_lines
from tests.megatron_lm.test_tensorboard import curves

HOW = {
    "before": [str(CHECKOUT / "tests" / "megatron_lm" / "logits.py")],
    "without": "--eval-iters --min-lr --lr",
}
FLAGS = f"{MOCK} --log-max-attention-logit --eval-iters 0 --lr 3e-1 --min-lr 3e-2 --init-method-std 0.3"
CASES = {
    "pipelines": (6, 2, "", "rank=0,step=1,at=backward;rank=5,step=3,at=reduce"),
    "cells": (8, 2, "--tensor-model-parallel-size 2 --sequence-parallel", "rank=6,step=2,at=optimizer"),
    "window": (4, 2, "--window-size 5,0", "rank=3,step=2,at=agreement"),
}


def logits(folder):
    found = curves(folder)["max_attention_logit"]
    assert list(found) == [1, 2, 3, 4, 5, 6]
    return [*found.values()]


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
    """Plain Megatron-LM logs that of the last rank's layers and heads, so here it has all; before 0.19 of all steps."""
    ranks, stages, flags, inject = CASES[case]
    folders = {who: jobs.folder / f"{name}-{who}" / "curves" for who in ("plain", "ours")}
    window = flags if "window" in flags else ""
    plain = jobs.plain_once(
        f"{name}-plain", f"{FLAGS} {window} --tensorboard-dir {folders['plain']}", ranks=2, stages=1, **HOW
    )
    run = jobs.odyssey(
        name,
        f"{FLAGS} {flags} --tensorboard-dir {folders['ours']}",
        ranks=ranks,
        stages=stages,
        inject=inject,
        **HOW,
    )
    assert_same_lines(run, plain)
    assert len(run.killed) >= 1
    mine, theirs = logits(folders["ours"]), logits(folders["plain"])
    if Source((jobs.checkout,)).version() < "0.19":
        mine = [*accumulate(mine, max)]
    assert mine == pytest.approx(theirs, rel=FLOAT32)
    assert 0.0 < min(mine) < max(mine)


@pytest.mark.matrix
def test_to_the_last_digits(jobs, name):
    """As written to TensorBoard, in 32 bits; of recomputed layers, and of ones that run again elsewhere."""
    more = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --odyssey-float64 on"
    how, folders = (
        {"ranks": 8, "stages": 4, **HOW},
        [jobs.folder / f"{name}-{who}" for who in ("whole", "shot")],
    )
    whole = jobs.odyssey(f"{name}-reference", f"{FLAGS} {more} --tensorboard-dir {folders[0]}", **how)
    inject = "rank=1,step=1,at=weight_grad;rank=6,step=3,at=forward,microbatch=4"
    run = jobs.odyssey(name, f"{FLAGS} {more} --tensorboard-dir {folders[1]}", inject=inject, **how)
    assert_same_lines(run, whole, rel=FLOAT64)
    assert run.killed == [1, 6]
    assert logits(folders[1]) == logits(folders[0])
