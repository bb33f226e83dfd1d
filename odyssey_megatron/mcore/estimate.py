"""The expected costs of a model of Megatron's configuration."""

from __future__ import annotations

from typing import Any

import torch

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.mcore.device import sharing
from odyssey_megatron.policy.costs.block_configs import UnlikeLayers, hybrid_layers, unlike_layers
from odyssey_megatron.policy.costs.estimate import estimated_profile, share_of_experts
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.costs.sizes import AttentionShape, Experts, Precision, Recomputed

_CPU_GUESS: dict[str, Any] = {
    "flops_per_s": 1e10,
    "link_latency_s": 2e-4,
    "link_bytes_per_s": 1e9,
    "memory_bytes_per_s": 5e9,
}
"""A guess for one core and loopback, until the job has measured itself."""


def _experts(config: Any) -> Experts | None:
    from odyssey_megatron.mcore.model.experts import with_experts

    if config.num_moe_experts is None:
        return None
    return Experts(
        layers=frozenset(with_experts(config)),
        count=config.num_moe_experts,
        topk=config.moe_router_topk,
        ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        shared_ffn_hidden_size=config.moe_shared_expert_intermediate_size or 0,
        parts=config.expert_model_parallel_size * config.expert_tensor_parallel_size,
        tensor_parts=config.expert_tensor_parallel_size,
    )


def experts_work(config: Any, *, seq_length: int, vocab_size: int) -> float:
    """The share of a model's FLOPs that are of experts over which each gang's ranks have tokens spread; 0 without any
    gangs.
    """
    experts = _experts(config)
    if experts is None or config.expert_model_parallel_size == 1:
        return 0.0
    return share_of_experts(
        experts,
        num_transformer_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        attention=_attention(config),
        seq_length=seq_length,
        vocab_size=vocab_size,
        is_gated=config.gated_linear_unit,
    )


def _attention(config: Any) -> AttentionShape:
    if config.multi_latent_attention:
        return AttentionShape.latent(
            config.hidden_size,
            config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_head_dim=config.qk_head_dim,
            qk_pos_emb_head_dim=config.qk_pos_emb_head_dim,
            v_head_dim=config.v_head_dim,
        )
    heads = config.num_attention_heads
    return AttentionShape.grouped(
        config.hidden_size, heads, config.num_query_groups or heads, config.kv_channels
    )


def _unlike(config: Any, kinds: str, seq_length: int) -> UnlikeLayers:
    """The layers of a ``HeterogeneousTransformerConfig`` or a hybrid model that differ from the others; empty for other
    models.
    """
    if kinds:
        state_space = AttentionShape.state_space(
            config.hidden_size,
            heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
            groups=config.mamba_num_groups,
            states=config.mamba_state_dim,
            seq_length=seq_length,
        )
        return hybrid_layers(kinds, _attention(config), state_space, config.ffn_hidden_size)
    if not config.heterogeneous_block_specs:
        return ()
    return unlike_layers(
        config.heterogeneous_layers_config_encoded_json,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        kv_channels=config.kv_channels,
        is_gated=config.gated_linear_unit,
    )


def estimate(
    config: Any,
    settings: OdysseyConfig,
    *,
    seq_length: int,
    micro_batch_size: int,
    vocab_size: int,
    is_tied: bool = False,
    kinds: str = "",
    precision: Precision | None = None,
) -> Profile:
    """The profile of a model of Megatron's ``config`` until the job has measured itself; ``kinds``: the kinds of a
    hybrid model's layers.
    """
    on_cpu = settings.device == "cpu"
    usable_percent = 100 - settings.memory_headroom_percent
    return estimated_profile(
        num_transformer_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        attention=_attention(config),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        vocab_size=vocab_size,
        is_tied=is_tied,
        is_gated=config.gated_linear_unit,
        recomputed=Recomputed.by_flags(
            config.recompute_granularity,
            config.recompute_method,
            config.recompute_num_layers,
            config.num_layers / config.pipeline_model_parallel_size,
            config.recompute_modules,
        ),
        experts=_experts(config),
        unlike=_unlike(config, kinds, seq_length),
        mtp_num_layers=config.mtp_num_layers or 0,
        precision=precision or Precision(dtype_bytes=config.params_dtype.itemsize),
        memory_bytes=None
        if on_cpu
        else torch.cuda.mem_get_info()[1] * usable_percent // (100 * sharing(settings)),
        tensor_parallel_size=config.tensor_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        sequence_parallel=config.sequence_parallel,
        **(_CPU_GUESS if on_cpu else {}),
    )
