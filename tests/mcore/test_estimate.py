"""Models as Megatron builds them have the parameters that are planned with, and that a launch line says."""

from __future__ import annotations

import json

import pytest

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.studies import launch_line

HIDDEN, HEADS, VOCAB, LENGTH = 128, 4, 512, 64
SIZES = (
    f"--num-layers 2 --hidden-size {HIDDEN} --num-attention-heads {HEADS} --vocab-size {VOCAB} --seq-length {LENGTH} "
    "--micro-batch-size 2 --make-vocab-size-divisible-by 8"
)
CASES = {
    "plain": ("", {}),
    "llama": (
        "--swiglu --ffn-hidden-size 352 --group-query-attention --num-query-groups 2 "
        "--untie-embeddings-and-output-weights",
        {"gated_linear_unit": True, "ffn_hidden_size": 352, "num_query_groups": 2},
    ),
    "wide heads": ("--kv-channels 64", {"kv_channels": 64}),
    "recomputed": (
        "--recompute-granularity selective --recompute-modules mlp layernorm",
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
    ),
    "further ahead": ("--mtp-num-layers 2", {"mtp_num_layers": 2}),
    "experts": (
        "--swiglu --ffn-hidden-size 352 --num-experts 4 --moe-ffn-hidden-size 96 --moe-layer-freq [0]+[1] "
        "--moe-shared-expert-intermediate-size 64",
        {
            "gated_linear_unit": True,
            "ffn_hidden_size": 352,
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 96,
            "moe_layer_freq": [0, 1],
            "moe_shared_expert_intermediate_size": 64,
            "moe_token_dispatcher_type": "alltoall",
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_the_model(name, megatron, monkeypatch):
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig

    from odyssey_megatron.config import OdysseyConfig
    from odyssey_megatron.mcore.estimate import estimate
    from odyssey_megatron.mcore.model import groups
    from odyssey_megatron.studies.presets import ACCELERATORS

    flags, changes = CASES[name]
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=HEADS, add_bias_linear=False, use_cpu_initialization=True,
        pipeline_dtype=torch.float32, **changes,
    )  # fmt: skip
    for group in groups._FORBIDDEN:  # multi-token prediction names them
        monkeypatch.setattr(parallel_state, group, megatron.dp)
    line = launch_line.read([*SIZES.split(), *flags.split()])
    assert line.model is not None
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    built = GPTModel(
        config,
        spec,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=line.model.is_tied,
        pg_collection=megatron,
    )
    read = line.model.profile(ACCELERATORS["h100"], micro_batch_size=2).costs
    planned = estimate(
        config,
        OdysseyConfig(device="cpu"),
        seq_length=LENGTH,
        micro_batch_size=2,
        vocab_size=VOCAB,
        is_tied=line.model.is_tied,
    ).costs
    weights = sum(one.weight_bytes for one in read.all_layers) // 4
    assert weights == sum(one.weight_bytes for one in planned.all_layers) // 4
    assert [one.activation_bytes for one in read.layers] == [one.activation_bytes for one in planned.layers]
    # The biases of norms are not counted.
    assert sum(one.numel() for one in built.parameters()) == pytest.approx(weights, rel=0.01)


def test_layers_that_are_not_alike(megatron, tmp_path):
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
        get_gpt_heterogeneous_layer_spec,
    )
    from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig

    from odyssey_megatron.config import OdysseyConfig
    from odyssey_megatron.mcore.estimate import estimate
    from odyssey_megatron.studies.presets import ACCELERATORS

    path = tmp_path / "layers.json"
    there = {"no_op": False, "replace_with_linear": False}
    attentions = [{**there, "n_heads_in_group": 2}, {**there, "no_op": True, "n_heads_in_group": None}]
    attentions.append({**there, "replace_with_linear": True, "n_heads_in_group": None})
    mlps = [
        {**there, "ffn_mult": 2.0},
        {**there, "ffn_mult": 6.0},
        {**there, "no_op": True, "ffn_mult": None},
    ]
    blocks = [{"attention": own, "ffn": mlp} for own, mlp in zip(attentions, mlps, strict=True)]
    path.write_text(json.dumps({"block_configs": blocks}))
    config = HeterogeneousTransformerConfig(
        num_layers=3, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=2, add_bias_linear=False,
        gated_linear_unit=True, use_cpu_initialization=True, pipeline_dtype=torch.float32, normalization="RMSNorm",
        heterogeneous_layers_config_path=str(path),
    )  # fmt: skip
    built = GPTModel(
        config,
        get_gpt_heterogeneous_layer_spec(config),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
        pg_collection=megatron,
    )
    settings = OdysseyConfig(device="cpu")
    planned = estimate(
        config, settings, seq_length=LENGTH, micro_batch_size=2, vocab_size=VOCAB, is_tied=True
    ).costs
    parameters = [sum(one.numel() for one in layer.parameters()) for layer in built.decoder.layers]
    assert [one.weight_bytes // 4 for one in planned.layers[1:-1]] == pytest.approx(parameters, rel=0.01)
    flags = f"--swiglu --group-query-attention --num-query-groups 2 --heterogeneous-layers-config-path {path}"
    line = launch_line.read([*SIZES.replace("--num-layers 2", "--num-layers 3").split(), *flags.split()])
    read = line.model.profile(ACCELERATORS["h100"], micro_batch_size=2).costs
    assert [one.weight_bytes for one in read.all_layers] == [one.weight_bytes for one in planned.all_layers]
    path.write_text("{}")
    with pytest.raises(ConfigError, match="block_configs"):
        launch_line.read([*SIZES.split(), *flags.split()])
    path.write_text(json.dumps({"block_configs": blocks}))
    with pytest.raises(ConfigError, match="has 3 of them, and --num-layers is 2"):
        launch_line.read([*SIZES.split(), *flags.split()])


def test_layers_of_a_hybrid_model(megatron):
    """By letters, or by the ratios of older versions."""
    pytest.importorskip("einops")
    import torch
    from megatron.core.models.mamba import MambaModel, mamba_layer_specs
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers
    from megatron.core.transformer import TransformerConfig

    from odyssey_megatron.config import OdysseyConfig
    from odyssey_megatron.mcore.cpu import hybrid as cpu_hybrid
    from odyssey_megatron.mcore.estimate import estimate
    from odyssey_megatron.policy.costs.block_configs import kinds_of_ratios
    from odyssey_megatron.studies.presets import ACCELERATORS

    cpu_hybrid.let_stacks_do_without_transformer_engine()
    config = TransformerConfig(
        num_layers=4, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=2, add_bias_linear=False,
        use_cpu_initialization=True, pipeline_dtype=torch.float32, normalization="RMSNorm", num_moe_experts=4,
        moe_ffn_hidden_size=16, moe_layer_freq=[0, 0, 0, 1], mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2,
        bias_dropout_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    built = MambaModel(
        config, mamba_layer_specs.mamba_stack_spec, vocab_size=VOCAB, max_sequence_length=LENGTH,
        hybrid_override_pattern="M*-E", share_embeddings_and_output_weights=True, pg_collection=megatron,
    )  # fmt: skip
    planned = estimate(
        config, OdysseyConfig(device="cpu"), seq_length=LENGTH, micro_batch_size=2, vocab_size=VOCAB, is_tied=True,
        kinds="M*-E",
    ).costs  # fmt: skip
    parameters = [sum(one.numel() for one in layer.parameters()) for layer in built.decoder.layers]
    assert [one.weight_bytes // 4 for one in planned.layers[1:-1]] == pytest.approx(parameters, rel=0.02)
    line = [
        *SIZES.replace("--num-layers 2", "--hybrid-layer-pattern M*|-E").split(), "--spec",
        "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec", "--num-experts", "4",
        "--moe-ffn-hidden-size", "16", "--mamba-state-dim", "8", "--mamba-head-dim", "8", "--mamba-num-groups", "2",
        "--group-query-attention", "--num-query-groups", "2", "--pipeline-model-parallel-size", "2",
    ]  # fmt: skip
    found = launch_line.read(line)
    assert (found.stage_layers, found.virtual_stages) == ((2, 2), 1)
    read = found.model.profile(ACCELERATORS["h100"], micro_batch_size=2).costs
    assert [one.weight_bytes for one in read.all_layers] == [one.weight_bytes for one in planned.all_layers]
    ratios = (0.0, 0.0), (0.1, 0.0), (0.08, 0.5), (0.5, 0.5), (0.0, 0.3), (0.3, 0.2)
    cases = [(layers, *each) for layers in range(1, 60) for each in ratios]
    both = [(kinds_of_ratios(*one), "".join(allocate_layers(*one))) for one in cases]
    assert all(sorted(ours) == sorted(theirs) for ours, theirs in both)
    assert sum(ours == theirs for ours, theirs in both) > 0.9 * len(both)
    with pytest.raises(ConfigError, match="has layers G"):
        launch_line.read([*SIZES.split(), "--spec", "a", "--hybrid-override-pattern", "G*"])


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize("changes", [{}, FULL], ids=["plain", "recomputed"])
def test_plans_count_what_is_kept_for_weight_gradients(make_model, changes):
    """A layer that is run again keeps its input alone before that, and afterwards nothing."""
    from odyssey_megatron.config import OdysseyConfig
    from odyssey_megatron.mcore.estimate import estimate

    model = make_model(alone=True, num_layers=2, config=changes)
    last = model.spec.num_layers
    model.compute.forward(0, 0, last, None)
    model.compute.input_grad(0, 0, last, None)
    ((_, flight),) = model.compute._flights.items()
    weights = {id(one) for layer in (1, 2) for one in model.holdings.held[layer].parameters()}
    pending = [one for one in flight.weight_grads._pending if id(one.weight) in weights]
    storages = {one.untyped_storage() for of in pending for one in (of.input, of.grad_output)}
    kept = {one.data_ptr(): one.nbytes() for one in storages}
    planned = estimate(
        model.spec.config,
        OdysseyConfig(device="cpu"),
        seq_length=16,
        micro_batch_size=1,
        vocab_size=VOCAB,
    ).costs.spans
    assert planned.activation_bytes(1, 3) - planned.early_bytes(1, 3) == pytest.approx(
        sum(kept.values()), rel=0.02
    )
    config, before = model.spec.config, planned.activation_bytes(1, 3)
    its_inputs = 2 * 16 * config.hidden_size * config.params_dtype.itemsize
    assert before == (its_inputs if changes else sum(kept.values()))
