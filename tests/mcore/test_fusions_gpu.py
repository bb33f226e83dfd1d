"""Kernels that Megatron-LM takes on a GPU in place of torch's products: ``bash tests/run.sh -m gpu
tests/mcore/test_fusions_gpu.py``. They compute what jobs on a CPU, which take the others, are held against.

Written without a GPU at hand. What is not installed is skipped, and its name said.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Sums of float32 in another order."""
TOKENS, EXPERTS, CHOSEN = 128, 8, 2


@pytest.fixture(autouse=True)
def device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if hasattr(torch, "_odyssey_cpu_device"):
        pytest.skip("an earlier test has redirected torch.cuda to the CPU: run with -m gpu")
    pytest.importorskip("megatron.core")
    torch.manual_seed(1)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def compare(ours, theirs, inputs):
    """Outputs and their gradients; each function is given ``inputs`` of its own."""
    found = []
    for function in (ours, theirs):
        own = [one.detach().clone().requires_grad_() for one in inputs]
        # What a kernel writes to in place must not be a leaf.
        outputs = function(*(one * 1.0 for one in own))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        summed = [one for one in outputs if one.requires_grad]
        weighted = sum(
            (one * torch.linspace(0, 1, one.numel(), device="cuda").view_as(one)).sum() for one in summed
        )
        found.append([*outputs, *torch.autograd.grad(weighted, own)])
    for one, other in zip(*found, strict=True):
        if one.dtype is torch.bool:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one.float(), other.float(), **CLOSE)


@pytest.fixture
def router():
    """Megatron's functions, if Transformer Engine has theirs."""
    from megatron.core.transformer.moe import moe_utils

    for name in (
        "fused_topk_with_score_function",
        "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
    ):
        if getattr(moe_utils, name, None) is None:
            pytest.skip(f"no transformer_engine with {name}")
    return moe_utils


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_fusion_chooses_the_same_experts(router, score):
    def routed(fused):
        return lambda logits: router.topk_routing_with_score_function(
            logits, CHOSEN, score_function=score, fused=fused
        )

    def scored(fused):
        def function(logits):
            routing, scores = router.compute_routing_scores_for_aux_loss(logits, CHOSEN, score, fused=fused)
            return routing.bool(), scores

        return function

    logits = leaf(TOKENS, EXPERTS)
    compare(routed(True), routed(False), [logits])
    compare(scored(True), scored(False), [logits])


def test_router_fusion_has_the_same_auxiliary_loss(router):
    counts = torch.randint(1, TOKENS, (EXPERTS,), device="cuda")

    def loss(fused):
        return lambda scores: router.switch_load_balancing_loss_func(
            scores, counts, TOKENS, CHOSEN, EXPERTS, 1e-2, fused=fused
        )

    compare(loss(True), loss(False), [leaf(TOKENS, EXPERTS).softmax(-1)])


def test_permutation_there_and_back(router):
    if router.fused_permute is None or router.fused_unpermute is None:
        pytest.skip("no transformer_engine with fused_permute")
    routing = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool, device="cuda")
    routing.scatter_(1, torch.rand(TOKENS, EXPERTS, device="cuda").topk(CHOSEN).indices, value=True)

    def moved(fused):
        def function(tokens):
            there, _, order = router.permute(tokens, routing, num_out_tokens=TOKENS * CHOSEN, fused=fused)
            back = router.unpermute(there, order, tokens.shape, routing_map=routing, fused=fused)
            return there, back

        return function

    compare(moved(True), moved(False), [leaf(TOKENS, 64)])


def test_routing_maps_are_padded_alike():
    pytest.importorskip("triton")
    from megatron.core.fusions.fused_pad_routing_map import fused_pad_routing_map
    from megatron.core.transformer.moe.moe_utils import pad_routing_map

    routing = torch.rand(TOKENS, EXPERTS, device="cuda") < 0.3
    assert torch.equal(
        fused_pad_routing_map(routing.clone(), 16).bool(), pad_routing_map(routing.clone(), 16).bool()
    )


def test_the_cross_entropy_of_transformer_engine():
    from megatron.core.extensions import transformer_engine

    function = transformer_engine.te_parallel_cross_entropy
    if function is None:
        pytest.skip("no transformer_engine with parallel_cross_entropy")
    labels = torch.randint(0, 512, (TOKENS, 2), device="cuda")

    def plain(logits):
        flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return flat.view_as(labels)

    compare(lambda logits: function(logits, labels, None), plain, [leaf(TOKENS, 2, 512)])


@pytest.mark.parametrize("hidden_size", [1024, 128], ids=["persistent", "other"])
def test_the_layer_norm_of_apex(hidden_size):
    from megatron.core.fusions import fused_layer_norm
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not (fused_layer_norm.HAVE_PERSIST_LAYER_NORM and fused_layer_norm.HAVE_FUSED_LAYER_NORM):
        pytest.skip("no apex with both of its layer norms")
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden_size, num_attention_heads=1, persist_layer_norm=True
    )
    norm = fused_layer_norm.FusedLayerNorm(config, hidden_size).cuda()
    assert norm.persist_layer_norm == (hidden_size == 1024)
    plain = torch.nn.functional.layer_norm
    compare(
        norm, lambda x: plain(x, (hidden_size,), norm.weight, norm.bias, norm.eps), [leaf(4, 2, hidden_size)]
    )


def test_main_weights_are_rounded_alike():
    from megatron.core.optimizer import optimizer

    main = [torch.randn(1000, device="cuda"), torch.randn(7, 3, device="cuda")]
    flag = torch.zeros(1, dtype=torch.int, device="cuda")
    copied = [torch.empty_like(one, dtype=torch.bfloat16) for one in main]
    optimizer._multi_tensor_copy_this_to_that(this=main, that=copied, overflow_buf=flag)
    assert all(torch.equal(one, other.bfloat16()) for one, other in zip(copied, main, strict=True))


def test_rotary_embeddings_of_multi_latent_attention():
    pytest.importorskip("triton")
    from megatron.core.fusions.fused_mla_yarn_rope_apply import fused_apply_mla_rope_for_q
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    length, still, turned = 64, 128, 64
    yarn = YarnRotaryEmbedding(turned, scaling_factor=4.0, original_max_position_embeddings=length)
    cos, sin = yarn.get_cached_cos_sin(length, dtype=torch.float32)
    angles, mscale = yarn(length)
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=True)

    def products(query):
        same, rest = query.split([still, turned], dim=-1)
        group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        rest = apply_rotary_pos_emb(rest, angles, config=config, mscale=mscale, cp_group=group)
        return torch.cat([same, rest], dim=-1)

    compare(
        lambda query: fused_apply_mla_rope_for_q(query, cos, sin, still, turned),
        products,
        [leaf(length, 2, 4, still + turned)],
    )
