"""Attention with context parallelism, and within packed sequences, on a CPU, for which Transformer Engine has no build.

Megatron's own attention computes it, once each rank has all keys and values: they are gathered, and their gradients
are summed and given back. Each rank has two pieces of the sequence, one from each end, so that all have as much to do
(megatron core_v0.16.1 core/utils.py, ``get_batch_on_this_cp_rank``). Packed sequences are one long one to it, with a
mask: right, and as dear as that.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.upstream import seam_table, seams


def install() -> None:
    """Lets Megatron's own attention be context parallel, or within packed sequences, which it refuses to be."""
    seams.wrap(seam_table.DOT_PRODUCT_ATTENTION, _made)


def pieces(parts: int) -> list[int]:
    """The pieces of a sequence as its ``parts`` ranks have them, one rank's behind the other's."""
    return [piece for rank in range(parts) for piece in (rank, 2 * parts - 1 - rank)]


def _made(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    plain = copy.copy(config)
    plain.context_parallel_size = 1
    original(self, plain, *args, **kwargs)
    self.config = config
    if config.context_parallel_size > 1:
        softmax = self.scale_mask_softmax
        window, softmax.window_size = softmax.window_size, None  # it would be put over any mask
        self.forward = functools.partial(_attend, self.forward, self, window)
    else:
        self.forward = functools.partial(_attend_within, self.forward, self.scale_mask_softmax)


def _attend_within(
    original: Any,
    softmax: Any,
    query: Any,
    key: Any,
    value: Any,
    *args: Any,
    packed_seq_params: Any = None,
    **kwargs: Any,
) -> Any:
    """[tokens, heads, channels] of packed sequences to [tokens, 1, heads * channels]; others as ``original`` has it."""
    if packed_seq_params is None:
        return original(query, key, value, *args, **kwargs)
    ends = packed_seq_params.cu_seqlens_q_padded
    ends = packed_seq_params.cu_seqlens_q if ends is None else ends
    places = torch.arange(query.size(0))
    sequence = torch.bucketize(places, ends.long().flatten(), right=True)  # core_v0.16.1 has a row of it
    hidden = (sequence[:, None] != sequence) | (places[:, None] < places)
    if (window := softmax.window_size) is not None:
        from megatron.core.transformer.utils import get_sliding_window_causal_mask

        hidden |= get_sliding_window_causal_mask(query.size(0), query.size(0), window)
    kwargs.pop("attention_mask", None)
    softmax.window_size = None  # it would be put over any mask
    try:
        return original(*(one.unsqueeze(1) for one in (query, key, value)), hidden, *args[1:], **kwargs)
    finally:
        softmax.window_size = window


def _attend(
    original: Any,
    self: Any,
    window: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import get_sliding_window_causal_mask

    group = getattr(self.pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
    key, value = _whole(key, group), _whole(value, group)
    length = key.size(0)
    mine = torch.arange(length).view(2 * group.size(), -1)
    rows = mine[pieces(group.size())[2 * group.rank() :][:2]].flatten()
    if window is not None:
        attention_mask = get_sliding_window_causal_mask(length, length, window)[rows]
    elif attention_mask is None and self.attn_mask_type == AttnMaskType.causal:
        attention_mask = rows[:, None] < torch.arange(length)
    return original(query, key, value, attention_mask, *args, **kwargs)


def _whole(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[s, ...] in the order of the sequence, of which each rank of ``group`` has a part."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    gathered = gather_from_sequence_parallel_region(mine, group=group)
    order = pieces(group.size())
    at = [order.index(piece) for piece in range(len(order))]
    return gathered.unflatten(0, (len(order), -1))[at].flatten(0, 1)
