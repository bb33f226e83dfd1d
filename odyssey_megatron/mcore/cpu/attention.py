"""Attention with context parallelism, and within packed sequences, on a CPU, for which Transformer Engine has no build.

Megatron's own attention computes it once each rank has all keys and values: they are gathered, and their gradients are
summed and distributed. Packed sequences are computed as one long sequence with a mask, which is correct, but costs as
much as one.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.mcore.contexts import in_order, places
from odyssey_megatron.upstream import cpu_seams, seams


def install() -> None:
    """Let Megatron's own attention work with context parallelism and packed sequences, which it refuses otherwise."""
    seams.wrap(cpu_seams.DOT_PRODUCT_ATTENTION, _made)
    for seam in (cpu_seams.GET_SFT_BATCH_ON_THIS_CP_RANK, cpu_seams.GET_BATCH_PER_DOCUMENT):
        seams.wrap(seam, _dealt)


def _made(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    plain = copy.copy(config)
    plain.context_parallel_size = 1
    original(self, plain, *args, **kwargs)
    self.config = config
    if config.log_max_attention_logit:
        self.current_max_attn_logits = None
        self.scale_mask_softmax.register_forward_pre_hook(functools.partial(_measure, self))
    self.forward = functools.partial(_attend, self.forward, self)


def _attend(
    original: Any,
    self: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *args: Any,
    packed_seq_params: Any = None,
    **kwargs: Any,
) -> Any:
    """Attention from [tokens, rows, heads, channels] to [tokens, rows, heads * channels]; no rows if sequences are
    packed.
    """
    from megatron.core.transformer.enums import AttnMaskType

    softmax, parts = self.scale_mask_softmax, self.config.context_parallel_size
    if packed_seq_params is None and parts == 1:
        return original(query, key, value, attention_mask, *args, **kwargs)
    group, count = _context(self) if parts > 1 else None, key.size(0) * parts
    if packed_seq_params is None:
        ends = torch.arange(2, device=key.device) * count
    else:
        ends = _ends(packed_seq_params)
        query, key, value = (one.unsqueeze(1) for one in (query, key, value))
    if group is not None:
        key, value = (in_order(_gathered(one, group), ends, parts) for one in (key, value))
    rows = places(ends, count, parts, 0 if group is None else group.rank())
    window, softmax.window_size = softmax.window_size, None  # it would replace any mask
    is_causal = attention_mask is None and self.attn_mask_type == AttnMaskType.causal
    if packed_seq_params is not None or window is not None or is_causal:
        attention_mask = _hidden(ends, count, window)[rows]
    try:
        return original(query, key, value, attention_mask, *args, **kwargs)
    finally:
        softmax.window_size = window


def _measure(self: Any, softmax: Any, given: Any) -> None:
    """Record the largest logit of each head, as Transformer Engine does with ``--log-max-attention-logit``."""
    scores, hidden = given[:2]
    if hidden is None or softmax.window_size is not None:
        count = scores.size(3)
        ends = torch.arange(2, device=scores.device) * count
        hidden = _hidden(ends, count, softmax.window_size)
    seen, before = (
        scores.detach().masked_fill(hidden, -torch.inf).amax((0, 2, 3)),
        self.current_max_attn_logits,
    )
    self.current_max_attn_logits = seen if before is None else torch.maximum(seen, before)


def _ends(packed_seq_params: Any) -> torch.Tensor:
    ends = packed_seq_params.cu_seqlens_q_padded
    ends = packed_seq_params.cu_seqlens_q if ends is None else ends
    flat: torch.Tensor = ends.long().flatten()  # core_v0.16.1 has an additional dimension of 1
    return flat


def _hidden(ends: torch.Tensor, length: int, window: Any) -> torch.Tensor:
    """Whether a token of the sequences does not see another one: [tokens, tokens], bool."""
    from megatron.core.transformer.utils import get_sliding_window_causal_mask

    tokens = torch.arange(length, device=ends.device)
    sequence = torch.bucketize(tokens, ends, right=True)
    later = tokens[:, None] < tokens
    hidden = later if window is None else get_sliding_window_causal_mask(length, length, window)
    return hidden | (sequence[:, None] != sequence)


def _context(self: Any) -> dist.ProcessGroup:
    from megatron.core import parallel_state

    own: dist.ProcessGroup | None = getattr(self.pg_collection, "cp", None)
    return own or parallel_state.get_context_parallel_group()


def _gathered(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tokens of all ranks of ``group``, one rank's after another's: [tokens, ...]."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    gathered: torch.Tensor = gather_from_sequence_parallel_region(mine, group=group)
    return gathered


def _dealt(original: Any, batch: Any, cp_group: dist.ProcessGroup) -> Any:
    """This rank's tokens of a ``batch`` of packed sequences, which on a GPU Transformer Engine would find."""
    ends = batch["cu_seqlens"] if batch["cu_seqlens_padded"] is None else batch["cu_seqlens_padded"]
    mine = places(ends[0], int(ends[0, -1]), cp_group.size(), cp_group.rank())
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        if batch[key] is not None:
            batch[key] = batch[key].index_select(1, mine)
    return batch
