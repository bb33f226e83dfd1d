"""Makes the example's layers Transformer Engine's; a second call changes nothing."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import gpt_layer_specs as specs


def use() -> None:
    """The example asks Megatron for local ones, by these names."""
    with_te, block, ahead = (
        specs.get_gpt_layer_with_transformer_engine_spec,
        specs.get_gpt_decoder_block_spec,
        specs.get_gpt_mtp_block_spec,
    )

    def layer_spec(*, normalization: str, qk_layernorm: bool) -> Any:
        return with_te(qk_layernorm=qk_layernorm)

    def block_spec(config: Any, *, use_transformer_engine: bool, **more: Any) -> Any:
        return block(config, use_transformer_engine=True, **more)

    def ahead_spec(config: Any, spec: Any, *, use_transformer_engine: bool) -> Any:
        return ahead(config, spec, use_transformer_engine=True)

    specs.get_gpt_layer_local_spec = layer_spec
    specs.get_gpt_decoder_block_spec, specs.get_gpt_mtp_block_spec = block_spec, ahead_spec
