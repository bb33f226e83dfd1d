"""What Transformer Engine's ``--moe-permute-fusion`` calls of its Triton kernels (2.11, pytorch/triton/permutation.py).

A map of rows, [rows, 2], says of each row that experts compute which token it is, and for which expert.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def make_row_id_map(routing_map: torch.Tensor, num_tokens: int, num_experts: int) -> torch.Tensor:
    """The rows expert by expert; ``routing_map`` [tokens, experts] says which tokens go where."""
    return routing_map.bool().t().nonzero().flip(1)


def permute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    scale: Any,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: Any,
) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    """The rows of ``inp`` [tokens, hidden], and their probabilities. Rows to which no token is sent stay as the kernel
    finds them: here they are no numbers, so that nothing may come of them.
    """
    token, expert = row_id_map.unbind(1)
    rows = inp.new_full((num_out_tokens, hidden_size), math.nan)
    rows[: len(token)] = inp[token]
    if probs is None:
        return rows, None, None
    of_rows = probs.new_full((num_out_tokens,), math.nan)
    of_rows[: len(token)] = probs[token, expert]
    return rows, None, of_rows


def unpermute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None,
    permuted_probs: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum of each token's rows, [tokens, hidden], each times its probability; and probabilities of rows as
    [tokens, experts].
    """
    token, expert = row_id_map.unbind(1)
    rows = inp[: len(token)].to(torch.promote_types(inp.dtype, torch.float32))
    rows = rows if merging_probs is None else rows * merging_probs[token, expert, None]
    tokens = rows.new_zeros(num_tokens, hidden_size).index_add_(0, token, rows).to(inp.dtype)
    if permuted_probs is None:
        return tokens, None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[token, expert] = permuted_probs[: len(token)]
    return tokens, probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: torch.Tensor,
    row_id_map: torch.Tensor,
    fwd_input: torch.Tensor,
    merging_probs: torch.Tensor,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the rows and of the probabilities."""
    token, expert = row_id_map.unbind(1)
    rows = torch.zeros_like(fwd_input)
    rows[: len(token)] = fwd_output_grad[token] * merging_probs[token, expert, None]
    probs = torch.zeros_like(merging_probs)
    probs[token, expert] = (fwd_output_grad[token] * fwd_input[: len(token)]).sum(dim=-1).to(probs.dtype)
    return rows, probs


def make_chunk_sort_map(
    split_sizes: torch.Tensor, sorted_indices: torch.Tensor, num_tokens: int, num_splits: int
) -> torch.Tensor:
    """Where each row goes when consecutive chunks are put into another order: 1-D."""
    chunks = torch.split(torch.arange(num_tokens), split_sizes.tolist())
    return torch.argsort(torch.cat([chunks[one] for one in sorted_indices.tolist()]))


def sort_chunks_by_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Put rows, and probabilities, into that order, or back."""
    at = torch.argsort(row_id_map) if is_forward else row_id_map
    return inp[at], None if probs is None else probs[at]
