"""Beside Megatron-Core itself, and in the precision that real jobs use."""

from __future__ import annotations

import json

import pytest

from tests.e2e.jobs import ROUNDING, TOLERANCE, assert_equal_numbers, assert_holders_agree
from tests.launch.jobserver import CHECKOUT

pytestmark = pytest.mark.matrix

FLOAT32 = "--odyssey-float64 off"
CONTEXT = "--context-parallel-size 2 --num-layers 4 --global-batch-size 6"
CELLS = "--tensor-model-parallel-size 2 --qk-layernorm --num-layers 4 --global-batch-size 6"
EXPERTS = (
    "--num-layers 4 --global-batch-size 8 --num-experts 4 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-1 --moe-z-loss-coeff 1e-2 --expert-model-parallel-size 2"
)


GANGS = f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel"
MORE = ("--expert-tensor-parallel-size 1", "", "--moe-token-dispatcher-type allgather")
"""Experts over the tensor-parallel ranks, and over two lanes of them."""


@pytest.mark.parametrize(
    "flags",
    [
        *("", f"{CELLS} --sequence-parallel", CONTEXT),
        CELLS,
        EXPERTS,
        f"{EXPERTS} --context-parallel-size 2",
        f"{EXPERTS} --expert-tensor-parallel-size 2",
        *(f"{GANGS} {more}" for more in MORE),
    ],
)
def test_losses_and_gradients_are_those_of_megatron_core_alone(jobs, name, flags):
    """Stock 1F1B, DDP, clipping, optimizer and schedule, from the same weights, in float64."""
    inject = "--odyssey-inject rank=2,step=2,at=backward"
    # Two workers of a stage, of which one can be lost.
    stages = (
        1 if "--expert-model" in flags and ("--tensor-model" in flags or "--expert-tensor" in flags) else 2
    )
    shot = jobs.run(name, ranks=8, stages=stages, flags=f"{flags} {inject}")
    assert shot.exit_code == 0, shot.log[-3000:]
    out, script = jobs.folder / f"{name}.json", CHECKOUT / "tests" / "benchmarks" / "stock_megatron.py"
    jobs.script(
        [
            str(script),
            "--world-size",
            "8",
            "--out",
            str(out),
            *jobs.flags(f"{name}-stock", stages=stages),
            *flags.split(),
        ],
        log=jobs.folder / f"{name}-stock.log",
    )
    stock, steps = json.loads(out.read_text()), shot.run.steps
    assert [step.loss for step in steps] == pytest.approx(stock["loss"], rel=TOLERANCE)
    # A gradient that is a part of its sum hardly shows in a few losses.
    assert [step.grad_norm for step in steps] == pytest.approx(stock["grad_norm"], rel=TOLERANCE)


@pytest.mark.parametrize("policy", ["reroute", "replan"])
def test_bfloat16_with_float32_main_parameters(jobs, name, policy):
    """All holders of a layer keep bitwise equal weights and optimizer state, whatever moved."""
    flags = f"{FLOAT32} --bf16"
    reference = jobs.run(f"{name}-reference", ranks=6, stages=2, flags=flags)
    shot = jobs.run(
        name, ranks=6, stages=2,
        flags=f"{flags} --odyssey-policy {policy} --odyssey-inject rank=1,step=2,at=backward",
    )  # fmt: skip
    assert shot.exit_code == 0, shot.log[-3000:]
    assert_holders_agree(shot)
    ours, theirs = ([step.loss for step in one.run.steps] for one in (shot, reference))
    assert ours[:3] == theirs[:3], "before the failure took effect"
    assert_equal_numbers(shot.run.steps, reference.run.steps, rel=ROUNDING)
