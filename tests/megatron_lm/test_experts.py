"""Mixtures of experts: losses, auxiliary losses and the biases of the experts are those of plain Megatron-LM."""

from __future__ import annotations

import re

import pytest

from tests.megatron_lm.jobs import FLOAT32, MOCK, assert_same_lines

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
CASES = {
    "mixtral": (6, 2, MIXTRAL, "", "rank=0,step=1,at=backward;rank=5,step=3,at=reduce"),
    "deepseek": (8, 4, DEEPSEEK, "", "rank=7,step=1,at=forward;rank=0,step=3,at=optimizer"),
}  # fmt: skip
_LOSSES = re.compile(r"(\w*(?:load_balancing|z)_loss): ([-+.E\d]+) \|")


@pytest.mark.parametrize("case", CASES)
def test_lines_are_those_of_plain_megatron_lm(jobs, name, case):
    ranks, stages, flags, without, inject = CASES[case]
    flags = f"{MOCK} {flags}"
    run = jobs.odyssey(name, flags, ranks=ranks, stages=stages, inject=inject, without=without)
    plain = jobs.plain(flags, ranks=ranks, stages=stages, without=without)
    assert_same_lines(run, plain)
    assert_same_auxiliary_losses(run, plain)
    cell = 2 if "--tensor-model-parallel-size 2" in flags else 1
    assert len(run.killed) == cell * inject.count("rank="), run.log[-3000:]


def assert_same_auxiliary_losses(run, plain):
    """As Megatron logs them, of each iteration."""
    ours, theirs = (
        [(name, float(value)) for name, value in _LOSSES.findall(one.log)] for one in (run, plain)
    )
    assert theirs
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, mine), (_, other) in zip(
        ours, theirs, strict=True
    ):  # Megatron's z_loss is that of the last replica
        assert mine == pytest.approx(other, rel=0.05 if name == "z_loss" else FLOAT32), name
