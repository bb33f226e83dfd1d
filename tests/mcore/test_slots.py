"""A gang whose ranks do not divide its experts is a whole one: real Megatron modules, dispatchers and sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.upstream import smaller
from tests.mcore.forked import asked, printed

torch = pytest.importorskip("torch")

EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_router_enable_expert_bias": False}
ROUTED = {
    "moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 1e-1, "moe_router_load_balancing_type": "aux_loss",
    "moe_z_loss_coeff": 1e-2, "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
WHOLE = {"granularity": "full", "method": "uniform", "num_layers": 1}
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "alltoall": ([4, 3], EXPERTS | ROUTED),
    "allgather": ([4, 3], EXPERTS | ROUTED | {"moe_token_dispatcher_type": "allgather"}),
    "one expert more": ([3, 4], EXPERTS | {"num_experts": 9, "config.add_bias_linear": True}),
    "three of four with one each": ([4, 3], EXPERTS | {"num_experts": 4}),
    "dropped tokens": ([3], EXPERTS | {"moe_expert_capacity_factor": 1.0}),
    "recomputed": ([3], EXPERTS | ROUTED | {f"config.recompute_{name}": value for name, value in WHOLE.items()}),
    "cells, alltoall": (
        [2], EXPERTS | ROUTED | {"num_experts": 7, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "cells, allgather": (
        [2],
        EXPERTS | {"num_experts": 7, "tensor_model_parallel_size": 2, "sequence_parallel": True}
        | {"moe_token_dispatcher_type": "allgather"},
    ),
}  # fmt: skip
"""Lanes of gangs beside those of one, and changes of the example's flags."""


@pytest.fixture(scope="module")
def passed(request: pytest.FixtureRequest, tmp_path_factory: Any) -> str:
    """What ``tests/mcore/gang.py`` prints."""
    return printed("tests.mcore.gang", tmp_path_factory.mktemp("gangs"), asked(request, CASES))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_experts_that_ranks_do_not_divide(passed, case):
    assert f"{case}: ok" in passed.splitlines()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"moe_pad_expert_input_to_capacity": True}, "filled up to their capacity"),
        ({"moe_token_dispatcher_type": "flex"}, "flex"),
    ],
)
def test_what_takes_equally_many_is_refused_before_anything_is_built(changes, why):
    from odyssey_megatron.mcore.model import slots

    plain = {"moe_pad_expert_input_to_capacity": False, "moe_token_dispatcher_type": "alltoall"}
    config = SimpleNamespace(num_moe_experts=8, **plain)
    groups = SimpleNamespace(ep=SimpleNamespace(size=lambda: 3))
    assert not smaller.why_even(config)
    vars(config).update(changes)
    with pytest.raises(ConfigError, match=f"8 experts on 3 expert-parallel ranks.*{why}.*Use"):
        slots.built(config, groups, lambda: pytest.fail("it was built"))
    groups.ep.size = lambda: 4
    assert slots.built(config, groups, lambda: "built") == "built"
