"""The settings that have to be the same on all ranks, besides the job's shape: otherwise their numbers would differ,
and nothing would say so. A node that starts, or joins, with other flags than the rest is refused by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

_PLAIN = (bool, int, float, str, torch.dtype, Enum, type(None))


def settings_of(optimizer_config: Any, schedule: Mapping[str, Any], seed: int) -> dict[str, str]:
    """Return name -> value, as text, of Megatron's OptimizerConfig and schedule.

    What is no plain value (functions, groups) is left out: it has no text that all ranks share. So is Megatron's
    TransformerConfig: with fewer ranks in a cell some of its values are others.
    """
    named = {**vars(optimizer_config), **schedule, "seed": seed}
    return {name: str(value) for name, value in named.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
