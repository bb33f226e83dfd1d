"""Unmodified Megatron-LM with context parallelism and ranks that die, beside plain Megatron-LM without it, at the same
global batch: its own attention for that needs a GPU.
"""

from __future__ import annotations

import pytest

from tests.e2e.jobs import ROUNDING, assert_equal_numbers
from tests.megatron_lm.jobs import (
    FLOAT64,
    MOCK,
    assert_equal_checkpoints,
    assert_same_iterations,
    assert_same_lines,
    behind_a_load,
)

CONTEXT = f"{MOCK} --context-parallel-size 2"


def test_lines_of_context_parallelism_are_those_of_plain_megatron_lm(jobs, name):
    """A checkpoint of it goes on in plain Megatron-LM without context parallelism, and that one's with it."""
    plain, saved = jobs.plain(ranks=4, stages=2), jobs.folder / name / "saved"
    save = f"--save {saved} --save-interval 2"
    inject = "rank=1,step=1,at=backward;rank=6,step=3,at=evaluate"
    run = jobs.odyssey(name, f"{CONTEXT} {save}", ranks=8, stages=2, inject=inject)
    assert_same_lines(run, plain)
    assert run.killed == [0, 1, 6, 7]
    alone = jobs.plain_once(f"{name}-alone", f"{MOCK} --load {saved} --ckpt-step 2 {save}", ranks=4, stages=2)
    assert_goes_on(alone, plain, first=3)
    again = jobs.odyssey(f"{name}-again", f"{CONTEXT} --load {saved} --ckpt-step 4", ranks=4, stages=1)
    assert_goes_on(again, plain, first=5)


def assert_goes_on(run, plain, *, first):
    """From the checkpoint before ``first``."""
    assert run.exit_code == 0, run.log[-4000:]
    assert_same_iterations(run.iterations, behind_a_load(plain.iterations[first - 1 :]))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
        "--window-size 5,0 --calculate-per-token-loss",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ],
    ids=["cells", "window", "recompute"],
)
def test_context_parallelism_with_other_flags(jobs, name, flags):
    run = jobs.odyssey(name, f"{CONTEXT} {flags}", ranks=8, stages=1, inject="rank=5,step=2,at=reduce")
    whole = flags.replace("--use-distributed-optimizer", "")
    plain = jobs.plain(f"{MOCK} {whole}", ranks=4, stages=1)
    assert_same_lines(run, plain)
    assert 5 in run.killed


@pytest.mark.matrix
def test_context_parallelism_with_learned_positions(jobs, name):
    """From a checkpoint: how many numbers Megatron draws before it draws these weights depends on the context
    parallelism (core_v0.16.1 training/initialize.py, _warmup_jit_function).
    """
    saved, how = (
        jobs.folder / name / "saved",
        {"ranks": 4, "stages": 1, "without": "--position-embedding-type"},
    )
    learned = f"{MOCK} --position-embedding-type learned_absolute --save {saved} --save-interval 2"
    plain = jobs.plain_once(f"{name}-plain", learned, **how)
    load = f"{learned} --context-parallel-size 2 --load {saved} --ckpt-step 2"
    run = jobs.odyssey(name, load, inject="rank=2,step=2,at=reduce", **how)
    assert_goes_on(run, plain, first=3)
    assert run.killed == [2, 3]


@pytest.mark.matrix
def test_context_parallelism_in_bf16(jobs, name):
    flags, how = f"{CONTEXT} --bf16", {"ranks": 8, "stages": 1}
    run = jobs.odyssey(name, flags, inject="rank=5,step=2,at=reduce", **how)
    whole = jobs.odyssey(f"{name}-reference", flags, **how)
    assert_same_lines(run, whole, rel=ROUNDING)
    assert_equal_numbers(run.run.steps, whole.run.steps, rel=ROUNDING)
    assert 4 in run.killed


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_a_cell_of_context_ranks_comes_back_to_megatron_lm(jobs, name):
    steps = f"{CONTEXT} --train-iters 80 --eval-interval 10 --odyssey-float64 on --save-interval 80 --save"
    saved = {one: jobs.folder / f"{name}-{one}" for one in ("undisturbed", "shot")}
    undisturbed = jobs.odyssey(f"{name}-reference", f"{steps} {saved['undisturbed']}", ranks=8, stages=2)
    run = jobs.odyssey(
        name,
        f"{steps} {saved['shot']} --odyssey-respawn 1",
        ranks=8,
        stages=2,
        inject="rank=5,step=2,at=backward",
    )
    assert_same_lines(run, undisturbed, rel=FLOAT64)
    assert_equal_numbers(run.run.steps, undisturbed.run.steps, rel=FLOAT64)
    assert sorted(event["target"] for event in run.named("rank_joined")) == [4, 5]
    assert_equal_checkpoints(saved["shot"], saved["undisturbed"], 80)
