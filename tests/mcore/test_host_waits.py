"""Real layers of Megatron's under the rules of CUDA: nothing of the product's makes a healthy step's host wait."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.mcore.forked import asked, printed

pytest.importorskip("torch")

EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_router_enable_expert_bias": True} | {
    "moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1
}  # fmt: skip
OF_EXPERTS = [
    "megatron/core/transformer/moe/moe_utils.py: permute",
    "megatron/core/transformer/moe/token_dispatcher.py: dispatch_postprocess",
]
"""Megatron's own: how many tokens an expert gets."""
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, []),
    "tied": ({"share_embeddings_and_output_weights": True}, []),
    "packed": ({"packed": True}, []),
    "multi-token": ({"mtp_num_layers": 2}, []),
    "context-parallel": ({"context_parallel_size": 2}, []),
    "multi-token, context-parallel": ({"mtp_num_layers": 2, "context_parallel_size": 2}, []),
    "two context-parallel ranks' parts": (
        {"context_parallel_size": 2, "size": 1, "config.calculate_per_token_loss": False}, []
    ),
    "experts": (EXPERTS, OF_EXPERTS),
    "experts that ranks do not divide": (EXPERTS | {"expert_model_parallel_size": 3}, OF_EXPERTS),
}  # fmt: skip
"""Changes of the example's flags, and where the host waits before the agreement."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: Any) -> dict[str, list[list[str]]]:
    cases = {name: changes for name, (changes, _) in asked(request, CASES).items()}
    lines = printed("tests.mcore.host_waits", tmp_path_factory.mktemp("waits"), cases).splitlines()
    return {name: waits for name, *waits in map(json.loads, lines)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_its_device_at_the_agreement_alone(found, case):
    _, megatrons = CASES[case]
    assert found[case] == [megatrons, []]
