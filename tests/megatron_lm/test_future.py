"""Multi-token prediction (DeepSeek-V3's): blocks at the model's end, which embed with the embedding's own weight."""

from __future__ import annotations

import re

import pytest

from tests.e2e.jobs import cases_of
from tests.megatron_lm.jobs import (
    FLOAT32,
    FLOAT64,
    MOCK,
    MegatronRun,
    assert_same_iterations,
    assert_same_lines,
)
from tests.megatron_lm.test_experts import CELLS, DEEPSEEK, GANGS, assert_same_auxiliary_losses
from tests.megatron_lm.test_flags import INTERLEAVED

AHEAD = "--mtp-num-layers"
CASES = {
    "two-depths": (6, 2, f"{AHEAD} 2", "rank=0,step=1,at=backward;rank=5,step=3,at=reduce"),
    "alone-in-the-last-stage": (
        6, 3, f"{AHEAD} 1 --pipeline-model-parallel-layout Ett|tt|mL",
        "rank=4,step=1,at=forward;rank=0,step=2,at=agreement;rank=3,step=4,at=optimizer",
    ),
    "one-pipeline-is-left": (
        6, 2, f"{AHEAD} 1", "rank=1,step=1,at=forward;rank=3,step=1,at=forward;rank=5,step=2,at=commit;rank=0,step=4,"
        "at=weight_grad",
    ),
    "recomputed": (
        4, 2, f"{AHEAD} 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "rank=3,step=2,at=backward",
    ),
    "shared-out-optimizer": (8, 2, f"{AHEAD} 1 --use-distributed-optimizer", "rank=7,step=2,at=forward"),
    "cells": (
        8, 2, f"{AHEAD} 1 --tensor-model-parallel-size 2 --sequence-parallel", "rank=6,step=2,at=reduce"
    ),
    "context-parallel": (8, 2, f"{AHEAD} 1 --context-parallel-size 2", "rank=6,step=2,at=reduce"),
    "by-tokens": (4, 2, f"{AHEAD} 1 --calculate-per-token-loss", "rank=2,step=2,at=backward"),
    "one-stage": (3, 1, f"{AHEAD} 1", "rank=0,step=1,at=backward"),
    "virtual-stages": (
        6, 3, f"{AHEAD} 1 {INTERLEAVED} --pipeline-model-parallel-layout Et|t|t|t|t|tmL", "rank=5,step=2,at=backward"
    ),
    "fp16": (4, 2, f"{AHEAD} 1 --fp16 --initial-loss-scale 1024", "rank=2,step=2,at=reduce"),
    "bf16": (4, 2, f"{AHEAD} 2 --bf16 --accumulate-allreduce-grads-in-fp32", "rank=3,step=2,at=optimizer"),
}  # fmt: skip


def losses_ahead(run: MegatronRun) -> list[list[float]]:
    """Of each iteration that was printed, those of the tokens further ahead."""
    lines = [line for line in run.log.splitlines() if "lm loss: " in line and "iteration" in line]
    return [[float(one) for one in re.findall(r"mtp_\d loss: ([-+.E\d]+) ", line)] for line in lines]


def assert_same_ahead(run: MegatronRun, plain: MegatronRun, *, rel: float = FLOAT32) -> None:
    ours, theirs = losses_ahead(run), losses_ahead(plain)
    assert len(ours) == len(theirs) == sum(map(bool, theirs)) > 0, plain.log[-3000:]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=rel)


ALWAYS = {"two-depths", "alone-in-the-last-stage", "by-bucket", "gangs"}
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("case", cases_of(CASES, ALWAYS))
def test_lines_are_those_of_plain_megatron_lm(jobs, name, case):
    ranks, stages, flags, inject = CASES[case]
    run = jobs.odyssey(name, f"{MOCK} {flags}", ranks=ranks, stages=stages, inject=inject)
    plain = jobs.plain(f"{MOCK} {flags}", ranks=ranks, stages=stages)
    rel = 2e-3 if case in ("fp16", "bf16") else FLOAT32
    assert_same_lines(run, plain, rel=rel)
    assert_same_ahead(run, plain, rel=rel)
    assert len(run.killed) == (2 if case in ("cells", "context-parallel") else 1) * inject.count("rank="), (
        run.log[-3000:]
    )


def test_float64_to_the_last_digits(jobs, name):
    """Whenever a rank dies, and with what is drawn for dropout, wherever embedding and head lie then."""
    flags = f"{MOCK} {AHEAD} 2 --hidden-dropout 0.1 --odyssey-float64 on"
    inject = "rank=1,step=1,at=weight_grad;rank=5,step=2,at=forward;rank=2,step=4,at=commit"
    how = {"ranks": 6, "stages": 2, "without": "--hidden-dropout"}
    undisturbed = jobs.odyssey(f"{name}-undisturbed", flags, **how)
    shot = jobs.odyssey(name, flags, inject=inject, **how)
    assert_same_lines(shot, undisturbed, rel=FLOAT64)
    assert_same_ahead(shot, undisturbed)
    assert shot.run.steps[0].losses.keys() == {"lm loss", "mtp_1 loss", "mtp_2 loss"}
    assert shot.killed == [1, 2, 5]


SAVES = {
    "every-holder": (6, 2, ""),
    "by-bucket": (4, 2, "--use-distributed-optimizer"),
    "by-parameter": (4, 2, "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --bf16"),
    "cells": (8, 2, "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel"),
    "one-stage": (2, 1, "--use-distributed-optimizer"),
}


@pytest.mark.parametrize("case", cases_of(SAVES, ALWAYS))
def test_checkpoints_come_from_plain_megatron_lm_and_go_there(jobs, name, case):
    """Saved by a plain job, gone on with in another layout and saved by survivors, gone on with by a plain job."""
    ranks, stages, flags = SAVES[case]
    folders = [jobs.folder / f"{name}-{which}" for which in ("plain", "ours")]
    usual = f"{MOCK} {AHEAD} 1 {flags}"
    saving = "--save-interval 2 --exit-interval {}"
    jobs.plain(f"{usual} --save {folders[0]} {saving.format(2)}", ranks=ranks, stages=stages)
    whole = jobs.plain(usual, ranks=ranks, stages=stages)
    run = jobs.odyssey(
        f"{name}-on", f"{usual} --load {folders[0]} --save {folders[1]} {saving.format(4)} --odyssey-redundancy state",
        ranks=8 if case == "cells" else 4, stages=4, inject="rank=3,step=2,at=backward;rank=0,step=3,at=reduce",
    )  # fmt: skip
    assert run.exit_code == 0, run.log[-3000:]
    assert {0, 3} <= set(run.killed)
    last = jobs.plain(f"{usual} --load {folders[1]}", ranks=ranks, stages=stages)
    rel = 2e-3 if "bf16" in flags else FLOAT32
    assert_same_iterations(run.iterations[:1], whole.iterations[2:3], rel=rel)
    assert_same_iterations(last.iterations[:1], whole.iterations[4:5], rel=rel)
    assert losses_ahead(run)[0] == pytest.approx(losses_ahead(whole)[2], rel=rel)
    assert losses_ahead(last)[0] == pytest.approx(losses_ahead(whole)[4], rel=rel)


WITH_EXPERTS = {"alone": "", "gangs": GANGS, "cells": CELLS}


@pytest.mark.parametrize("case", cases_of(WITH_EXPERTS, ALWAYS))
def test_experts_of_the_blocks_further_ahead(jobs, name, case):
    """As DeepSeek-V3 has them: their auxiliary losses, and the biases of their experts, which decide from step to step
    where tokens go.
    """
    more = WITH_EXPERTS[case]
    flags, ranks = f"{MOCK} {AHEAD} 2 {DEEPSEEK} --moe-z-loss-coeff 1e-2 {more}", 8 if more else 6
    inject = "rank=0,step=1,at=backward;rank=5,step=3,at=reduce"
    run = jobs.odyssey(name, flags, ranks=ranks, stages=2, inject=inject)
    plain = jobs.plain(flags, ranks=ranks, stages=2)
    assert_same_lines(run, plain)
    assert_same_ahead(run, plain)
    assert_same_auxiliary_losses(run, plain)
    assert len(run.killed) == (4 if more else 2)


@pytest.mark.matrix
def test_a_rank_comes_back_to_the_head(jobs, name):
    flags = (
        f"{MOCK} {AHEAD} 1 --train-iters 60 --eval-interval 100 --odyssey-float64 on --odyssey-respawn 1 "
        "--odyssey-policy replan"
    )
    how = {"ranks": 4, "stages": 2, "without": "--train-iters --eval-interval"}
    undisturbed = jobs.odyssey(f"{name}-undisturbed", flags, **how)
    shot = jobs.odyssey(name, flags, inject="rank=3,step=2,at=backward;rank=0,step=9,at=reduce", **how)
    assert_same_lines(shot, undisturbed, rel=FLOAT64)
    assert_same_ahead(shot, undisturbed)
    assert shot.killed == [0, 3]
    assert len(shot.named("rank_joined")) >= 2, shot.log[-3000:]


@pytest.mark.matrix
def test_newer_versions(other_jobs, name):
    """From 0.17 on the block is called otherwise; 0.19 counts how many tokens were right, too."""
    inject = "rank=0,step=1,at=backward;rank=5,step=3,at=reduce"
    run = other_jobs.odyssey(name, f"{MOCK} {AHEAD} 2", ranks=6, stages=2, inject=inject)
    plain = other_jobs.plain(f"{MOCK} {AHEAD} 2", ranks=6, stages=2)
    assert_same_lines(run, plain)
    assert_same_ahead(run, plain)
    assert len(run.killed) == 2


def test_blocks_apart_from_the_loss_are_refused(jobs, name):
    flags = f"{MOCK} {AHEAD} 1 --pipeline-model-parallel-layout Ettt|tm|L"
    run = jobs.odyssey(name, flags, ranks=3, stages=3)
    assert run.exit_code == 2
    assert "(m) are part of the head, and go with the loss (L)" in run.log
