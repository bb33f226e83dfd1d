"""What Megatron's distributed optimizer has saved goes on with the plugin, and ours with it, in any layout."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.jobs import assert_equal_numbers, assert_holders_agree
from tests.megatron_lm.jobs import (
    FLOAT32,
    FLOAT64,
    MOCK,
    assert_same_iterations,
    assert_same_lines,
    behind_a_load,
    checkpoint,
)
from tests.megatron_lm.test_experts import DEEPSEEK, GANGS

SHARED = "--use-distributed-optimizer"
BY_PARAMETER = f"{SHARED} --dist-ckpt-optim-fully-reshardable"
THREE = "--save-interval 3 --exit-interval 3"
MATRIX = pytest.mark.matrix

SAVED = {
    # flags of the plain job that saves, its ranks and stages; those of the job that goes on
    "by-bucket": (SHARED, 4, 2, "--dist-ckpt-strictness raise_all", 4, 4),
    "by-parameter": (f"{BY_PARAMETER} --tensor-model-parallel-size 2", 4, 2, SHARED, 4, 2),
    "by-bucket-of-few-numbers": (
        f"{SHARED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000 "
        "--decoder-first-pipeline-num-layers 3",
        6, 2, SHARED, 4, 2,
    ),
    "by-bucket-of-cells-and-chunks": (
        f"{SHARED} --num-layers 6 --tensor-model-parallel-size 2 --sequence-parallel "
        "--num-layers-per-virtual-pipeline-stage 1 --no-overlap-p2p-communication",
        6, 3, f"{SHARED} --num-layers 6 --tensor-model-parallel-size 2", 8, 2,
    ),
    "by-parameter-gathered": (
        f"{BY_PARAMETER} --distrib-optim-fully-reshardable-mem-efficient "
        "--no-ckpt-fully-parallel-save",
        4, 2, "--tensor-model-parallel-size 2", 4, 2,
    ),
    "by-bucket-bf16": (f"{SHARED} --bf16 --overlap-grad-reduce --ddp-bucket-size 3000", 4, 2, "--bf16", 4, 4),
    "by-parameter-bf16": (f"{BY_PARAMETER} --bf16", 4, 2, f"{SHARED} --bf16", 4, 2),
    # ranks that bring no layer's state together
    "by-bucket-over-contexts": (
        f"{SHARED} --context-parallel-size 2", 4, 1, f"{SHARED} --context-parallel-size 2", 6, 1,
    ),
    "by-every-holder-over-contexts-bf16": (
        "--context-parallel-size 2 --bf16", 4, 1, f"{SHARED} --context-parallel-size 2 --bf16", 6, 1,
    ),
}  # fmt: skip
COMMON = ("by-bucket", "by-parameter", "by-bucket-bf16")


@pytest.fixture(scope="session")
def saved(jobs):
    """What a plain job with these flags has saved behind iteration 3, in ``ranks`` and ``stages``; run once."""
    known = {}

    def run(flags, ranks, stages):
        key = flags, ranks, stages
        if key not in known:
            known[key] = jobs.folder / f"plain-{len(known)}-saved"
            jobs.plain(f"{MOCK} {flags} --save {known[key]} {THREE}", ranks=ranks, stages=stages)
        return known[key]

    return run


@pytest.mark.parametrize("case", [one if one in COMMON else pytest.param(one, marks=MATRIX) for one in SAVED])
def test_what_a_plain_job_has_saved_goes_on_and_survives(jobs, name, saved, case):
    flags, ranks, stages, ours, our_ranks, our_stages = SAVED[case]
    folder = saved(flags, ranks, stages)
    resumed = jobs.plain(f"{MOCK} {flags} --load {folder}", ranks=ranks, stages=stages)
    run = jobs.odyssey(
        name, f"{MOCK} {ours} --load {folder} --odyssey-redundancy state", ranks=our_ranks, stages=our_stages,
        inject="rank=1,step=4,at=backward",
    )  # fmt: skip
    assert_same_lines(run, resumed, first=4, rel=2e-3 if "bf16" in case else FLOAT32)
    assert 1 in run.killed


@pytest.mark.parametrize("more", ["", pytest.param("--bf16", marks=MATRIX)], ids=["float32", "bf16"])
def test_what_survivors_have_saved_goes_on_in_plain_megatron_lm(jobs, name, more):
    folder = jobs.folder / f"{name}-saved"
    flags = f"{MOCK} {SHARED} {more} --save {folder} {THREE} --odyssey-policy replan"
    run = jobs.odyssey(
        name, flags, ranks=6, stages=2,
        inject="rank=0,step=0,at=backward;rank=4,step=1,at=forward;rank=5,step=3,at=checkpoint",
    )  # fmt: skip
    assert run.exit_code == 0, run.log[-4000:]
    assert run.killed == [0, 4, 5]
    whole = jobs.plain(f"{MOCK} {more}", ranks=4, stages=2)
    for layout, ranks, stages in (("", 2, 1), ("--tensor-model-parallel-size 2", 4, 2)):
        resumed = jobs.plain(f"{MOCK} {SHARED} {more} {layout} --load {folder}", ranks=ranks, stages=stages)
        expected = behind_a_load(whole.iterations[3:])
        assert_same_iterations(resumed.iterations, expected, rel=2e-3 if more else FLOAT32)


@pytest.mark.parametrize("more", ["", pytest.param("--bf16", marks=MATRIX)], ids=["float32", "bf16"])
def test_each_state_is_what_was_saved_to_the_bit(jobs, name, saved, more):
    """Read by bucket, and written by parameter, without a step between; the same training writes them so itself."""
    by_bucket = saved(f"{SHARED} {more}".strip(), 4, 2)
    expected = checkpoint(saved(f"{BY_PARAMETER} {more}".strip(), 4, 2), 3)
    folder = jobs.folder / f"{name}-again"
    flags = f"{MOCK} {SHARED} {more} --load {by_bucket} --save {folder} --save-interval 2 "
    flags += "--train-iters 3 --override-opt_param-scheduler"
    run = jobs.odyssey(name, flags, ranks=4, stages=4)
    assert run.exit_code == 0, run.log[-4000:]
    assert not run.iterations
    found = checkpoint(folder, 3)
    states = {key for key in expected if key.startswith("optimizer.state.")}
    assert states == {key for key in found if key.startswith("optimizer.state.")}
    assert len(states) == 3 * 9, "of parameters by name: all layers share theirs"
    for key in states:
        assert torch.equal(found[key], expected[key]), key
        assert found[key].dtype == expected[key].dtype == torch.float32


@pytest.mark.parametrize("more", [pytest.param("", marks=MATRIX), SHARED], ids=["uncut", "cut"])
def test_a_checkpoint_has_the_arguments_of_the_launch_line(jobs, name, more):
    """By which Megatron-LM tells whether a job that loads it has another number of replicas."""
    folder = jobs.folder / f"{name}-saved"
    run = jobs.odyssey(name, f"{MOCK} {more} --save {folder} {THREE}", ranks=4, stages=2)
    assert run.exit_code == 0, run.log[-4000:]
    saved_args = torch.load(folder / "iter_0000003" / "common.pt", weights_only=False)["args"]
    assert saved_args.use_distributed_optimizer == bool(more)
    assert saved_args.data_parallel_size == 2
    going_on = f"{MOCK} {more} --load {folder} --use-checkpoint-args"
    plain = jobs.plain(going_on, ranks=4, stages=2)
    again = jobs.odyssey(f"{name}-again", going_on, ranks=4, stages=2)
    assert_same_lines(again, plain, first=4)
    assert "Job sharding has changed" not in plain.log + again.log


ELSEWHERE = {
    # more flags; ranks and stages of the job that saves, flags, ranks and stages of the one that goes on, who dies
    "uncut": ("", 4, 2, "--odyssey-redundancy state", 4, 4, "rank=2,step=4,at=optimizer"),
    "cut": ("", 6, 2, SHARED, 4, 1, "rank=2,step=4,at=optimizer"),
    "cut-from-uncut": ("", 4, 2, f"{SHARED} --odyssey-spare-state host", 6, 2, "rank=0,step=4,at=param_gather"),
    "cut-in-cells": (
        "--tensor-model-parallel-size 2 --sequence-parallel", 6, 1, SHARED, 8, 1,
        "rank=7,step=3,at=reduce;rank=0,step=4,at=commit",
    ),
    "cut-over-contexts": ("--context-parallel-size 2", 8, 1, SHARED, 6, 1, "rank=1,step=4,at=param_gather"),
    "cut-over-gangs": (f"{DEEPSEEK} {GANGS}", 4, 1, SHARED, 6, 1, "rank=5,step=4,at=optimizer"),
    "cut-over-more-than-there-are-layers": (
        "", 4, 2, f"{SHARED} --odyssey-policy reroute", 12, 1, "rank=11,step=3,at=commit;rank=6,step=4,at=optimizer",
    ),
    "cut-and-tied": (
        "--share-embeddings-and-output-weights", 6, 2, f"{SHARED} --odyssey-redundancy-level 2", 4, 1,
        "rank=3,step=3,at=optimizer;rank=1,step=4,at=optimizer",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [one if one in ("uncut", "cut") else pytest.param(one, marks=MATRIX) for one in ELSEWHERE]
)
def test_what_is_saved_in_float64_goes_on_in_float64(jobs, name, case):
    """Of three holders and more each has some slices of a layer's state: one gathers them, and another deals them."""
    more, ranks, stages, ours, our_ranks, our_stages, inject = ELSEWHERE[case]
    folder = jobs.folder / f"{name}-saved"
    without = "--untie-embeddings-and-output-weights" if "tied" in case else ""
    flags = f"{MOCK} --odyssey-float64 on {more.replace('--share-embeddings-and-output-weights', '')}"
    saves = f"{SHARED} --save {folder} --save-interval 3"
    whole = jobs.odyssey(f"{name}-whole", f"{flags} {saves}", ranks=ranks, stages=stages, without=without)
    assert whole.exit_code == 0, whole.log[-4000:]
    flags = f"{flags} {ours} --load {folder} --ckpt-step 3"
    run = jobs.odyssey(name, flags, ranks=our_ranks, stages=our_stages, inject=inject, without=without)
    assert run.exit_code == 0, run.log[-4000:]
    assert len(run.named("injected")) == inject.count("rank=")
    assert_equal_numbers(run.run.steps, whole.run.steps[3:], rel=FLOAT64)
    assert_holders_agree(run)
    rings = run.named("decision")[0]["layout"]["keepers"]
    assert bool(rings) is (case != "uncut")
    assert all(len(ring) > 2 for ring in rings)


def test_buffers_of_another_tensor_parallelism_are_refused_with_one_message(jobs, name, saved):
    folder = saved(SHARED, 4, 2)
    flags = f"{MOCK} --load {folder} --tensor-model-parallel-size 2"
    run = jobs.odyssey(name, flags, ranks=4, stages=2)
    assert run.exit_code == 2, run.log[-3000:]
    assert "Traceback" not in run.log
    assert run.log.count("was saved with --tensor-model-parallel-size 1, not 2 and has") == 1
    assert not run.iterations
    assert jobs.odyssey(f"{name}-weights", f"{flags} --no-load-optim", ranks=4, stages=2).exit_code == 0
