"""What Megatron's distributed optimizer has saved goes on with the plugin, and ours with it, in any layout."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.jobs import assert_equal_numbers
from tests.megatron_lm.jobs import FLOAT32, FLOAT64, MOCK, assert_same_lines, checkpoint

SHARED = "--use-distributed-optimizer"
BY_PARAMETER = f"{SHARED} --dist-ckpt-optim-fully-reshardable"
THREE = "--save-interval 3 --exit-interval 3"
MATRIX = pytest.mark.matrix

SAVED = {
    # flags of the plain job that saves, its ranks and stages; those of the job that goes on
    "by-bucket": (SHARED, 4, 2, "", 4, 4),
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
        assert [one.number for one in resumed.iterations] == [4, 5, 6]
        for ours, theirs in zip(resumed.iterations, whole.iterations[3:], strict=True):
            if ours.number != 5:  # tells the mean of two iterations
                assert ours.loss == pytest.approx(theirs.loss, rel=2e-3 if more else FLOAT32)


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


def test_what_is_saved_in_float64_goes_on_in_float64(jobs, name):
    folder = jobs.folder / f"{name}-saved"
    flags = f"{MOCK} {SHARED} --odyssey-float64 on"
    whole = jobs.odyssey(f"{name}-whole", f"{flags} --save {folder} --save-interval 3", ranks=4, stages=2)
    assert whole.exit_code == 0, whole.log[-4000:]
    flags = f"{MOCK} --odyssey-float64 on --load {folder} --ckpt-step 3 --odyssey-redundancy state"
    run = jobs.odyssey(name, flags, ranks=4, stages=4, inject="rank=2,step=4,at=optimizer")
    assert run.exit_code == 0, run.log[-4000:]
    assert run.killed == [2]
    assert_equal_numbers(run.run.steps, whole.run.steps[3:], rel=FLOAT64)


def test_buffers_of_another_tensor_parallelism_are_refused_with_one_message(jobs, name, saved):
    folder = saved(SHARED, 4, 2)
    flags = f"{MOCK} --load {folder} --tensor-model-parallel-size 2"
    run = jobs.odyssey(name, flags, ranks=4, stages=2)
    assert run.exit_code == 2, run.log[-3000:]
    assert "Traceback" not in run.log
    assert run.log.count("was saved with --tensor-model-parallel-size 1, not 2 and has") == 1
    assert not run.iterations
    assert jobs.odyssey(f"{name}-weights", f"{flags} --no-load-optim", ranks=4, stages=2).exit_code == 0
