"""Which tokens of a sequence, or of packed ones, each context-parallel rank has: two pieces of each sequence, one from
each end, so that all ranks have as much to do.

Sources: megatron core_v0.16.1 core/utils.py, ``get_batch_on_this_cp_rank``; Transformer Engine's
``thd_get_partitioned_indices`` for packed ones, which asks for lengths that divide by twice the ranks.
"""

from __future__ import annotations

import torch


def places(ends: torch.Tensor, parts: int, rank: int) -> torch.Tensor:
    """The places of the tokens that ``rank`` of ``parts`` has, in its order.

    Args:
        ends: where sequences end, behind a 0: [sequences + 1].
    """
    if parts == 1:
        return torch.arange(int(ends[-1]), device=ends.device)
    begins, lengths = ends[:-1].tolist(), (ends.diff() // (2 * parts)).tolist()
    return torch.cat(
        [
            torch.arange(begin + piece * length, begin + (piece + 1) * length, device=ends.device)
            for begin, length in zip(begins, lengths, strict=True)
            for piece in (rank, 2 * parts - 1 - rank)
        ]
    )


def in_order(gathered: torch.Tensor, ends: torch.Tensor, parts: int, dim: int = 0) -> torch.Tensor:
    """Tokens in the order of their sequences, of which ``gathered`` has along ``dim`` one rank's behind the other's."""
    order = torch.cat([places(ends, parts, rank) for rank in range(parts)])
    return gathered.index_select(dim, order.argsort())
