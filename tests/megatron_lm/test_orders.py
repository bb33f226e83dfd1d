"""Data that is shuffled, validated in whole or skipped: the samples of every step are plain Megatron-LM's."""

from __future__ import annotations

import re

import pytest
import torch

from odyssey_megatron.upstream.source import Source
from tests.e2e.jobs import assert_holders_agree
from tests.launch.jobserver import CHECKOUT
from tests.megatron_lm.jobs import (
    FLOAT64,
    MOCK,
    assert_checkpoints_there_and_back,
    assert_same_lines,
    indexed,
)

HOW = {"ranks": 4, "stages": 2}
SKIPPED = f"{MOCK} --iterations-to-skip 1 2 5"
CASES = {
    "cyclic": (f"{MOCK} --dataloader-type cyclic", "rank=3,step=2,at=backward"),
    "cyclic-for-all": (f"{MOCK} --dataloader-type cyclic --no-data-sharding", "rank=1,step=4,at=reduce"),
    "before-a-skipped-one": (SKIPPED, "rank=2,step=0,at=commit"),
    "in-a-skipped-one": (SKIPPED, "rank=1,step=1,at=agreement"),
    "behind-a-skipped-one": (SKIPPED, "rank=3,step=2,at=commit"),
    "the-first-is-skipped": (f"{MOCK} --iterations-to-skip 0 3", "rank=0,step=3,at=agreement"),
}


def unprinted(jobs, flags: str) -> set[int]:
    """The iterations, counted from 1, that ``flags`` skip: in 0.16 those to skip count from 0."""
    words = flags.partition("--iterations-to-skip ")[2].partition(" --")[0].split()
    first = Source((jobs.checkout,)).version().startswith("0.16.")
    return {int(word) + first for word in words}


def test_orders_are_those_of_the_samplers(jobs):
    jobs.script([str(CHECKOUT / "tests/megatron_lm/orders.py")])


@pytest.mark.parametrize("case", CASES)
def test_samples_are_those_of_plain_megatron_lm(jobs, name, case):
    flags, inject = CASES[case]
    run = jobs.odyssey(name, flags, inject=inject, **HOW)
    assert_same_lines(run, jobs.plain(flags, **HOW), skipped=unprinted(jobs, flags))
    assert len(run.killed) == 1
    assert_holders_agree(run)


@pytest.fixture(scope="module")
def whole_sets(jobs):
    """Flags for two validation sets, of 7 and 9 samples."""
    folder = jobs.folder / "whole-sets"
    train, *valid = (indexed(folder / str(count), [bytes(range(17)) * count]) for count in (200, 7, 9))
    return (
        f"--train-data-path {train} --valid-data-path {valid[0]} {valid[1]} --multiple-validation-sets "
        "--full-validation"
    )


def test_whole_validation_sets(jobs, name, whole_sets):
    """Over and over again, as 0.16 reads them. That fails itself with one set, or a test set."""
    how = {**HOW, "without": "--mock-data --split"}
    run = jobs.odyssey(name, whole_sets, inject="rank=1,step=3,at=evaluate;rank=3,step=4,at=forward", **how)
    plain = jobs.plain(whole_sets, **how)
    assert len(plain.evaluations) >= 4
    assert_same_lines(run, plain)
    assert len(run.killed) == 2


@pytest.mark.timeout(400)
def test_a_cell_comes_back_to_whole_validation_sets(jobs, name, whole_sets):
    """Of which its second rank reads nothing, and is told the size with the others, as it evaluates."""
    flags = f"{whole_sets} --tensor-model-parallel-size 2 --train-iters 50 --eval-interval 25 --odyssey-float64 on"
    how = {"ranks": 4, "stages": 1, "without": "--mock-data --split --train-iters --eval-interval"}
    whole = jobs.odyssey(f"{name}-reference", flags, **how)
    inject = "rank=0,step=2,at=backward"
    run = jobs.odyssey(name, f"{flags} --odyssey-respawn 1", inject=inject, **how)
    assert_same_lines(run, whole, rel=FLOAT64)
    assert run.killed == [0, 1]
    begun = {e["generation"]: e["members"] for e in run.named("generation_started")}
    assert begun[max(begun)] == [0, 1, 2, 3]


@pytest.mark.timeout(400)
def test_a_rank_comes_back_behind_skipped_iterations(jobs, name):
    """The one that prints: its Megatron must know which evaluations and samples there have been."""
    flags = (
        f"{MOCK} --iterations-to-skip 3 4 9 14 --train-iters 40 --lr-decay-iters 40 --eval-interval 5 "
        "--dataloader-type cyclic --odyssey-float64 on"
    )
    how = {"ranks": 8, "stages": 4, "without": "--train-iters --eval-interval"}
    whole = jobs.odyssey(f"{name}-reference", flags, **how)
    inject = "rank=7,step=2,at=backward"
    run = jobs.odyssey(name, f"{flags} --odyssey-respawn 1", inject=inject, **how)
    assert_same_lines(run, whole, rel=FLOAT64, skipped=unprinted(jobs, flags))
    assert run.named("rank_joined")


def test_checkpoints_of_shuffled_data_there_and_back(jobs, name):
    """Saved behind a skipped iteration; plain Megatron-LM goes on with it, and the other way round."""
    flags = f"{SKIPPED} --dataloader-type cyclic"
    assert_checkpoints_there_and_back(
        jobs, name, flags, inject="rank=1,step=2,at=agreement", skipped=unprinted(jobs, flags), **HOW
    )


def test_a_schedule_of_sizes_and_larger_evaluations(jobs, name):
    """Steps of 4, 8 and 12 samples; an evaluation takes more microbatches than a plan has."""
    calculator = jobs.checkout / "megatron" / "core" / "num_microbatches_calculator.py"
    if "step_batch_size_schedule" not in calculator.read_text():
        pytest.skip("this Megatron-LM has no --step-batch-size-schedule")
    flags = (
        f"{MOCK} --train-samples 84 --lr-decay-samples 84 --lr-warmup-samples 8 --eval-global-batch-size 18 "
        "--step-batch-size-schedule 0:4,192:8,512:12"
    )
    how = {**HOW, "without": "--train-iters --lr-warmup-iters --global-batch-size"}
    plain = jobs.plain(flags, **how)
    assert [one.global_batch_size for one in plain.iterations] == [4] * 3 + [8] * 3 + [12] * 4
    inject = "rank=3,step=3,at=reduce;rank=0,step=6,at=evaluate"
    run = jobs.odyssey(name, flags, inject=inject, **how)
    assert_same_lines(run, plain)
    assert len(run.killed) == 2


_SKIPPED = re.compile(r"iteration +(\d+)/.* skipped samples: +(\d+) \|")


def test_a_batch_that_replicas_cannot_share_is_decreased(jobs, name):
    """To 12 samples of 13; the others are logged as skipped, by one who joins, too."""
    flags = (
        f"{MOCK} --global-batch-size 13 --decrease-batch-size-if-needed --train-iters 20 --eval-interval 10"
    )
    how = {**HOW, "without": "--train-iters --eval-interval --global-batch-size"}
    plain = jobs.plain(flags, **how)
    assert {one.global_batch_size for one in plain.iterations} == {12}
    inject = "rank=3,step=2,at=backward;rank=0,step=10,at=evaluate"
    run = jobs.odyssey(name, f"{flags} --odyssey-respawn 1", inject=inject, **how)
    assert_same_lines(run, plain)
    assert len(run.killed) == 2
    assert _SKIPPED.findall(run.log) == _SKIPPED.findall(plain.log) != []


@pytest.mark.timeout(400)
def test_samples_that_were_skipped_before_a_checkpoint_are_known_to_ranks_that_come_back(jobs, name):
    """To the last one, which logs them, and to the first one, which saves them."""
    flags = (
        f"{MOCK} --global-batch-size 13 --decrease-batch-size-if-needed --train-iters 60 --eval-interval 30"
    )
    how = {**HOW, "without": "--train-iters --eval-interval --global-batch-size"}
    first, own, other = (jobs.folder / f"{name}-{which}" for which in ("first", "plain", "back"))
    jobs.plain(f"{flags} --save {first} --save-interval 4 --exit-interval 4", **how)
    flags = f"{flags} --load {first} --save-interval 60"
    plain = jobs.plain(f"{flags} --save {own}", **how)
    inject = "rank=3,step=5,at=backward;rank=0,step=6,at=backward"
    run = jobs.odyssey(name, f"{flags} --save {other} --odyssey-respawn 1", inject=inject, **how)
    assert sorted(event["target"] for event in run.named("rank_joined")) == run.killed == [0, 3]
    assert _SKIPPED.findall(run.log) == _SKIPPED.findall(plain.log) != []
    saved = [
        torch.load(folder / "iter_0000060" / "common.pt", weights_only=False)["args"]
        for folder in (own, other)
    ]
    assert saved[0].skipped_train_samples == saved[1].skipped_train_samples == 60


@pytest.mark.matrix
def test_evaluations_in_other_microbatches(other_jobs, name):
    """They are of training's size, which sum the same."""
    calculator = other_jobs.checkout / "megatron" / "core" / "num_microbatches_calculator.py"
    if "step_batch_size_schedule" not in calculator.read_text():
        pytest.skip("this Megatron-LM has no --eval-micro-batch-size")
    flags = f"{MOCK} --eval-micro-batch-size 3 --eval-global-batch-size 18"
    run = other_jobs.odyssey(name, flags, inject="rank=0,step=3,at=evaluate", **HOW)
    assert_same_lines(run, other_jobs.plain(flags, **HOW))
    assert run.killed == [0]
