"""A smaller cell, whose ranks have several parts of each layer, is the whole cell: real Megatron modules, real sums."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from odyssey_megatron.upstream import smaller
from tests.mcore.conftest import MODEL
from tests.mcore.forked import asked, printed

torch = pytest.importorskip("torch")

FOUR = [4, 2, 1]
WIDE = {"num_attention_heads": 8, "num_query_groups": 4}
EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 1e-1,
    "moe_router_load_balancing_type": "aux_loss", "moe_z_loss_coeff": 1e-2, "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
RECOMPUTED = {"granularity": "full", "method": "uniform", "num_layers": 1}
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "grouped": (FOUR, WIDE),
    "fewer groups than ranks": (FOUR, WIDE | {"num_query_groups": 2}),
    "as many groups as heads": (FOUR, WIDE | {"num_query_groups": 8}),
    "biases": (FOUR, WIDE | {"config.add_bias_linear": True}),
    "sequence parallel": (FOUR, WIDE | {"sequence_parallel": True, "qk_layernorm": True}),
    "tied": (FOUR, WIDE | {"share_embeddings_and_output_weights": True}),
    "16 bits": (FOUR, WIDE | {"bf16": True}),
    "plain MLP, SGD": (FOUR, WIDE | {"config.gated_linear_unit": False, "optimizer": "sgd"}),
    "two ranks": ([2, 1], {}),
    "gangs": (FOUR, EXPERTS | {"expert_model_parallel_size": 4, "num_experts": 8}),
    "gangs of twelve experts each": (
        [2, 1],
        EXPERTS
        | {"expert_model_parallel_size": 2, "num_experts": 24, "moe_shared_expert_intermediate_size": None}
        | {"config.add_bias_linear": True},
    ),
    "uneven gangs": ([4, 3, 2, 1], EXPERTS | {"expert_model_parallel_size": 4, "num_experts": 8}),
    "uneven gangs whose experts have no biases": (
        [4, 3],
        EXPERTS | {"expert_model_parallel_size": 4, "num_experts": 8, "moe_router_enable_expert_bias": False},
    ),
    "uneven gangs of twelve experts each": (
        [4, 3],
        EXPERTS
        | {"expert_model_parallel_size": 4, "num_experts": 48, "moe_router_topk": 4}
        | {"moe_shared_expert_intermediate_size": None, "config.add_bias_linear": True},
    ),
    "uneven gangs of cells, all gathered and recomputed": (
        [6, 4],
        EXPERTS
        | {"expert_model_parallel_size": 3, "num_experts": 6, "sequence_parallel": True}
        | {"moe_token_dispatcher_type": "allgather"}
        | {
            "config.recompute_granularity": "full",
            "config.recompute_method": "uniform",
            "config.recompute_num_layers": 1,
        },
    ),
    "uneven gangs that predict two tokens": (
        [4, 3],
        EXPERTS | {"expert_model_parallel_size": 4, "num_experts": 8, "mtp_num_layers": 2},
    ),
    "gangs whose routers draw": (
        [4, 3, 2],
        EXPERTS
        | {"expert_model_parallel_size": 4, "num_experts": 8, "config.moe_router_force_load_balancing": True},
    ),
    "gangs of cells": ([4, 2], EXPERTS | {"expert_model_parallel_size": 2, "sequence_parallel": True}),
}
"""Sizes of cells, and changes of the example's flags."""


@pytest.fixture(scope="module")
def passed(request: pytest.FixtureRequest, tmp_path_factory: Any) -> str:
    """What ``tests/mcore/cell.py`` prints."""
    return printed("tests.mcore.cell", tmp_path_factory.mktemp("cells"), asked(request, CASES))


GANGS = {"num_experts": 4, "expert_model_parallel_size": 2, "moe_router_enable_expert_bias": False}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"num_query_groups": 1, "qk_layernorm": True, "sequence_parallel": True}, ""),
        ({"tensor_model_parallel_size": 1}, "neither tensor, context nor expert"),
        (GANGS, ""),
        (GANGS | {"tensor_model_parallel_size": 1, "mtp_num_layers": 1, "hidden_dropout": 0.1}, ""),
        (GANGS | {"context_parallel_size": 2}, "experts"),
        (GANGS | {"moe_expert_capacity_factor": 1.0}, ""),
        (GANGS | {"expert_tensor_parallel_size": 1}, "--expert-tensor-parallel-size"),
        ({"tensor_model_parallel_size": 1, "context_parallel_size": 2}, ""),
        ({"num_experts": 4, "moe_router_enable_expert_bias": False}, "experts"),
        ({"mtp_num_layers": 1}, "several tokens"),
        ({"attention_dropout": 0.1}, "draws numbers"),
        ({"hidden_dropout": 0.1}, "draws numbers"),
    ],
)
def test_why_cells_are_kept_whole(megatron, changes, why):
    import pretrain_llama

    flags = {**MODEL, "tensor_model_parallel_size": 2, **changes}
    config = pretrain_llama.transformer_config(argparse.Namespace(**flags), torch.float64)
    found = smaller.kept_whole(config).whole
    assert why in found
    assert bool(found) == bool(why)
    of_flags = smaller.of_flags(flags)
    assert of_flags.whole == found, "without Megatron"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"num_experts": 2}, "no more experts than ranks"),
        ({"config.moe_grouped_gemm": True}, ""),
        ({"mtp_num_layers": 1}, ""),
        ({"config.log_max_attention_logit": True}, "attention logits"),
        ({"config.moe_permute_fusion": True}, ""),
    ],
)
def test_why_gangs_have_as_many_ranks_as_divide_a_whole_one(megatron, changes, why):
    import pretrain_llama

    flags = {name: value for name, value in changes.items() if "." not in name}
    flags = {**MODEL, **GANGS, **flags}
    config = pretrain_llama.transformer_config(argparse.Namespace(**flags), torch.float64)
    for name in changes.keys() - flags.keys():
        setattr(config, name.partition(".")[2], changes[name])
    found = smaller.kept_whole(config)
    assert not found.whole
    assert why in found.even
    assert bool(found.even) == bool(why)
    given = {name.removeprefix("config."): value for name, value in (flags | changes).items()}
    assert smaller.of_flags(given).even == found.even, "without Megatron"


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [({}, True), (GANGS, False), (GANGS | {"context_parallel_size": 2}, True)],
)
def test_a_lane_has_all_of_its_packed_sequences(megatron, changes, is_kept):
    import pretrain_llama

    flags = {**MODEL, "tensor_model_parallel_size": 2, **changes}
    config = pretrain_llama.transformer_config(argparse.Namespace(**flags), torch.float64)
    assert ("packed" in smaller.kept_whole(config, is_packed=True).whole) == is_kept


def test_fewer_context_ranks_may_go_on_where_layers_are_kept_whole(megatron):
    import pretrain_llama

    flags = {**MODEL, "tensor_model_parallel_size": 2, "context_parallel_size": 2}
    config = pretrain_llama.transformer_config(argparse.Namespace(**flags), torch.float64)
    config.multi_latent_attention = True
    why = "it has multi-latent attention without --sequence-parallel"
    assert smaller.kept_whole(config)[:2] == ("", why)
    config.context_parallel_size = 1
    assert smaller.kept_whole(config).whole == why
    config.sequence_parallel = True
    assert smaller.kept_whole(config)[:2] == ("", "")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_several_ranks_are_one(passed, case):
    assert f"{case}: ok" in passed.splitlines()
