"""The sums of gradients over their holders, beside what is left to compute.

Nothing is added to the gradients themselves before a sum is whole: it is made in a copy, piece by piece. Where the
program has ended the copies and the gradients change places. So a worker's own gradients are there until the step is
committed, and a failure, whenever it comes, costs nobody what he has added up; unless memory was short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from odyssey_megatron.execute.ledger import Ledger
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.plan.schedule import Instr

PIECE = 2**25
"""Elements that are summed at once: 128 MB of float32."""

ROOM_BYTES = 2**29
"""Of copies. A sum for which there is no room waits for the oldest one, which then takes the place of the gradients."""


class _Piece(NamedTuple):
    """Of the gradients of ``instr``, on its way."""

    instr: Instr
    gradients: torch.Tensor
    total: torch.Tensor
    work: Any


class Reduction:
    """Of one worker; over ``tensor_group`` is summed first what each rank of its cell has computed in part."""

    def __init__(self, ledger: Ledger, tensor_group: dist.ProcessGroup | None):
        self._ledger, self._tensor_group = ledger, tensor_group
        self._under_way: deque[_Piece] = deque()
        self._bytes = 0

    def start(
        self,
        instr: Instr,
        gradients: Sequence[tuple[torch.Tensor, dist.ProcessGroup | None]],
        partial: Sequence[torch.Tensor],
        share: float,
        progress: Progress,
    ) -> None:
        """``gradients`` come with the group of their holders, None where there is one; they are multiplied with
        ``share`` before they are summed. Those of ``partial`` are views of them.
        """
        in_cell = self._summed_in_cell(partial, share) if self._tensor_group is not None else []
        for buffer, group in gradients:
            if group is None and share == 1.0 and not in_cell:
                continue
            for piece in torch.split(buffer, PIECE):
                while self._under_way and self._bytes + piece.nbytes > ROOM_BYTES:
                    self._end(self._under_way.popleft(), progress, keeps=False)
                total = piece * share
                for view, values in zip(partial, in_cell, strict=False):
                    _overwrite(piece, total, view, values)
                work = dist.all_reduce(total, group=group, async_op=True) if group is not None else None
                self._under_way.append(_Piece(instr, piece, total, work))
                self._bytes += total.nbytes

    def finish(self, progress: Progress) -> list[Instr]:
        """Behind it the gradients are the sums. Returns those that were still under way, each once."""
        found = dict.fromkeys(one.instr for one in self._under_way)
        while self._under_way:
            self._end(self._under_way.popleft(), progress, keeps=True)
        return [*found]

    def abandon(self) -> None:
        """Lets go of sums that will not become whole."""
        self._under_way.clear()
        self._bytes = 0

    def _end(self, piece: _Piece, progress: Progress, *, keeps: bool) -> None:
        if piece.work is not None:
            piece.work.wait()
        word = self._ledger.word()
        before = piece.gradients.clone() if keeps and progress.keeps else None
        progress.summed(piece.instr, word, piece.gradients, before)
        piece.gradients.copy_(
            piece.total if word is None else torch.where(word > 0, piece.total, piece.gradients)
        )
        self._bytes -= piece.total.nbytes

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
