"""``--rampup-batch-size``: steps of each size are as plain Megatron-LM's, whoever is killed as the size changes."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.jobs import assert_holders_agree
from tests.launch.jobserver import CHECKOUT
from tests.megatron_lm.jobs import FLOAT64, MOCK, assert_checkpoints_there_and_back, assert_same_lines

WITHOUT = "--train-iters --lr-warmup-iters"
SAMPLES = f"{MOCK} --train-samples 84 --lr-decay-samples 84 --lr-warmup-samples 8"
GROWING = f"{SAMPLES} --rampup-batch-size 4 4 24"
"""Three steps of 4, two of 8, and then 12."""
KILLS = {
    "in-the-first-size": "rank=3,step=1,at=forward",
    "as-the-size-changes": "rank=2,step=2,at=commit",
    "behind-the-change": "rank=1,step=3,at=agreement",
    "in-the-optimizer": "rank=0,step=4,at=optimizer",
    "full": "rank=2,step=6,at=reduce",
}


@pytest.mark.parametrize("case", KILLS)
def test_lines_are_those_of_plain_megatron_lm(jobs, name, case):
    run = jobs.odyssey(name, GROWING, ranks=4, stages=2, inject=KILLS[case], without=WITHOUT)
    plain = jobs.plain(GROWING, ranks=4, stages=2, without=WITHOUT)
    assert [one.global_batch_size for one in plain.iterations] == [4] * 3 + [8] * 2 + [12] * 4
    assert_same_lines(run, plain)
    assert len(run.killed) == 1
    assert_holders_agree(run)


def test_float64_to_the_last_digits(jobs, name):
    flags, how = f"{GROWING} --odyssey-float64 on", {"ranks": 4, "stages": 2, "without": WITHOUT}
    whole = jobs.odyssey(f"{name}-reference", flags, **how)
    inject = "rank=3,step=2,at=backward,microbatch=3;rank=0,step=5,at=reduce"
    shot = jobs.odyssey(name, flags, inject=inject, **how)
    assert_same_lines(shot, whole, rel=FLOAT64)
    assert len(shot.killed) == 2


@pytest.mark.timeout(400)
def test_a_rank_comes_back_while_the_batch_grows(jobs, name):
    """The one that prints: its Megatron must count the samples of steps that it has not seen."""
    flags = (
        f"{MOCK} --train-samples 500 --lr-decay-samples 500 --lr-warmup-samples 8 --rampup-batch-size 4 4 400 "
        "--eval-interval 10 --odyssey-float64 on"
    )
    whole = jobs.odyssey(f"{name}-reference", flags, ranks=8, stages=4, without=WITHOUT)
    run = jobs.odyssey(
        name,
        f"{flags} --odyssey-respawn 1",
        ranks=8,
        stages=4,
        without=WITHOUT,
        inject="rank=7,step=2,at=backward",
    )
    assert_same_lines(run, whole, rel=FLOAT64)
    assert run.named("rank_joined")


def test_checkpoints_there_and_back(jobs, name):
    """Saved in the middle of a size; plain Megatron-LM goes on with it, and the other way round."""
    how = {"ranks": 4, "stages": 2, "without": WITHOUT}
    assert_checkpoints_there_and_back(jobs, name, GROWING, inject="rank=1,step=2,at=forward", **how)


@pytest.mark.matrix
def test_a_save_that_is_made_again_counts_the_operations_of_each_size(jobs, name):
    """It is begun after iteration 3 and made again after the next one, which has 8 samples."""
    how = {"ranks": 4, "stages": 2, "without": WITHOUT}
    flags = f"{GROWING} --save"
    ours, theirs = (jobs.folder / f"{name}-{who}" for who in ("ours", "theirs"))
    slowly = [str(CHECKOUT / "tests" / "megatron_lm" / "slow.py"), "1.5"]
    again = f"{flags} {ours} --save-interval 3 --async-save"
    run = jobs.odyssey(name, again, inject="rank=2,step=3,at=backward", before=slowly, **how)
    assert run.exit_code == 0, run.log[-3000:]
    jobs.plain(f"{flags} {theirs} --save-interval 4 --exit-interval 4", **how)
    saved = [torch.load(one / "iter_0000004" / "common.pt", weights_only=False) for one in (ours, theirs)]
    count, expected = (one["num_floating_point_operations_so_far"] for one in saved)
    assert count == expected > 0


def test_sizes_that_the_replicas_cannot_share(jobs, name):
    flags = f"{SAMPLES} --rampup-batch-size 3 3 24"
    run = jobs.odyssey(name, flags, ranks=4, stages=2, without=WITHOUT)
    assert run.exit_code == 2, run.log[-3000:]
    assert "Some steps have 3 or 9 samples" in run.log
