"""The sum of a block's gradients over its holders.

Nothing is added to the gradients themselves before a sum is whole: it is made in a copy, piece by piece, and copied
back. As long as a holder is missing no sum becomes whole, and a failure costs nobody what he has added up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from odyssey_megatron.execute.ledger import Ledger, Word

PIECE = 2**25
"""Elements that are summed at once, and of which there are two copies at a time: 128 MB each of float32."""


class Reduction:
    """Of one worker; over ``tensor_group`` is summed first what each rank of its cell has computed in part."""

    def __init__(self, ledger: Ledger, tensor_group: dist.ProcessGroup | None):
        self._ledger, self._tensor_group = ledger, tensor_group

    def run(
        self,
        gradients: Sequence[tuple[torch.Tensor, dist.ProcessGroup | None]],
        partial: Sequence[torch.Tensor],
        share: float,
        summed: Callable[[Word], None],
    ) -> None:
        """In place. ``gradients`` come with the group of their holders, None where there is one; they are multiplied
        with ``share`` before they are summed. ``summed`` hears of each piece when it is copied back.
        """
        in_cell = self._summed_in_cell(partial, share) if self._tensor_group is not None else []
        under_way: deque[tuple[torch.Tensor, torch.Tensor, Any]] = deque()
        for buffer, group in gradients:
            if group is None and share == 1.0 and not in_cell:
                continue
            for piece in torch.split(buffer, PIECE):
                total = piece * share
                for view, values in zip(partial, in_cell, strict=False):
                    _overwrite(piece, total, view, values)
                work = dist.all_reduce(total, group=group, async_op=True) if group is not None else None
                under_way.append((piece, total, work))
                if len(under_way) > 1:
                    self._finish(*under_way.popleft(), summed)
        while under_way:
            self._finish(*under_way.popleft(), summed)

    def _finish(
        self, piece: torch.Tensor, total: torch.Tensor, work: Any, summed: Callable[[Word], None]
    ) -> None:
        if work is not None:
            work.wait()
        word = self._ledger.word()
        summed(word)
        piece.copy_(total if word is None else torch.where(word > 0, total, piece))

    def _summed_in_cell(self, partial: Sequence[torch.Tensor], share: float) -> list[torch.Tensor]:
        """First within each cell: then the sum over the holders leaves the same bytes on all of them."""
        if not partial:
            return []
        flat = _flatten_dense_tensors(partial) * share  # type: ignore[no-untyped-call]
        dist.all_reduce(flat, group=self._tensor_group)
        return list(_unflatten_dense_tensors(flat, partial))  # type: ignore[no-untyped-call]


def _overwrite(piece: torch.Tensor, total: torch.Tensor, view: torch.Tensor, values: torch.Tensor) -> None:
    """Where ``view`` and ``piece`` overlap in memory, ``values`` go into ``total``, which is for ``piece``."""
    if view.untyped_storage().data_ptr() != piece.untyped_storage().data_ptr():
        return
    start = view.storage_offset() - piece.storage_offset()
    low, high = max(start, 0), min(start + view.numel(), piece.numel())
    if low < high:
        total[low:high] = values.reshape(-1)[low - start : high - start]
