from dataclasses import replace

import pytest

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.policy.costs.estimate import Links, estimated_profile, exchanging
from odyssey_megatron.policy.costs.profile import Observation, Profile, calibrate, load_profile
from odyssey_megatron.policy.costs.sizes import AttentionShape, Experts, Precision, Recomputed
from tests.plan.samples import uniform_costs

SHAPE = {
    "hidden_size": 512,
    "ffn_hidden_size": 1408,
    "attention": AttentionShape.grouped(512, 8, 2, 64),
    "seq_length": 256,
    "micro_batch_size": 2,
    "vocab_size": 1000,
}
LLAMA = estimated_profile(num_transformer_layers=8, **SHAPE)


def seen(first, last, forward_s, samples=10):
    return Observation(
        first=first,
        last=last,
        samples=samples,
        forward_s=forward_s,
        input_grad_s=forward_s,
        weight_grad_s=2 * forward_s,
    )


def test_spans_give_layer_times():
    """Embedding 0.1, transformer 1, head 0.5, from the three stages of a pipeline."""
    profile = Profile(costs=uniform_costs(6, ends=True))
    after = calibrate(profile, [seen(0, 3, 2.1), seen(3, 5, 2.0), seen(5, 8, 2.5)])
    forward = [layer.forward_s for layer in after.costs.layers]
    assert forward == pytest.approx([0.1, 1, 1, 1, 1, 1, 1, 0.5], abs=0.01)
    assert [layer.weight_grad_s for layer in after.costs.layers] == pytest.approx(
        [2 * value for value in forward]
    )
    assert (after.source, after.samples) == ("measured", 30)


def test_one_span_scales_the_estimate():
    after = calibrate(LLAMA, [seen(0, 10, 3.0)])
    before = [layer.forward_s for layer in LLAMA.costs.layers]
    ratio = 3.0 / sum(before)
    assert [layer.forward_s for layer in after.costs.layers] == pytest.approx(
        [value * ratio for value in before], rel=0.05
    )


def test_never_negative():
    after = calibrate(Profile(costs=uniform_costs(2, ends=True)), [seen(0, 2, 0.1), seen(1, 2, 5.0)])
    assert min(layer.forward_s for layer in after.costs.layers) >= 0


def test_where_the_longer_span_was_faster_layers_still_take_some_time():
    """As on a GPU that several ranks shared: of [embedding + layers, layers + head] in two layouts."""
    after = calibrate(LLAMA, [seen(0, 5, 3.0), seen(5, 10, 2.0), seen(0, 6, 2.5), seen(6, 10, 2.2)])
    prior = [layer.forward_s for layer in LLAMA.costs.layers]
    scale = (3.0 + 2.0 + 2.5 + 2.2) / (2 * sum(prior))
    layers = after.costs.layers[1:-1]
    assert min(one.forward_s for one in layers) > 0.05 * scale * prior[1]
    assert min(one.weight_grad_s for one in layers) > 0


def test_a_span_that_shared_costs_cannot_explain_gets_its_own():
    profile = Profile(costs=uniform_costs(6, ends=True))
    spans = [seen(0, 3, 2.0), seen(3, 5, 6.0), seen(5, 8, 2.0)]
    layers = calibrate(profile, spans).costs.layers
    assert sum(layer.forward_s for layer in layers[3:5]) == pytest.approx(6.0)
    assert sum(layer.forward_s for layer in layers[0:3]) == pytest.approx(2.0)


def test_nothing_measured_changes_nothing():
    assert calibrate(LLAMA, []) is LLAMA
    assert calibrate(LLAMA, [seen(0, 2, 1.0, samples=0)]) is LLAMA


def test_a_name_that_is_too_long_is_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile("x" * 5000)


def test_file_round_trip(tmp_path):
    path = tmp_path / "profile.json"
    LLAMA.save(path)
    assert load_profile(path) == LLAMA
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"the profile .*profile\.json"):
        load_profile(path)
    with pytest.raises(ConfigError):
        load_profile(tmp_path / "missing.json")


def test_estimate_counts_parameters_and_flops():
    transformer = LLAMA.costs.layers[1]
    weights = 2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1408
    assert transformer.weight_bytes == 2 * (weights + 2 * 512)
    assert transformer.gradient_bytes == 2 * transformer.weight_bytes, "summed in float32"
    assert transformer.optimizer_bytes == 6 * transformer.weight_bytes, "two moments and a master copy"
    assert transformer.weight_grad_s == pytest.approx(2 * 512 * weights / 2e14)
    assert transformer.forward_s > transformer.weight_grad_s
    assert LLAMA.costs.layers[-1].forward_s == pytest.approx(2 * 512 * 1000 * 512 / 2e14)
    halved = estimated_profile(num_transformer_layers=1, tensor_parallel_size=2, **SHAPE)
    assert halved.costs.layers[1].forward_s == pytest.approx(transformer.forward_s / 2)
    assert replace(halved.costs, layers=()).message_bytes * 2 == LLAMA.costs.message_bytes
    cut = estimated_profile(num_transformer_layers=1, context_parallel_size=2, **SHAPE).costs
    assert cut.layers[1].forward_s == pytest.approx(transformer.forward_s / 2)
    assert cut.layers[1].weight_bytes == transformer.weight_bytes, "all ranks have all weights"
    assert cut.message_bytes * 2 == LLAMA.costs.message_bytes


def test_what_ranks_of_a_worker_exchange_takes_time():
    """512 tokens of 512 numbers of 2 bytes, of which tensor-parallel ranks sum two in each direction of a layer."""
    links, message = Links(node_bytes_per_s=1e11, card_bytes_per_s=1e10), 512 * 512 * 2
    known = {name: SHAPE[name] for name in ("hidden_size", "ffn_hidden_size", "attention")}
    known |= {"tokens": 512, "precision": Precision(), "unlike": ()}
    usual = {"tensor_parallel_size": 1, "recomputed": Recomputed(), "experts": None}

    def more_s(**more):
        alone = estimated_profile(num_transformer_layers=4, **SHAPE, **more)
        beside = exchanging(alone, links, **known, **(usual | more))
        assert alone.operations == beside.operations
        pairs = [*zip(alone.costs.layers, beside.costs.layers, strict=True)][2:4]
        kinds = ("forward_s", "input_grad_s", "weight_grad_s")
        return [tuple(getattr(b, kind) - getattr(a, kind) for kind in kinds) for a, b in pairs]

    sums_s = 2 * 2 * 3 / 4 * message / 1e11
    assert more_s() == [(0.0, 0.0, 0.0)] * 2
    assert more_s(tensor_parallel_size=4) == [pytest.approx((sums_s, sums_s, 0.0))] * 2
    beyond_s = 2 * 2 * 15 / 16 * message / 1e10
    assert more_s(tensor_parallel_size=16) == [pytest.approx((beyond_s, beyond_s, 0.0))] * 2
    again = more_s(tensor_parallel_size=4, recomputed=Recomputed(share=1.0))
    assert again == [pytest.approx((sums_s, 2 * sums_s, 0.0))] * 2
    again = more_s(tensor_parallel_size=4, recomputed=Recomputed(modules=frozenset({"mlp"})))
    assert again == [pytest.approx((sums_s, 1.5 * sums_s, 0.0))] * 2, "one of the two again"

    experts = Experts(layers=frozenset({2, 4}), count=32, topk=2, ffn_hidden_size=704)
    of_four, of_16 = (more_s(experts=replace(experts, parts=parts)) for parts in (4, 16))
    there_and_back_s = 2 * 2 * message * 3 / 4 / 1e11
    assert of_four[0] == pytest.approx((there_and_back_s, there_and_back_s, 0.0)), "within a node"
    assert of_four[1] == (0.0, 0.0, 0.0), "no experts"
    again = more_s(experts=replace(experts, parts=4), recomputed=Recomputed(modules=frozenset({"moe"})))
    assert again[0] == pytest.approx((there_and_back_s, 2 * there_and_back_s, 0.0))
    most_s = 2 * 2 * message * 8 / 16 / 1e10
    assert of_16[0] == pytest.approx((most_s, most_s, 0.0)), "half of them go to another node"
    cut = more_s(tensor_parallel_size=4, experts=experts)
    assert cut[0] == pytest.approx((sums_s, sums_s, 0.0)), "cut like other weights"
    both = more_s(tensor_parallel_size=4, experts=replace(experts, parts=4))
    both_s = sums_s / 2 + there_and_back_s / 4
    assert both[0] == pytest.approx((both_s, both_s, 0.0)), "whole experts on the ranks that cut attention"


def test_layers_with_experts_cost_what_they_cost():
    """As measured on two stages of two layers, of which the second of each has experts."""
    experts = Experts(
        layers=frozenset({2, 4}), count=8, topk=2, ffn_hidden_size=704, shared_ffn_hidden_size=704
    )
    profile = estimated_profile(num_transformer_layers=4, experts=experts, **SHAPE)
    dense, sparse = profile.costs.layers[1:3]
    assert profile.costs.layers[3:5] == (dense, sparse)
    assert dense == LLAMA.costs.layers[1]
    assert sparse.weight_bytes - dense.weight_bytes == 2 * (3 * 512 * (9 * 704 - 1408) + 512 * 8)
    spread = estimated_profile(num_transformer_layers=4, experts=replace(experts, parts=4), **SHAPE)
    assert sparse.weight_bytes - spread.costs.layers[2].weight_bytes == 2 * 3 * 512 * 6 * 704, (
        "a quarter of 8 each"
    )
    passed = 3 * 512 * (3 * 704 - 1408) + 512 * 8
    assert sparse.weight_grad_s - dense.weight_grad_s == pytest.approx(2 * 512 * passed / 2e14)
    layers = calibrate(
        profile, [seen(0, 2, 1.0), seen(2, 3, 3.0), seen(3, 4, 1.0), seen(4, 6, 3.0)]
    ).costs.layers
    assert [one.forward_s for one in layers[2:5]] == pytest.approx([3.0, 1.0, 3.0], rel=0.1)


DEEP = {
    "hidden_size": 512,
    "ffn_hidden_size": 1408,
    "attention": AttentionShape.latent(
        512, 8, q_lora_rank=96, kv_lora_rank=32, qk_head_dim=64, qk_pos_emb_head_dim=16, v_head_dim=48
    ),
    "seq_length": 256,
    "micro_batch_size": 2,
    "vocab_size": 1000,
    "experts": Experts(
        layers=frozenset({2}), count=8, topk=2, ffn_hidden_size=704, shared_ffn_hidden_size=352
    ),
}
"""A dense layer and one with experts, both with latent attention."""


def test_experts_keep_the_tokens_that_they_are_given():
    """As Megatron-LM's experts: of 2 bytes, the input of their first product, for each expert that a token goes to."""
    dense, sparse = estimated_profile(num_transformer_layers=2, **DEEP).costs.layers[1:3]
    units = 3 * (2 * 704 + 352 - 1408)
    assert sparse.activation_bytes - dense.activation_bytes == 512 * 2 * (2 * 512 + units)

    def kept_bytes(**spread):
        experts = replace(DEEP["experts"], **spread)
        costs = estimated_profile(
            num_transformer_layers=2, tensor_parallel_size=4, **DEEP | {"experts": experts}
        ).costs
        return costs.layers[2].activation_bytes

    alone = kept_bytes(parts=8, tensor_parts=1)
    assert alone == sparse.activation_bytes // 4
    more = 512 * 2 * 2 * 512
    assert kept_bytes() == kept_bytes(parts=8, tensor_parts=4) == alone + more - more // 4, (
        "ranks that cut an expert all have its tokens"
    )


def test_what_weight_gradients_keep_besides():
    """From the input gradient on: whole gradients behind two products with sequence parallelism, as a job of four
    tensor-parallel ranks has them, and those of each expert's output.
    """

    def late_bytes(shape, **parallel):
        return [
            -one.early_bytes
            for one in estimated_profile(num_transformer_layers=2, **shape, **parallel).costs.layers
        ]

    gathered = 2 * 512 * 512 * 2 * 3 // 4
    assert late_bytes(SHAPE, tensor_parallel_size=4) == [0, gathered, gathered, 0]
    for whole in ({}, {"tensor_parallel_size": 4, "sequence_parallel": False}):
        assert late_bytes(SHAPE, **whole) == [0] * 4
    assert late_bytes(DEEP) == [0, 0, 512 * 2 * 2 * 512, 0]


@pytest.mark.parametrize(
    ("modules", "of_dense", "of_sparse", "again_dense", "again_sparse"),
    [
        ("moe_act", 0, 2 * 704, 0, 0),
        ("layernorm", 512, 2 * 512, 0, 0),
        ("mlp", 3 * 1408, 0, 512 * 3 * 1408, 0),
        ("shared_experts", 0, 3 * 352, 0, 512 * 3 * 352),
        ("moe", 0, 3 * 1760 + 2 * 512, 0, 512 * (3 * 1760 + 8)),
        ("moe moe_act shared_experts", 0, 3 * 1760 + 2 * 512, 0, 512 * (3 * 1760 + 8)),
        ("mla_up_proj", *(2 * 640 + 384,) * 2, *(96 * 640 + 32 * (512 + 384),) * 2),
        ("layernorm moe_act", 512, 2 * 512 + 2 * 704, 0, 0),
    ],
)
def test_modules_that_are_recomputed_keep_less(modules, of_dense, of_sparse, again_dense, again_sparse):
    """512 tokens; numbers per token that are dropped, and weights whose products are computed once more."""
    usual = estimated_profile(num_transformer_layers=2, **DEEP).costs.layers[1:3]
    found = estimated_profile(
        num_transformer_layers=2, recomputed=Recomputed(modules=frozenset(modules.split())), **DEEP
    ).costs
    for before, after, dropped, again in zip(
        usual, found.layers[1:3], (of_dense, of_sparse), (again_dense, again_sparse), strict=True
    ):
        assert before.activation_bytes - after.activation_bytes == 512 * 2 * dropped
        again_s = 2 * 512 * again / 2e14
        with_it_s = again_s if "mla" not in modules else 0.0  # Megatron's other kind of recomputation
        assert after.input_grad_s - before.input_grad_s == pytest.approx(again_s + with_it_s, abs=1e-15)
        assert before.weight_grad_s - after.weight_grad_s == pytest.approx(with_it_s, abs=1e-15)
        assert after.forward_s == before.forward_s


@pytest.mark.parametrize("layers", [1, 3, 9])
def test_there_is_room_for_what_is_run_again(layers):
    """Four layers of a stage, as many at a time as Megatron is told; then nothing of them is left."""
    again = Recomputed.by_flags("full", "uniform", layers, 4, None)
    usual, found = (
        estimated_profile(num_transformer_layers=8, memory_bytes=10**9, recomputed=one, **SHAPE).costs
        for one in (Recomputed(), again)
    )
    of_one = usual.layers[1].activation_bytes - found.layers[1].activation_bytes
    assert of_one > 0
    assert usual.memory_bytes - found.memory_bytes == min(layers, 4) * of_one
    assert found.layers[1].early_bytes == found.layers[1].activation_bytes
    assert found.layers[1].weight_grad_s == 0.0


def test_a_recomputed_core_attention_computes_its_scores_again():
    usual, found = (
        estimated_profile(
            num_transformer_layers=2, recomputed=Recomputed(modules=frozenset(one)), **SHAPE
        ).costs.layers[1]
        for one in ((), ("core_attn", "layernorm", "moe", "mla_up_proj"))
    )
    assert usual.activation_bytes == found.activation_bytes, "and it has none of the others"
    assert found.input_grad_s - usual.input_grad_s == pytest.approx(2 * 512 * 256 * 512 / 2e14)


def test_the_head_keeps_float32_for_each_logit():
    """Beside it 512 tokens of two hidden states."""
    for dtype_bytes, of_logit in ((2, 4), (4, 4), (8, 8)):
        costs = estimated_profile(
            num_transformer_layers=1, precision=Precision(dtype_bytes=dtype_bytes), **SHAPE
        ).costs
        assert costs.layers[-1].activation_bytes == 512 * (2 * 512 * dtype_bytes + 1000 * of_logit)


def test_blocks_further_ahead_are_the_head_s():
    """A layer, a head, and what joins two hidden states: DeepSeek-V3's MTP module, section 2.2 of its report."""
    costs = estimated_profile(num_transformer_layers=4, **SHAPE).costs
    ahead = estimated_profile(num_transformer_layers=4, mtp_num_layers=2, **SHAPE).costs
    *inner, head = ahead.layers
    assert inner[1:] == list(costs.layers[1:-1])
    once = costs.layers[-1].compute_s + costs.layers[-2].compute_s
    assert 2 * once < head.compute_s - costs.layers[-1].compute_s < 2.5 * once
    assert ahead.tied.weight_bytes == costs.layers[0].weight_bytes, "the embedding's weight is where both are"
    assert inner[0].weight_bytes == 0
    assert head.weight_bytes - costs.layers[-1].weight_bytes > 2 * costs.layers[-2].weight_bytes
