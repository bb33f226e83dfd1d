"""Layers that are not alike, as Nemotron's files describe them (``--heterogeneous-layers-config-path``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from odyssey_megatron import codec
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.policy.profile import Attention

UnlikeLayers = tuple[tuple[Attention, int], ...]
"""Of each transformer layer its attention, and the hidden units of its MLP."""


def unlike_layers(
    text: str, *, num_layers: int, hidden_size: int, heads: int, kv_channels: int, is_gated: bool
) -> UnlikeLayers:
    """The ``block_configs`` of the JSON ``text``, as megatron core_v0.16.1 reads them
    (core/transformer/heterogeneous/heterogeneous_config.py): either part of a layer may be missing (``no_op``) or one
    product (``replace_with_linear``), and the latter counts as an MLP of as many weights.

    Raises:
        ConfigError: it describes no layers, or another number of them.
    """
    products, found = 3 if is_gated else 2, []
    try:
        for block in codec.parsed(text)["block_configs"]:
            own, mlp = block["attention"], block.get("ffn") or block["mlp"]
            attention = Attention(weights=0, score_width=0, kept=0)
            if own.get("replace_with_linear"):
                attention = Attention.linear(hidden_size)
            elif not own.get("no_op"):
                groups = own.get("num_query_groups") or heads // own["n_heads_in_group"]
                attention = Attention.grouped(hidden_size, heads, groups, kv_channels)
            found.append((attention, _units(mlp, hidden_size, products)))
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"the configuration of layers that are not alike cannot be read ({type(error).__name__}: {error}). It "
            'needs a list "block_configs" with "attention" and "ffn" of each layer.'
        ) from None
    if len(found) != num_layers:
        raise ConfigError(
            f"the configuration of layers that are not alike has {len(found)} of them, and --num-layers is "
            f"{num_layers}. Set both to the same."
        )
    return tuple(found)


def _units(mlp: Mapping[str, Any], hidden_size: int, products: int) -> int:
    if mlp.get("no_op"):
        return 0
    if mlp.get("replace_with_linear"):
        return hidden_size // products
    if "ffn_hidden_size" in mlp:
        return int(mlp["ffn_hidden_size"])
    return -(-int(2 * mlp["ffn_mult"] * hidden_size / 3) // 256) * 256
