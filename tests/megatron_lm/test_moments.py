"""--use-precision-aware-optimizer: Adam's moments in bf16. Plain Megatron-LM needs Transformer Engine for it, and so a
GPU: here jobs that lose ranks are compared with those that lose none, and checkpoints go to plain ones without the
flag.
"""

from __future__ import annotations

import pytest
import torch

from tests.e2e.jobs import ROUNDING, assert_equal_numbers, assert_holders_agree
from tests.megatron_lm.jobs import (
    FLOAT64,
    MOCK,
    NORM_BFLOAT16,
    assert_same_iterations,
    assert_same_lines,
    behind_a_load,
    checkpoint,
)

SHARED = "--use-distributed-optimizer"
MOMENTS = f"{SHARED} --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
KILLS = "rank=0,step=1,at=optimizer;rank=4,step=2,at=commit;rank=3,step=3,at=backward"
SIZES = {"ranks": 6, "stages": 2}


def test_losses_are_those_of_a_run_without_failures(jobs, name):
    """And not those of moments in full, from the second step on: there is something that may be lost."""
    flags = f"{MOCK} {MOMENTS} --odyssey-float64 on"
    whole = jobs.odyssey(f"{name}-reference", flags, **SIZES)
    run = jobs.odyssey(name, flags, inject=KILLS, **SIZES)
    assert_same_lines(run, whole, rel=FLOAT64)
    assert run.killed == [0, 3, 4]
    assert_holders_agree(run)
    full = jobs.odyssey(f"{name}-full", f"{MOCK} {SHARED} --odyssey-float64 on", **SIZES)
    ours, theirs = ([step.loss for step in one.run.steps] for one in (whole, full))
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours[2:] != pytest.approx(theirs[2:], rel=1e-7)


@pytest.mark.matrix
def test_in_bf16_with_gradients_in_bf16(jobs, name):
    flags = f"{MOCK} {MOMENTS} --bf16 --main-grads-dtype bf16"
    whole = jobs.odyssey(f"{name}-reference", flags, **SIZES)
    run = jobs.odyssey(name, flags, inject=KILLS, **SIZES)
    assert run.exit_code == 0, run.log[-3000:]
    assert_equal_numbers(run.run.steps, whole.run.steps, rel=ROUNDING)
    assert_holders_agree(run)


@pytest.mark.parametrize("more", ["--odyssey-float64 on", "--bf16"], ids=["float64", "bf16"])
def test_what_is_saved_is_in_full_and_loses_nothing(jobs, name, more):
    """Plain Megatron-LM goes on with it, and so does the same job: with moments that are what they were."""
    folder, short = jobs.folder / f"{name}-saved", "--save-interval 3"
    flags = f"{MOCK} {MOMENTS} {more} --odyssey-redundancy state"
    whole = jobs.odyssey(
        f"{name}-whole", f"{flags} --save {folder} {short}", inject="rank=4,step=2,at=optimizer", **SIZES
    )
    assert whole.exit_code == 0, whole.log[-3000:]
    saved, wide = checkpoint(folder, 3), torch.float32 if "bf16" in more else torch.float64
    moments = [one for key, one in saved.items() if key.startswith("optimizer.state.exp_avg")]
    assert len(moments) == 2 * 9, "of parameters by name: all layers share theirs"
    for one in moments:
        assert one.dtype == wide
        assert torch.equal(one, one.bfloat16().to(wide))
        assert one.abs().max() > 0
    again = jobs.odyssey(name, f"{flags} --load {folder} --ckpt-step 3", ranks=4, stages=4)
    assert again.exit_code == 0, again.log[-3000:]
    assert_equal_numbers(again.run.steps, whole.run.steps[3:], rel=ROUNDING if "bf16" in more else FLOAT64)
    if "bf16" in more:
        plain = f"{MOCK} {SHARED} {more}"
        resumed = jobs.plain(f"{plain} --load {folder} --ckpt-step 3", ranks=4, stages=2)
        unbroken = jobs.plain(plain, **SIZES)
        expected = behind_a_load(unbroken.iterations[3:])
        assert_same_iterations(resumed.iterations, expected, rel=2e-3, norm_rel=NORM_BFLOAT16)


def test_a_job_that_trains_goes_on_with_moments_in_bf16(jobs, name):
    """Its checkpoint has them in float32."""
    folder = jobs.folder / f"{name}-saved"
    jobs.plain(f"{MOCK} {SHARED} --save {folder} --save-interval 3 --exit-interval 3", ranks=4, stages=2)
    run = jobs.odyssey(
        name, f"{MOCK} {MOMENTS} --load {folder}", ranks=4, stages=2, inject="rank=1,step=4,at=optimizer"
    )
    resumed = jobs.plain(f"{MOCK} {SHARED} --load {folder}", ranks=4, stages=2)
    assert run.exit_code == 0, run.log[-3000:]
    assert run.killed == [1]
    assert_same_iterations(run.iterations[:1], resumed.iterations[:1])
    assert_same_iterations(run.iterations, resumed.iterations, rel=1e-3)
