"""Models whose layers are not alike.

They are described by Nemotron's files (``--heterogeneous-layers-config-path``), or by the letters of a hybrid pattern
(``--hybrid-layer-pattern``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from odyssey_megatron import codec
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.policy.costs.sizes import AttentionShape

UnlikeLayers = tuple[tuple[AttentionShape, int], ...]
"""(attention, hidden units of the MLP) of each transformer layer."""


def unlike_layers(
    text: str, *, num_layers: int, hidden_size: int, heads: int, kv_channels: int, is_gated: bool
) -> UnlikeLayers:
    """Return the layers that the ``block_configs`` of the JSON ``text`` describe.

    They are read as megatron core_v0.16.1 does (core/transformer/heterogeneous/heterogeneous_config.py). Attention and
    MLP may each be missing (``no_op``), or be one product (``replace_with_linear``). In place of an MLP the latter
    counts as an MLP with as many weights.

    Raises:
        ConfigError: it describes no layers, or another number of them.
    """
    products, found = 3 if is_gated else 2, []
    try:
        for block in codec.parsed(text)["block_configs"]:
            own, mlp = block["attention"], block.get("ffn") or block["mlp"]
            attention = AttentionShape(weights=0, score_width=0, kept=0)
            if own.get("replace_with_linear"):
                attention = AttentionShape.linear(hidden_size)
            elif not own.get("no_op"):
                groups = own.get("num_query_groups") or heads // own["n_heads_in_group"]
                attention = AttentionShape.grouped(hidden_size, heads, groups, kv_channels)
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


def hybrid_layers(
    kinds: str, attention: AttentionShape, state_space: AttentionShape, ffn_hidden_size: int
) -> UnlikeLayers:
    """Return the layers of a hybrid model whose ``kinds`` are Megatron's letters.

    M is a state space, ``*`` attention, - an MLP, and E a mixture of experts, which is described elsewhere.

    Raises:
        ConfigError: there is another letter.
    """
    nothing = AttentionShape(weights=0, score_width=0, kept=0)
    known = {"M": (state_space, 0), "*": (attention, 0), "-": (nothing, ffn_hidden_size), "E": (nothing, 0)}
    if strange := sorted({*kinds} - {*known}):
        raise ConfigError(
            f"the hybrid pattern {kinds[:80]} has layers {', '.join(strange)}, of which nothing is known. Use "
            f"{', '.join(known)}."
        )
    return tuple(known[kind] for kind in kinds)


def kinds_of_ratios(num_layers: int, attention: float, mlp: float) -> str:
    """Return the pattern that Megatron makes of ``--hybrid-attention-ratio`` and ``--hybrid-mlp-ratio``.

    Attention stands between equally long sections of other layers. Among those, an MLP ends each section, the last one
    included (core_v0.16.1 core/ssm/mamba_hybrid_layer_allocation.py, ``allocate_layers``). If a section ends in the
    middle of a layer, rounding errors decide in Megatron.
    """
    kinds, places = ["M"] * num_layers, [*range(num_layers)]
    for letter, ratio, ends in (("*", attention, 1), ("-", mlp, 0)):
        count = round(num_layers * ratio)
        section = (len(places) - count) / max(1, count + ends)
        found = [places[math.floor(number * section - 0.5) + number] for number in range(1, count + 1)]
        for place in found:
            kinds[place] = letter
        places = [place for place in places if place not in found]
    return "".join(kinds)


def _units(mlp: Mapping[str, Any], hidden_size: int, products: int) -> int:
    if mlp.get("no_op"):
        return 0
    if mlp.get("replace_with_linear"):
        return hidden_size // products
    if "ffn_hidden_size" in mlp:
        return int(mlp["ffn_hidden_size"])
    return -(-int(2 * mlp["ffn_mult"] * hidden_size / 3) // 256) * 256
