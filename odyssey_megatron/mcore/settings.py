"""The settings that have to be the same on all ranks, besides the job's shape: otherwise their numbers would differ, or
only some of them would evaluate or save, and nothing would say why. A node that starts, or joins, with other flags than
the rest is refused by them.

Paths are not among them: each node may have its own. Nor is all of Megatron's TransformerConfig: with fewer ranks in a
cell some of its values are others.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

_PLAIN = (bool, int, float, str, torch.dtype, Enum, type(None))
_OF_MODEL = (
    "seed", "attention_dropout", "hidden_dropout", "init_method_std", "norm_epsilon", "layernorm_epsilon",
    "rotary_base", "rotary_percent", "moe_router_topk", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "moe_z_loss_coeff", "moe_router_bias_update_rate", "calculate_per_token_loss",
)  # fmt: skip
_OF_LOOP = (
    "split", "dataloader_type", "reset_position_ids", "reset_attention_mask", "eod_mask_loss",
    "eval_interval", "eval_iters", "full_validation", "start_eval_at_iter", "save_interval",
    "non_persistent_save_interval", "async_save", "exit_interval", "exit_duration_in_mins",
)  # fmt: skip
"""What is read, and when all ranks do something together."""


def settings_of(
    flags: Any, optimizer_config: Any, schedule: Mapping[str, Any], **others: Any
) -> dict[str, str]:
    """Return name -> value, as text.

    What is no plain value (functions, groups) is left out: it has no text that all ranks share.

    Args:
        flags: what has Megatron's arguments: those of Megatron-LM, or a TransformerConfig.
        optimizer_config: Megatron's OptimizerConfig.
        schedule: that of the learning rate.
        others: more settings, by name.
    """
    given = {name: getattr(flags, name) for name in _OF_MODEL + _OF_LOOP if hasattr(flags, name)}
    named = {**given, **vars(optimizer_config), **schedule, **others}
    return {name: str(value) for name, value in named.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
