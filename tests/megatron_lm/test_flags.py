"""What real launch lines have, each under a failure. Grouped-query attention is part of every job here."""

from __future__ import annotations

import re

import pytest

from tests.e2e import not_finite
from tests.e2e.jobs import ROUNDING, assert_equal_numbers, assert_holders_agree
from tests.launch.jobserver import CHECKOUT
from tests.megatron_lm.jobs import FLOAT32, FLOAT64, MOCK, assert_same_lines

NOT_FINITE = not_finite.__file__
BFLOAT16 = 2e-3
"""Relative difference to plain Megatron-LM, whose layers sum in another order, in weights of 8 bits."""
FLAGS = {
    "recompute-full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "recompute-selective": "--recompute-granularity selective",
    "overlap-grad-reduce": "--overlap-grad-reduce",
    "distributed-optimizer": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "per-token-loss": "--calculate-per-token-loss",
    "check-weight-hash": "--check-weight-hash-across-dp-replicas-interval 1",
    "uneven-stages": "--decoder-first-pipeline-num-layers 1",
    "bf16": "--bf16 --accumulate-allreduce-grads-in-fp32",
}

INTERLEAVED = "--num-layers 6 --no-overlap-p2p-communication"
"""Messages that overlap would give plain Megatron-LM other losses each time: it relies on CUDA's streams."""
MOOT = {
    "virtual-stages": f"{INTERLEAVED} --num-layers-per-virtual-pipeline-stage 1",
    "learned-positions": f"{INTERLEAVED} --num-virtual-stages-per-pipeline-rank 2 --init-method-std 0.05 "
    "--position-embedding-type learned_absolute",
    "drawn-on-cpu": f"{INTERLEAVED} --num-virtual-stages-per-pipeline-rank 2 --use-cpu-initialization",
    "virtual-cells": f"{INTERLEAVED} --num-virtual-stages-per-pipeline-rank 2 --tensor-model-parallel-size 2",
    "without-layers": "--num-layers 4 --no-overlap-p2p-communication --num-virtual-stages-per-pipeline-rank 2 "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    "layout": "--num-layers 6 --pipeline-model-parallel-layout Et|tttt|tL",
    "virtual-layout": f"{INTERLEAVED} --pipeline-model-parallel-layout Et|tt||tt||tL",
}
"""Of three stages, which Megatron cuts or schedules otherwise; what they compute is the same."""
LEFT_OUT = {
    "all-at-once": (
        "--use-distributed-optimizer",
        "--num-distributed-optimizer-instances 2 --delay-wgrad-compute --defer-embedding-wgrad-compute "
        "--cuda-graph-impl local --rerun-mode report_stats --error-injection-rate 5 --num-workers 3 "
        "--timing-log-level 1 --no-barrier-with-level-1-timing",
    ),
    "of-older-versions": (
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--enable-cuda-graph --external-cuda-graph --overlap-param-gather-with-optimizer-step",
    ),
    "buffers": ("--tensor-model-parallel-size 2 --sequence-parallel", "--tp-comm-overlap"),
    "experts": (
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
        "--moe-token-dispatcher-type flex --moe-enable-deepep --fp8-param-gather",
    ),
}
"""What plain Megatron-LM has, too, and what it cannot do on a CPU, or not as these jobs are."""


def first_of(cases):
    """The others are in the matrix."""
    first, *others = cases
    return [first, *(pytest.param(one, marks=pytest.mark.matrix) for one in others)]


CELLS = {
    "whole-sequences": "",
    "sequence-parallel": "--sequence-parallel",
    "qk-layernorm": "--qk-layernorm",
    "norms-of-all-kinds": "--sequence-parallel --qk-layernorm --normalization LayerNorm",
    "all-timers": "--timing-log-level 2",
}


@pytest.mark.parametrize("case", FLAGS)
def test_losses_are_those_of_plain_megatron_lm(jobs, name, case):
    flags = f"{MOCK} {FLAGS[case]}"
    run = jobs.odyssey(name, flags, ranks=4, stages=2, inject="rank=2,step=2,at=backward")
    plain = jobs.plain(flags, ranks=4, stages=2)
    assert_same_lines(run, plain, rel=BFLOAT16 if case == "bf16" else FLOAT32)
    assert run.killed == [2]
    assert_holders_agree(run)
    if case == "bf16":
        whole = jobs.odyssey(f"{name}-reference", flags, ranks=4, stages=2)
        assert_equal_numbers(run.run.steps, whole.run.steps, rel=ROUNDING)
    assert run.log.count("Weight hashes match") == plain.log.count("Weight hashes match")


@pytest.mark.parametrize("case", first_of(MOOT))
def test_what_odyssey_does_in_its_own_way_comes_to_the_same(jobs, name, case):
    flags, how = f"{MOCK} {MOOT[case]}", {"ranks": 6, "stages": 3, "without": "--num-layers"}
    run = jobs.odyssey(name, f"{flags} --odyssey-redundancy state", inject="rank=2,step=2,at=backward", **how)
    assert_same_lines(run, jobs.plain(flags, **how))
    assert 2 in run.killed


@pytest.mark.matrix
def test_messages_that_overlap_with_virtual_stages(jobs, name):
    """As recipes have them; plain Megatron-LM with those that do not, see INTERLEAVED."""
    virtual, how = (
        "--num-virtual-stages-per-pipeline-rank 2",
        {"ranks": 6, "stages": 3, "without": "--num-layers"},
    )
    run = jobs.odyssey(
        name, f"{MOCK} --num-layers 6 {virtual} --overlap-p2p-communication-warmup-flush "
        "--microbatch-group-size-per-virtual-pipeline-stage 4 --odyssey-redundancy state",
        inject="rank=2,step=2,at=backward", **how,
    )  # fmt: skip
    assert_same_lines(run, jobs.plain(f"{MOCK} {INTERLEAVED} {virtual}", **how))
    assert 2 in run.killed


@pytest.mark.parametrize("case", first_of(LEFT_OUT))
def test_what_is_ignored_is_named_and_changes_nothing(jobs, name, case):
    usual, ignored = LEFT_OUT[case]
    ranks = 8 if "-parallel-size 2" in usual else 4
    flags = f"{MOCK} {usual} {ignored}"
    run = jobs.odyssey(name, flags, ranks=ranks, stages=2, inject="rank=2,step=2,at=backward")
    assert_same_lines(run, jobs.plain(f"{MOCK} {usual}", ranks=ranks, stages=2))
    assert 2 in run.killed
    for flag in re.findall(r"--\S+", ignored):
        assert run.log.count(f"[odyssey] {flag} changes nothing with --odyssey: ") == 1


@pytest.mark.parametrize("case", CELLS)
def test_tensor_parallel_cells(jobs, name, case):
    """Two ranks to a worker: with one of them its whole cell is lost."""
    flags = f"{MOCK} --tensor-model-parallel-size 2 {CELLS[case]}"
    run = jobs.odyssey(name, flags, ranks=8, stages=2, inject="rank=7,step=2,at=backward")
    assert_same_lines(run, jobs.plain(flags, ranks=8, stages=2))
    assert run.killed == [6, 7]


def test_cells_die_behind_a_step(jobs, name):
    """While others are in what Megatron's loop does between two: a message within their cell would end them, too."""
    flags = f"{MOCK} --tensor-model-parallel-size 2"
    kills = "rank=7,step=1,at=commit;rank=1,step=2,at=commit;rank=4,step=4,at=commit"
    run = jobs.odyssey(name, flags, ranks=12, stages=2, inject=kills)
    assert_same_lines(run, jobs.plain(flags, ranks=12, stages=2))
    assert run.killed == [0, 1, 4, 5, 6, 7]
    assert_holders_agree(run)


def test_dropout_is_that_of_the_same_job_without_a_failure(jobs, name):
    """Plain Megatron-LM draws by rank, which no survivor could repeat; Odyssey by microbatch and layer."""
    flags = f"{MOCK} --odyssey-float64 on --attention-dropout 0.1 --hidden-dropout 0.1"
    reference = jobs.odyssey(f"{name}-reference", flags, ranks=4, stages=2)
    run = jobs.odyssey(name, flags, ranks=4, stages=2, inject="rank=1,step=2,at=backward")
    assert run.exit_code == reference.exit_code == 0, run.log[-3000:]
    assert run.killed == [1]
    assert_equal_numbers(run.run.steps, reference.run.steps, rel=FLOAT64)
    assert [step.loss for step in reference.run.steps] != pytest.approx(
        [one.loss for one in jobs.plain(ranks=4, stages=2).iterations], rel=FLOAT32
    )


def test_an_exit_interval(jobs, name):
    """Megatron's own exit, from the middle of its loop, by ranks that have survived others."""
    flags = f"{MOCK} --exit-interval 4 --save-interval 6 --save {jobs.folder / name / 'saved'}"
    run = jobs.odyssey(name, flags, ranks=4, stages=2, inject="rank=3,step=2,at=reduce")
    assert run.exit_code == 0, run.log[-3000:]
    assert [one.number for one in run.iterations] == [1, 2, 3, 4]
    assert "exiting program at iteration 4" in run.log
    assert (jobs.folder / name / "saved" / "latest_checkpointed_iteration.txt").read_text() == "4"


_NORMS = re.compile(r"num zeros: ([.\d]+) \| params norm: ([.\d]+) \|")
LOGS = {
    "replicated": "",
    "distributed-optimizer": "--use-distributed-optimizer",
    "bf16": "--bf16 --accumulate-allreduce-grads-in-fp32",
    "tensor-parallel": "--tensor-model-parallel-size 2",
    "gangs": "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2",
}


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=pytest.mark.matrix if one == "gangs" else ()) for one in LOGS]
)
def test_norms_and_counts_of_the_log_are_those_of_plain_megatron_lm(jobs, name, case):
    """Each parameter counts once, in layouts where layers have one to four holders."""
    flags = f"{MOCK} --log-params-norm --log-num-zeros-in-grad {LOGS[case]}"
    run = jobs.odyssey(
        name, f"{flags} --odyssey-policy replan", ranks=8, stages=2, inject="rank=2,step=2,at=backward"
    )
    plain = jobs.plain(flags, ranks=8, stages=2)
    assert run.killed, run.log[-3000:]
    ours, theirs = (_NORMS.findall(one.log) for one in (run, plain))
    assert len(ours) == len(theirs) == 6
    # Zero are gradients of tokens that no sample has. In 16 bits some more, by rounding: not the same in every layout.
    zeros = [[float(zero) for zero, _ in one] for one in (ours, theirs)]
    assert zeros[0] == (pytest.approx(zeros[1], rel=5e-3) if case == "bf16" else zeros[1])
    # Three digits are printed.
    norms = [[float(norm) for _, norm in one] for one in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], abs=1.1e-3)


def test_the_progress_log_follows_the_number_of_ranks(jobs, name):
    saved = jobs.folder / name / "saved"
    saved.mkdir(parents=True)  # as plain core_v0.16.1 wants it
    flags = f"{MOCK} --log-progress --save {saved} --save-interval 2"
    before = [str(CHECKOUT / "tests" / "megatron_lm" / "counted.py"), "1e18"]
    inject = "rank=0,step=3,at=backward"
    run = jobs.odyssey(name, flags, ranks=4, stages=2, inject=inject, before=before)
    assert run.exit_code == 0, run.log[-3000:]
    lines = [line.split("\t") for line in (saved / "progress.txt").read_text().splitlines()]
    assert [(line[2], line[3]) for line in lines] == [
        ("# GPUs: 4", "Starting job"),
        ("# GPUs: 4", "Saved checkpoint"),
        ("# GPUs: 3", "Saved checkpoint"),
        ("# GPUs: 3", "Saved checkpoint"),
    ]
    for line in lines[2:]:  # both are since the job's start, and per GPU that it began with
        job, cumulative = (float(re.search(r": ([.\d]+) TFLOP", one)[1]) for one in line[5:7])
        assert job == pytest.approx(cumulative, rel=0.01)
        assert job > 1.0


def test_who_alone_finds_a_loss_that_is_not_finite_is_left_out(jobs, name):
    """Megatron's own check of each loss would end whoever has it, not who has made it."""
    flags = f"{MOCK} --odyssey-float64 on"
    whole = jobs.odyssey(f"{name}-reference", flags, ranks=4, stages=2)
    shot = jobs.odyssey(name, f"{flags} --not-finite 1:2:forward", ranks=4, stages=2, before=[NOT_FINITE])
    assert [(event["target"], event["step"]) for event in shot.named("left_out")] == [(1, 2)]
    assert_same_lines(shot, whole, rel=FLOAT64)
    assert_holders_agree(shot)
