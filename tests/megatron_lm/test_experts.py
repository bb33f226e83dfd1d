"""Mixtures of experts: losses, auxiliary losses and the biases of the experts are those of plain Megatron-LM."""

from __future__ import annotations

import re

import pytest
import torch

from tests.e2e.jobs import cases_of
from tests.launch.jobserver import CHECKOUT
from tests.megatron_lm.jobs import (
    FLOAT32,
    FLOAT64,
    MOCK,
    assert_same_iterations,
    assert_same_lines,
    behind_a_load,
    checkpoint,
)
from tests.megatron_lm.test_flags import INTERLEAVED

MIXTRAL = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-1 "
    "--moe-z-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall"
)
DEEPSEEK = (
    "--num-experts 8 --moe-layer-freq ([0]*1+[1]*3) --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 "
    "--moe-router-topk 2 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-1 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 1e-1 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32"
)
GANGS = "--expert-model-parallel-size 2"
"""Each of two ranks, which have a microbatch of their own."""
CELLS = "--tensor-model-parallel-size 2 --sequence-parallel"
CASES = {
    "mixtral": (6, 2, MIXTRAL, "rank=0,step=1,at=backward;rank=5,step=3,at=reduce"),
    "deepseek": (8, 4, DEEPSEEK, "rank=7,step=1,at=forward;rank=0,step=3,at=optimizer"),
    "mixtral-cells": (8, 2, f"{MIXTRAL} {CELLS}", "rank=0,step=1,at=backward;rank=6,step=3,at=reduce"),
    "deepseek-cells": (8, 2, f"{DEEPSEEK} {CELLS}", "rank=3,step=1,at=forward;rank=6,step=3,at=commit"),
    "sinkhorn": (
        4, 2, "--num-experts 4 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn "
        "--moe-token-dispatcher-type allgather", "rank=1,step=1,at=weight_grad",
    ),
    "recomputed": (
        6, 2, f"{DEEPSEEK} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "rank=0,step=1,at=backward;rank=4,step=3,at=agreement",
    ),
    "recomputed-experts": (
        6, 2, f"{DEEPSEEK} --recompute-granularity selective --recompute-modules moe",
        "rank=1,step=1,at=weight_grad;rank=4,step=3,at=reduce",
    ),
    "per-token": (
        6, 2, f"{DEEPSEEK} --moe-z-loss-coeff 1e-2 --calculate-per-token-loss", "rank=5,step=2,at=backward",
    ),
    "dropped-tokens": (
        6, 2, f"{MIXTRAL} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
        "rank=3,step=2,at=optimizer",
    ),
    "shared-out-optimizer": (
        8, 2, f"{DEEPSEEK} --use-distributed-optimizer", "rank=0,step=1,at=optimizer;rank=7,step=3,at=commit",
    ),
    "mixtral-gangs": (
        4, 1, f"{MIXTRAL} {GANGS} --eval-iters 3", "rank=1,step=2,at=backward",
    ),
    "gangs-of-cells": (8, 1, f"{MIXTRAL} {GANGS} {CELLS}", "rank=2,step=2,at=backward"),
    "deepseek-on-cells": (
        8, 2, f"{DEEPSEEK} {GANGS} {CELLS} --expert-tensor-parallel-size 1",
        "rank=3,step=1,at=forward;rank=6,step=3,at=commit",
    ),
    "deepseek-gangs": (
        8, 2, f"{DEEPSEEK} {GANGS}", "rank=3,step=1,at=backward;rank=6,step=3,at=evaluate",
    ),
    "virtual-stages": (
        6, 3, f"{MIXTRAL} --num-layers-per-virtual-pipeline-stage 1 {INTERLEAVED}", "rank=5,step=2,at=backward",
    ),
}  # fmt: skip
ALWAYS = {"mixtral", "deepseek-gangs"}
pytestmark = pytest.mark.timeout(300)
_LOSSES = re.compile(r"(\w*(?:load_balancing|z)_loss): ([-+.E\d]+) \|")


@pytest.mark.parametrize("case", cases_of(CASES, ALWAYS))
def test_lines_of_experts_are_those_of_plain_megatron_lm(jobs, name, case):
    ranks, stages, flags, inject = CASES[case]
    flags = f"{MOCK} {flags}"  # in 16 bits rounding decides now and then to which expert a token goes
    run = jobs.odyssey(name, flags, ranks=ranks, stages=stages, inject=inject)
    plain = jobs.plain(flags, ranks=ranks, stages=stages)
    assert_same_lines(run, plain)
    assert_same_auxiliary_losses(run, plain)
    cell = 4 if case == "gangs-of-cells" else 2 if "-parallel-size 2" in flags else 1
    assert len(run.killed) == cell * inject.count("rank="), run.log[-3000:]


def assert_same_auxiliary_losses(run, plain):
    """As Megatron logs them, of each iteration."""
    ours, theirs = (
        [(name, float(value)) for name, value in _LOSSES.findall(one.log)] for one in (run, plain)
    )
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, mine), (_, other) in zip(
        ours, theirs, strict=True
    ):  # Megatron's z_loss is that of the last replica
        assert mine == pytest.approx(other, rel=0.1 if name == "z_loss" else FLOAT32), name


@pytest.mark.matrix
@pytest.mark.parametrize("gangs", ["", GANGS], ids=["alone", "gangs"])
def test_experts_of_newer_versions(other_jobs, name, gangs):
    """They keep auxiliary losses elsewhere."""
    flags, ranks = f"{MOCK} {DEEPSEEK} --moe-z-loss-coeff 1e-2 {gangs}", 8 if gangs else 6
    inject = "rank=0,step=1,at=backward;rank=5,step=3,at=reduce"
    run = other_jobs.odyssey(name, flags, ranks=ranks, stages=2, inject=inject)
    plain = other_jobs.plain(flags, ranks=ranks, stages=2)
    assert_same_lines(run, plain)
    assert_same_auxiliary_losses(run, plain)
    assert len(run.killed) == (4 if gangs else 2)


def test_shared_experts_that_overlap_messages_are_cut_off_in_a_gang_that_lives(other_jobs, name):
    """From core_v0.18.0 on they insist on the order in which they are called."""
    flags = f"{MOCK} {DEEPSEEK} {GANGS} --moe-token-dispatcher-type alltoall --moe-shared-expert-overlap"
    script = str(CHECKOUT / "tests" / "megatron_lm" / "dispatching.py")
    run = other_jobs.odyssey(name, flags, ranks=4, stages=1, before=[script, "10"])
    assert_same_lines(run, other_jobs.plain(flags, ranks=4, stages=1))
    assert run.killed == [2, 3]


DRAWN = {
    "alone": (6, 2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "gangs": (8, 2, GANGS),
    "cells": (8, 2, CELLS),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", DRAWN)
def test_routers_that_draw_go_on_with_what_they_would_have_drawn(jobs, name, case):
    """With --moe-router-force-load-balancing, as benchmarks do: by (seed, step, microbatch, layer)."""
    ranks, stages, more = DRAWN[case]
    flags = f"{MOCK} {MIXTRAL} --moe-router-force-load-balancing {more} --odyssey-float64 on"
    how = {"ranks": ranks, "stages": stages}
    whole = jobs.odyssey(f"{name}-whole", flags, **how)
    run = jobs.odyssey(name, flags, **how, inject="rank=0,step=1,at=backward;rank=5,step=3,at=reduce")
    assert_same_lines(run, whole, rel=FLOAT64)
    assert {0, 5} <= set(run.killed)
    routed = jobs.odyssey(f"{name}-routed", flags.replace("--moe-router-force-load-balancing", ""), **how)
    assert [one.loss for one in routed.iterations] != [one.loss for one in whole.iterations]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "drawn", ["--moe-input-jitter-eps 0.05", "--moe-router-force-load-balancing"], ids=["jitter", "forced"]
)
def test_routers_that_draw_go_on_behind_a_checkpoint(jobs, name, drawn):
    """In evaluations, too."""
    flags = f"{MOCK} {MIXTRAL} {drawn} --odyssey-float64 on"
    saves, how = f"--save {jobs.folder / name}-saved --save-interval 3", {"ranks": 4, "stages": 2}
    whole = jobs.odyssey(f"{name}-whole", f"{flags} {saves}", **how)
    run = jobs.odyssey(name, f"{flags} --load {jobs.folder / name}-saved --ckpt-step 3", **how)
    assert run.exit_code == 0, run.log[-3000:]
    assert_same_iterations(run.iterations, behind_a_load(whole.iterations[3:]), rel=FLOAT64)
    assert run.evaluations == whole.evaluations[1:]
    assert len(run.evaluations) > 1


SAVES = {
    "every-holder": (6, 2, ""),
    "by-bucket": (4, 2, "--use-distributed-optimizer"),
    "by-parameter": (4, 2, "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --bf16"),
    "cells": (8, 2, f"--use-distributed-optimizer {CELLS} --bf16"),
    "gangs": (4, 2, GANGS),
    "gangs-by-bucket": (4, 2, f"{GANGS} --use-distributed-optimizer"),
    "gangs-by-parameter": (4, 2, f"{GANGS} --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=() if one == "every-holder" else pytest.mark.matrix) for one in SAVES]
)
def test_experts_checkpoints_come_from_plain_megatron_lm_and_go_there(jobs, name, case):
    """Saved by a plain job, gone on with in another layout and saved by survivors, gone on with by a plain job; the
    biases of the experts, too.
    """
    ranks, stages, flags = SAVES[case]
    folders = [jobs.folder / f"{name}-{which}" for which in ("plain", "ours", "last")]
    usual = f"{MOCK} {DEEPSEEK} {flags}"
    saving = "--save-interval 2 --exit-interval {}"
    jobs.plain(f"{usual} --save {folders[0]} {saving.format(2)}", ranks=ranks, stages=stages)
    whole = jobs.plain(f"{usual} --save {folders[2]} --save-interval 4", ranks=ranks, stages=stages)
    run = jobs.odyssey(
        f"{name}-on", f"{usual} --load {folders[0]} --save {folders[1]} {saving.format(4)} --odyssey-redundancy state",
        ranks=8 if "-parallel-size 2" in flags else 4, stages=4,
        inject="rank=3,step=2,at=backward;rank=0,step=3,at=reduce",
    )  # fmt: skip
    assert run.exit_code == 0, run.log[-3000:]
    assert {0, 3} <= set(run.killed)
    last = jobs.plain(f"{usual} --load {folders[1]}", ranks=ranks, stages=stages)
    rel = 2e-3 if "bf16" in flags else FLOAT32
    assert_same_iterations(run.iterations[:1], whole.iterations[2:3], rel=rel)
    assert_same_iterations(last.iterations[:1], whole.iterations[4:5], rel=rel)
    mine, other = (checkpoint(folder, 4) for folder in folders[1:])
    biases = [key for key in other if key.endswith("expert_bias")]
    assert len(biases) == 3
    if "bf16" not in flags:  # there plain Megatron-LM counts tokens in 16 bits
        assert all(torch.equal(mine[key], other[key]) for key in biases)
