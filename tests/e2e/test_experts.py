"""Mixtures of experts: a run with failures equals one without, the biases of the experts among the weights."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.jobs import BFLOAT16, LONG, assert_equal_runs, run_case
from tests.e2e.test_exactness import ALONE, CASES, SHARDED
from tests.e2e.test_rejoin import ONCE, members

pytestmark = pytest.mark.matrix

MIXTRAL = (
    "--num-experts 4 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-1 --moe-z-loss-coeff 1e-2 "
    "--moe-input-jitter-eps 1e-2"
)
DEEPSEEK = (
    "--num-experts 4 --moe-layer-freq 2 --moe-shared-expert-intermediate-size 16 --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2"
)
MODELS = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK}
MORE = {
    "redone": (
        (8, 4), "auto", "rank=7,step=2,at=backward;rank=0,step=4,at=weight_grad", "--odyssey-interrupted-step redo",
    ),
    "cells": (
        (8, 2), "auto", "rank=0,step=1,at=backward;rank=6,step=3,at=reduce",
        "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "ran-ahead": ((4, 4), "auto", "rank=3,step=2,at=backward", "--odyssey-redundancy compute"),
    "on-the-host": (
        (8, 2), "auto", "rank=0,step=1,at=commit;rank=5,step=3,at=param_gather",
        "--use-distributed-optimizer --odyssey-spare-state host",
    ),
    "dropped-tokens": ((6, 2), "auto", "rank=1,step=1,at=forward", "--moe-expert-capacity-factor 1.25"),
    "tied": ((6, 2), "replan", "rank=0,step=1,at=backward", "--share-embeddings-and-output-weights"),
}  # fmt: skip


def _each(cases):
    return [pytest.param(model, case, id=f"{model}-{case}") for model in MODELS for case in cases]


@pytest.mark.parametrize(("model", "case"), _each(CASES))
def test_experts_a_run_with_failures_equals_one_without(jobs, undisturbed, name, model, case):
    shot = run_case(jobs, name, CASES[case], MODELS[model], undisturbed(MODELS[model]))
    biases = [
        one for layer in shot.weights().values() for key, one in layer.items() if key.endswith("expert_bias")
    ]
    assert len(biases) == (3 if model == "deepseek" else 0)
    assert all(torch.count_nonzero(one) for one in biases), "nothing was balanced"


@pytest.mark.parametrize(("model", "case"), _each(SHARDED))
def test_experts_no_rank_takes_optimizer_state_with_it(jobs, undisturbed, name, model, case):
    flags = f"{MODELS[model]} --use-distributed-optimizer"
    run_case(jobs, name, SHARDED[case], flags, undisturbed(MODELS[model]))


@pytest.mark.parametrize(("model", "case"), _each(MORE))
def test_experts_with_other_flags(jobs, undisturbed, name, model, case):
    *how, more = MORE[case]
    same = more if any(flag in more for flag in ("tensor", "share", "capacity")) else ""
    ranks, stages = (4, 2) if "tensor" in more else (2, 1)
    reference = undisturbed(f"{MODELS[model]} {same}".strip(), ranks=ranks, stages=stages)
    run_case(jobs, name, how, f"{MODELS[model]} {more}", reference)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("victim", [0, 3, 7])
def test_experts_a_rank_comes_back(jobs, undisturbed, name, model, victim):
    flags = f"{MODELS[model]} {LONG}"
    inject = f"rank={victim},step=2,at=backward"
    shot = jobs.run(
        name, ranks=8, stages=4, flags=f"{flags} {ONCE} --odyssey-policy replan --odyssey-inject {inject}"
    )
    assert_equal_runs(shot, undisturbed(flags), kills=1)
    assert members(shot)[0] == members(shot)[-1] == 8


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", ALONE)
def test_experts_a_shadow_takes_over_without_data_parallelism(jobs, undisturbed, name, model, case):
    flags = f"{MODELS[model]} --odyssey-redundancy state"
    run_case(jobs, name, ALONE[case], flags, undisturbed(MODELS[model]))


@pytest.mark.parametrize("model", MODELS)
def test_experts_in_16_bits(jobs, undisturbed, name, model):
    model_in_16_bits = f"{BFLOAT16} {MODELS[model]}"
    flags = f"--use-distributed-optimizer {model_in_16_bits}"
    run_case(jobs, name, SHARDED["in-a-row"], flags, undisturbed(model_in_16_bits), alike=True)
