"""Makes the example's layers Transformer Engine's; a second call changes nothing."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.transformer import MLATransformerConfig


def use() -> None:
    """The example asks Megatron for local ones, by these names."""
    with_te, block, ahead = (
        specs.get_gpt_layer_with_transformer_engine_spec,
        specs.get_gpt_decoder_block_spec,
        specs.get_gpt_mtp_block_spec,
    )

    def layer_spec(*, normalization: str, qk_layernorm: bool) -> Any:
        return with_te(qk_layernorm=qk_layernorm, multi_latent_attention=_is_latent)

    def block_spec(config: Any, *, use_transformer_engine: bool, **more: Any) -> Any:
        return block(config, use_transformer_engine=True, **more)

    def ahead_spec(config: Any, spec: Any, *, use_transformer_engine: bool) -> Any:
        return ahead(config, spec, use_transformer_engine=True)

    specs.get_gpt_layer_local_spec = layer_spec
    specs.get_gpt_decoder_block_spec, specs.get_gpt_mtp_block_spec = block_spec, ahead_spec


_is_latent = False
"""Whether the example has been asked for multi-latent attention."""


def offer_latent_attention(script: Any) -> None:
    """Have ``script``, the example's module, make models with multi-latent attention if its arguments have ``latent``:
    the sizes of it, for which there are no flags.
    """
    plain = script.transformer_config

    def transformer_config(args: argparse.Namespace, dtype: Any) -> Any:
        global _is_latent
        config, _is_latent = plain(args, dtype), hasattr(args, "latent")
        if not _is_latent:
            return config
        own = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
        return MLATransformerConfig(**own | {"multi_latent_attention": True} | args.latent)

    script.transformer_config = transformer_config
