"""Unmodified Megatron-LM with Transformer Engine's layers loses ranks: plain Megatron-LM's losses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.jobs import ROUNDING, cases_of
from tests.megatron_lm.jobs import FLOAT32, MOCK, assert_checkpoints_there_and_back, assert_same_lines
from tests.megatron_lm.test_experts import DEEPSEEK, GANGS, MIXTRAL
from tests.megatron_lm.test_shrinking import IN_THE_OTHER, STEPS, THEN, goes_on

pytestmark = pytest.mark.timeout(500)
WITHOUT = (
    "--transformer-impl --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion "
    "--no-rope-fusion --no-persist-layer-norm"
)
"""Flags of the other tests' model that Transformer Engine makes unnecessary: these jobs have Megatron's defaults."""
GROUPS = "--group-query-attention --num-query-groups"
"""Latent attention has none."""
UNFUSED = "--no-gradient-accumulation-fusion --no-bias-swiglu-fusion"
"""What has no float64."""
CELLS = "--tensor-model-parallel-size 2 --sequence-parallel"
GROUPED = "--moe-grouped-gemm --moe-permute-fusion"
KILL = "rank=0,step=1,at=backward;rank=3,step=3,at=reduce"
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 8 --no-rope-fusion"
)
WAYS: dict[str, tuple[int, int, str]] = {
    "defaults": (6, 2, ""),
    "cells": (8, 2, f"{CELLS} --use-distributed-optimizer"),
    "bf16": (6, 2, "--bf16"),
    "norms": (6, 2, "--normalization LayerNorm --apply-layernorm-1p --qk-layernorm"),
    "latent": (6, 2, LATENT),
    "ahead": (6, 2, "--mtp-num-layers 1"),
    "grouped": (6, 2, f"{MIXTRAL} {GROUPED}"),
    "grouped-gangs": (8, 2, f"{DEEPSEEK} {GANGS} {GROUPED}"),
    "moments": (
        6, 2, "--bf16 --use-precision-aware-optimizer --use-distributed-optimizer --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype bf16",
    ),
    "recomputed": (6, 2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
}  # fmt: skip


@pytest.mark.parametrize("way", cases_of(WAYS, ("defaults", "grouped-gangs")))
def test_killed(megatron_jobs, name, way):
    ranks, stages, flags = WAYS[way]
    grouped = GROUPS if way == "latent" else ""
    how: dict[str, Any] = {"ranks": ranks, "stages": stages, "without": f"{WITHOUT} {grouped}"}
    if (
        way == "moments"
    ):  # rounded to 16 bits in another order than Megatron-LM's, which keeps half of each main weight
        plain = megatron_jobs.odyssey(f"{name}-undisturbed", f"{MOCK} {flags}", **how)
    else:
        plain = megatron_jobs.plain(f"{MOCK} {flags}", **how)
    run = megatron_jobs.odyssey(name, f"{MOCK} {flags}", inject=KILL, **how)
    assert_same_lines(run, plain, rel=ROUNDING if "bf16" in flags else FLOAT32)


@pytest.mark.matrix
def test_three_ranks_of_a_gang_go_on(megatron_jobs, name):
    """Of four, with grouped experts."""
    flags = (
        f"{STEPS} {DEEPSEEK} {GROUPED} --expert-model-parallel-size 4 --global-batch-size 16 --moe-router-dtype fp64 "
        f"--moe-router-bias-update-rate 1e-3 --no-rope-fusion {UNFUSED}"
    )
    how: dict[str, Any] = {"ranks": 8, "stages": 1, "without": WITHOUT}
    goes_on(megatron_jobs, name, flags, then=IN_THE_OTHER, left=[4, 5, 6], alone=[4, 5, 6], **how)


@pytest.mark.matrix
def test_half_a_cell_with_latent_attention_goes_on(megatron_jobs, name):
    """All tensor-parallel ranks have its down-projections whole, and each counts them in norms."""
    flags = f"{STEPS} {CELLS} {LATENT} --qk-layernorm {UNFUSED}"
    how: dict[str, Any] = {"ranks": 8, "stages": 2, "without": f"{WITHOUT} {GROUPS}"}
    goes_on(megatron_jobs, name, flags, then=THEN, left=[4], alone=[0, 1, 2, 3, 4], **how)


SAVED = {"whole": "", "slices": "--use-distributed-optimizer", "experts": f"{MIXTRAL} {GROUPED}"}


@pytest.mark.parametrize("way", cases_of(SAVED, ("whole",)))
def test_checkpoints(megatron_jobs, name, way):
    """Transformer Engine's Adam counts its steps in parameter groups; layers have extra state, here an empty one."""
    how: dict[str, Any] = {"ranks": 4, "stages": 2, "without": WITHOUT}
    flags, inject = f"{MOCK} {SAVED[way]}", "rank=1,step=2,at=backward"
    assert_checkpoints_there_and_back(megatron_jobs, name, flags, inject=inject, **how)
