"""Which tokens of a sequence, or of packed ones, each context-parallel rank has: two pieces of each sequence, one from
each end, so that all ranks have as much to do.

Sources: megatron core_v0.16.1 core/utils.py, ``get_batch_on_this_cp_rank``; Transformer Engine's
``thd_get_partitioned_indices`` for packed ones, which asks for lengths that divide by twice the ranks.
"""

from __future__ import annotations

import torch


def places(ends: torch.Tensor, count: int, parts: int, rank: int) -> torch.Tensor:
    """The places of the tokens that ``rank`` of ``parts`` has, in its order. No host waits to know ``ends``.

    Args:
        ends: where sequences end, behind a 0: [sequences + 1].
        count: tokens of all sequences.
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
    """Tokens in the order of their sequences, of which ``gathered`` has along ``dim`` one rank's behind the other's."""
    count = gathered.size(dim)
    order = torch.cat([places(ends, count, parts, rank) for rank in range(parts)])
    return gathered.index_select(dim, order.argsort())
