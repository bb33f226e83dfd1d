"""Flags that work alone, together: as recipes have them, losses plain Megatron-LM's while ranks are killed."""

from __future__ import annotations

import pytest

from tests.megatron_lm.jobs import FLOAT32, MOCK, assert_same_lines
from tests.megatron_lm.test_experts import GANGS, MIXTRAL
from tests.megatron_lm.test_flags import INTERLEAVED
from tests.megatron_lm.test_rampup import SAMPLES, WITHOUT

TIED = "--untie-embeddings-and-output-weights"
VIRTUAL = f"{INTERLEAVED} --num-layers-per-virtual-pipeline-stage 1"
CASES = {
    "tied-virtual-stages-over-context-ranks": (
        6, 3, TIED, f"{VIRTUAL} --context-parallel-size 2 --odyssey-redundancy state", "rank=5,step=1,at=backward",
    ),
    "tied-learned-positions-virtual-stages": (
        6, 3, f"{TIED} --position-embedding-type",
        f"{VIRTUAL} --position-embedding-type learned_absolute --use-distributed-optimizer",
        "rank=0,step=1,at=reduce;rank=5,step=2,at=forward",
    ),
    "a-growing-batch-that-is-planned-anew": (
        8, 4, WITHOUT, f"{SAMPLES} --rampup-batch-size 4 4 24 --odyssey-policy replan",
        "rank=4,step=1,at=backward;rank=1,step=3,at=agreement",
    ),
    "tied-depths-ahead-of-a-growing-batch": (
        6, 2, f"{TIED} {WITHOUT}",
        f"{SAMPLES} --rampup-batch-size 6 3 24 --mtp-num-layers 1 --calculate-per-token-loss --clip-grad 0.1",
        "rank=1,step=2,at=weight_grad;rank=2,step=4,at=commit",
    ),
    "tied-gangs-that-save-beside": (
        8, 2, TIED, f"{MIXTRAL} {GANGS} --use-distributed-optimizer --async-save --save {{folder}} --save-interval 2 "
        "--log-params-norm --log-num-zeros-in-grad", "rank=3,step=2,at=checkpoint;rank=6,step=4,at=backward",
    ),
    "tied-cells-over-context-ranks": (
        8, 1, TIED, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 "
        "--use-distributed-optimizer --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "rank=2,step=2,at=backward",
    ),
    "weight-gradients-at-once": (
        8, 4, TIED, "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "rank=1,step=1,at=weight_grad;rank=6,step=2,at=backward;rank=4,step=3,at=weight_grad",
    ),
    "weight-gradients-at-once-of-two-layers": (
        4, 2, TIED, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "rank=1,step=1,at=weight_grad;rank=2,step=3,at=backward",
    ),
    "left-out-in-strict": (
        4, 2, TIED, "--odyssey-strict --use-distributed-optimizer --dataloader-type cyclic --data-parallel-random-init",
        "rank=1,step=2,at=reduce",
    ),
}  # fmt: skip
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(400)]


@pytest.mark.parametrize("case", CASES)
def test_lines_are_those_of_plain_megatron_lm(jobs, name, case):
    ranks, stages, without, flags, inject = CASES[case]
    how = {"ranks": ranks, "stages": stages, "without": without}
    folder = jobs.folder / f"{name}-saved"
    flags = flags if MOCK in flags else f"{MOCK} {flags}"
    plain = flags.replace("--async-save ", "").format(folder=f"{folder}-plain")
    run = jobs.odyssey(name, flags.format(folder=folder), inject=inject, **how)
    assert_same_lines(run, jobs.plain(_without_odyssey(plain), **how), rel=FLOAT32)
    assert "Traceback" not in run.log
    assert {int(one.split(",")[0].removeprefix("rank=")) for one in inject.split(";")} <= set(run.killed)


def _without_odyssey(flags: str) -> str:
    return " ".join(
        f"--{one}" for one in flags.removeprefix("--").split(" --") if not one.startswith("odyssey")
    )
