"""The tokens that each context-parallel rank has of a sequence, or of packed sequences: two pieces of each, one from
each end, so that all ranks have the same amount of work.

Sources: megatron core_v0.16.1 core/utils.py, ``get_batch_on_this_cp_rank``; for packed sequences Transformer Engine's
``thd_get_partitioned_indices``, which requires lengths that are multiples of twice the number of ranks.
"""

from __future__ import annotations

import torch


def places(ends: torch.Tensor, count: int, parts: int, rank: int) -> torch.Tensor:
    """The positions of the tokens that ``rank`` of ``parts`` has, in its order: 1-D. The host does not wait for
    ``ends``.

    Args:
        ends: 0, then the end of each sequence: [sequences + 1].
        count: the number of tokens of all sequences.
    """
    own = torch.arange(count // parts, dtype=ends.dtype, device=ends.device)
    if parts == 1:
        return own
    sequence = torch.bucketize(own, ends[1:] // parts, right=True)
    begin, length = ends[sequence], ends.diff()[sequence] // (2 * parts)
    within = own - begin // parts
    piece = torch.where(within < length, rank, 2 * parts - 1 - rank)
    return begin + piece * length + within % length


def in_order(gathered: torch.Tensor, ends: torch.Tensor, parts: int, dim: int = 0) -> torch.Tensor:
    """The tokens in the order of their sequences; ``gathered``, of any shape, has the tokens of one rank after
    another's along ``dim``. ``ends``: [sequences + 1], where each begins, and the end of the last.
    """
    count = gathered.size(dim)
    order = torch.cat([places(ends, count, parts, rank) for rank in range(parts)])
    return gathered.index_select(dim, order.argsort())
