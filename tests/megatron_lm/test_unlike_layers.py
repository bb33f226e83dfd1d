"""Layers that are not alike (Nemotron's): some without attention, some of one product, MLPs of any size."""

from __future__ import annotations

import json

import pytest

from tests.megatron_lm.jobs import FLOAT64, MOCK, assert_checkpoints_there_and_back, assert_same_lines

pytestmark = pytest.mark.timeout(300)

WITHOUT = "--num-layers --num-query-groups --ffn-hidden-size"
NO_ATTENTION = {"no_op": True, "replace_with_linear": False, "n_heads_in_group": None}
ONE_PRODUCT = {"no_op": False, "replace_with_linear": True, "n_heads_in_group": None}
USUAL = {"no_op": False, "replace_with_linear": False, "n_heads_in_group": 2}
LAYERS = [
    (USUAL, 8.0), (NO_ATTENTION, 1.0), (USUAL, None), (ONE_PRODUCT, 16.0), (USUAL, 8.0), (USUAL, 4.0),
]  # fmt: skip


@pytest.fixture(scope="module")
def unlike(jobs):
    """The flags of such a model, of six layers."""
    nothing = {"no_op": True, "replace_with_linear": False, "ffn_mult": None}
    path = jobs.folder / "layers.json"
    path.write_text(
        json.dumps(
            {
                "hidden_act": "silu", "num_hidden_layers": len(LAYERS), "hidden_size": 32, "num_attention_heads": 4,
                "tie_word_embeddings": False, "rope_theta": 10000, "rope_scaling": {"factor": 8.0},
                "block_configs": [
                    {"attention": own, "ffn": {**nothing, "no_op": False, "ffn_mult": mult} if mult else nothing}
                    for own, mult in LAYERS
                ],
            }
        )
    )  # fmt: skip
    return (
        f"{MOCK} --num-layers {len(LAYERS)} --num-query-groups 2 --use-rotary-position-embeddings --use-rope-scaling "
        f"--rope-scaling-factor 8.0 --heterogeneous-layers-config-path {path}"
    )


@pytest.mark.parametrize(
    ("stages", "flags", "inject"),
    [
        (2, "", "rank=2,step=1,at=backward;rank=1,step=3,at=optimizer"),
        pytest.param(3, "", "rank=0,step=1,at=reduce;rank=4,step=2,at=forward", marks=pytest.mark.matrix),
        pytest.param(2, "--use-distributed-optimizer", "rank=5,step=2,at=commit", marks=pytest.mark.matrix),
    ],
)
def test_lines_are_those_of_plain_megatron_lm(jobs, name, unlike, stages, flags, inject):
    how = {"ranks": 6, "stages": stages, "without": WITHOUT}
    run = jobs.odyssey(name, f"{unlike} {flags}", inject=inject, **how)
    assert_same_lines(run, jobs.plain(f"{unlike} {flags}", **how))
    assert len(run.killed) == inject.count("rank=")


@pytest.mark.matrix
def test_float64_to_the_last_digits(jobs, name, unlike):
    """Also where layers move to workers that had others: each has its own weights and its own costs."""
    flags, how = f"{unlike} --odyssey-float64 on --odyssey-policy replan", {"ranks": 6, "stages": 3}
    whole = jobs.odyssey(f"{name}-whole", flags, without=WITHOUT, **how)
    inject = "rank=1,step=1,at=weight_grad;rank=5,step=3,at=forward"
    run = jobs.odyssey(name, flags, inject=inject, without=WITHOUT, **how)
    assert_same_lines(run, whole, rel=FLOAT64)
    assert len(run.killed) == 2


@pytest.mark.matrix
def test_checkpoints_there_and_back(jobs, name, unlike):
    assert_checkpoints_there_and_back(
        jobs, name, unlike, ranks=4, stages=2, without=WITHOUT, inject="rank=3,step=1,at=backward"
    )
