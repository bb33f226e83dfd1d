"""The tests of Transformer Engine's layers that GPUs run, and cells of such layers: its own modules, on a CPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.launch.jobserver import CHECKOUT
from tests.mcore.forked import asked, printed
from tests.mcore.test_parts import CASES, EXPERTS, FOUR, WIDE

GROUPED = EXPERTS | {"config.moe_grouped_gemm": True, "expert_model_parallel_size": 4}
OF_GROUPS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "grouped gangs": ([4, 3, 2, 1], GROUPED | {"num_experts": 8, "config.moe_permute_fusion": True}),
    "grouped gangs of twelve experts each": (
        [4, 3],
        GROUPED
        | {"num_experts": 48, "moe_router_topk": 4, "moe_shared_expert_intermediate_size": None}
        | {"config.add_bias_linear": True},
    ),
}
"""Of these a rank has its experts in two products of several weights each (``--moe-grouped-gemm``)."""
LATENT = {
    "num_attention_heads": 8, "num_query_groups": 8, "sequence_parallel": True, "qk_layernorm": True,
    "latent": {
        "q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8,
        "rope_type": "rope",
    },
}  # fmt: skip
OF_LATENT: dict[str, tuple[list[int], dict[str, Any]]] = {
    "latent attention": (FOUR, WIDE | LATENT),
    "gangs of cells with latent attention": ([4, 2], EXPERTS | LATENT | {"expert_model_parallel_size": 2}),
}
"""Megatron's multi-latent attention asks for what only Transformer Engine's attention takes (``k_channels``)."""
ALL = CASES | OF_GROUPS | OF_LATENT
pytestmark = pytest.mark.timeout(300)


def test_what_gpus_run():
    """Without fp8, which has no kernels on a CPU."""
    command = "-m pytest -q -p tests.te.on_cpu -m gpu tests/mcore/test_te_gpu.py".split()
    ran = subprocess.run(
        [sys.executable, *command], cwd=CHECKOUT, capture_output=True, text=True, timeout=200
    )
    assert "8 passed, 3 skipped" in ran.stdout, ran.stdout[-4000:]


@pytest.fixture(scope="module")
def passed(request: pytest.FixtureRequest, tmp_path_factory: Any) -> str:
    """What ``tests/te/cell.py`` prints."""
    return printed("tests.te.cell", tmp_path_factory.mktemp("cells"), asked(request, ALL))


@pytest.mark.matrix
@pytest.mark.parametrize("case", ALL)
def test_several_ranks_are_one(passed, case):
    assert f"{case}: ok" in passed.splitlines()
