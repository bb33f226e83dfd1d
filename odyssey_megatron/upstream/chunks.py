"""The model chunks that ``--pipeline-model-parallel-layout`` describes, without Megatron."""

from __future__ import annotations

import re

_TIMES = r"\(([^)]+)\)\*(\d{1,3})", r"(.)\*(\d{1,3})"
"""As in core_v0.16.1 megatron/core/transformer/pipeline_parallel_layer_layout.py, ``parse_str_to_list``."""


def chunks_of(layout: str) -> list[str]:
    """Return the layers of each chunk, a letter each: E (embedding), t (decoder), m (multi-token prediction), L (loss).

    The chunks of a stage are as many apart as there are stages. Empty if there are other letters: Megatron refuses
    them, and they may be a variable of a launch script.
    """
    text = layout.replace(",", "").replace("\\", "")  # a launch script may escape them
    for times in _TIMES:
        text = re.sub(times, lambda found: found[1] * int(found[2]), text)
    return text.split("|") if {*text} <= {*"EtmL|"} else []
