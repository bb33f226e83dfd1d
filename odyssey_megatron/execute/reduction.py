"""The sums of gradients over their holders, made beside what is left to compute.

Nothing is added to the gradients themselves before a sum is complete: it is made in a copy, piece by piece.
When the program has ended the copies and the gradients change places. So a worker's own gradients are kept
until the step is committed, and a failure at any time costs no worker what it has added up, unless memory was
short.
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
from odyssey_megatron.execute.scatter import GradientRows, Slices
from odyssey_megatron.plan.schedule import Instr

PIECE = 2**25
"""Number of elements that are summed at once: 128 MB of float32."""

ROOM_BYTES = 2**29
"""The most bytes of copies. A sum without room waits for the oldest one, which then replaces its gradients."""


class _Piece(NamedTuple):
    """A sum of gradients of ``instr`` that is under way."""

    instr: Instr
    gradients: Sequence[torch.Tensor]
    totals: Sequence[torch.Tensor]
    """The sum that each gradient becomes."""
    work: Any
    num_bytes: int
    """Bytes of all that is kept for the sum."""


class Summands(NamedTuple):
    """What one rank adds to the sums of a block's gradients."""

    gradients: Sequence[torch.Tensor]
    """1-D each."""
    slices: Sequence[Slices] = ()
    """All of ``gradients`` once more as slices, where no holder needs all of the sums."""
    partial: Sequence[torch.Tensor] = ()
    """Views of those ``gradients`` of which each tensor-parallel rank has only a part of the sum."""


class Reduction:
    """The sums of one worker. What the ranks of its cell have computed in part is summed over
    ``tensor_group`` first.
    """

    def __init__(self, ledger: Ledger, tensor_group: dist.ProcessGroup | None):
        self._ledger, self._tensor_group = ledger, tensor_group
        self._under_way: deque[_Piece] = deque()
        self._scattered: list[tuple[Instr, GradientRows]] = []
        """Rows whose sums other ranks need, too, and get when all sums are made."""
        self._to_pass: list[tuple[Instr, GradientRows, torch.Tensor, range]] = []
        """Sums that other ranks get before the group's next sum. The range is the part of each rank's row."""
        self._bytes = 0

    def start(
        self,
        instr: Instr,
        own: Summands,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        share: float,
        progress: Progress,
    ) -> None:
        """Start to sum ``own`` gradients, multiplied by ``share``. What is ``partial`` is summed in the cell first.

        Args:
            group: The group of their holders; None if there is only one.
            ranks: For each holder, the number of its ranks in the group.
        """
        in_cell = self._summed_in_cell(own.partial, share) if self._tensor_group is not None else []
        if group is None and share == 1.0 and not in_cell:
            return
        known = [*zip(own.partial, in_cell, strict=False)]
        if group is not None and any(each.views for each in own.slices):
            self._scatter(instr, GradientRows(own.slices, ranks, group), known, share, progress)
            return
        for piece in (piece for buffer in own.gradients for piece in torch.split(buffer, PIECE)):
            self._make_room(piece.nbytes, progress)
            total = piece * share
            for view, values in known:
                _overwrite(piece, total, view, values)
            work = dist.all_reduce(total, group=group, async_op=True) if group is not None else None
            self._under_way.append(_Piece(instr, [piece], [total], work, total.nbytes))
            self._bytes += total.nbytes

    def _scatter(
        self,
        instr: Instr,
        rows: GradientRows,
        in_cell: Sequence[tuple[torch.Tensor, torch.Tensor]],
        share: float,
        progress: Progress,
    ) -> None:
        each = max(1, PIECE // rows.group.size())
        # On gloo, operations of one group may overtake each other, so that nothing is passed on early there.
        # Elsewhere the group's last sums are passed on now. Right behind those sums it would have been too
        # early: on a single hardware queue everything behind would have waited for them.
        passes_on = rows.passes_on and bool(self._ledger)
        self._pass_on(rows.group)
        for low in range(0, rows.width, each):
            high = min(low + each, rows.width)
            self._make_room((high - low) * rows.group.size() * rows.element_bytes, progress)
            packed = rows.packed(low, high, share)
            for piece, total in rows.views(packed, low, high) if in_cell else ():
                for view, values in in_cell:
                    _overwrite(piece, total, view, values)
            sums, work = rows.sum(packed)
            own = rows.own(low, high)
            totals = [sums[at : at + view.numel()] for at, view in own]
            self._under_way.append(_Piece(instr, [view for _, view in own], totals, work, packed.nbytes))
            self._bytes += packed.nbytes
            if passes_on:
                self._to_pass.append((instr, rows, sums, range(low, high)))
        if not passes_on:
            self._scattered.append((instr, rows))

    def _pass_on(self, group: dist.ProcessGroup | None = None) -> None:
        """Send the sums that are due in ``group``, or in any, to the ranks that need them, in the order of
        all buckets.
        """
        waiting, self._to_pass = self._to_pass, []
        for one in waiting:
            instr, rows, sums, where = one
            if group is not None and rows.group is not group:
                self._to_pass.append(one)
                continue
            pairs, work = rows.pass_on(sums, where.start, where.stop)
            totals = [total for _, total in pairs]
            num_bytes = sum(total.nbytes for total in totals)
            self._under_way.append(_Piece(instr, [view for view, _ in pairs], totals, work, num_bytes))
            self._bytes += num_bytes

    def _make_room(self, num_bytes: int, progress: Progress) -> None:
        while self._under_way and self._bytes + num_bytes > ROOM_BYTES:
            self._end(self._under_way.popleft(), progress, keeps=False)

    def finish(self, progress: Progress) -> list[Instr]:
        """Wait for all sums. Then the gradients are the sums, where this rank needs them.

        Returns:
            The instructions whose sums were still under way, each once.
        """
        self._pass_on()
        scattered, self._scattered = self._scattered, []
        found = dict.fromkeys([one.instr for one in self._under_way] + [instr for instr, _ in scattered])
        while self._under_way:
            self._end(self._under_way.popleft(), progress, keeps=True)
        for instr, rows in scattered:  # in the one order of all buckets
            pairs = rows.exchange()
            self._put(instr, [one for one, _ in pairs], [total for _, total in pairs], progress, keeps=True)
        return [*found]

    def abandon(self) -> None:
        """Let go of sums that will not be completed."""
        self._under_way.clear()
        self._scattered.clear()
        self._to_pass.clear()
        self._bytes = 0

    def _end(self, piece: _Piece, progress: Progress, *, keeps: bool) -> None:
        if piece.work is not None:
            piece.work.wait()
        self._put(piece.instr, piece.gradients, piece.totals, progress, keeps=keeps)
        self._bytes -= piece.num_bytes

    def _put(
        self,
        instr: Instr,
        gradients: Sequence[torch.Tensor],
        totals: Sequence[torch.Tensor],
        progress: Progress,
        *,
        keeps: bool,
    ) -> None:
        word = self._ledger.word()
        for one, total in zip(gradients, totals, strict=True):
            before = one.clone() if keeps and progress.keeps else None
            progress.summed(instr, word, one, before)
            one.copy_(total if word is None else torch.where(word > 0, total, one))

    def _summed_in_cell(self, partial: Sequence[torch.Tensor], share: float) -> list[torch.Tensor]:
        """Sum within the cell first: then the sum over the holders leaves the same bytes on all of its ranks."""
        if not partial:
            return []
        flat = _flatten_dense_tensors(partial) * share  # type: ignore[no-untyped-call]
        dist.all_reduce(flat, group=self._tensor_group)
        return list(_unflatten_dense_tensors(flat, partial))  # type: ignore[no-untyped-call]


def _overwrite(piece: torch.Tensor, total: torch.Tensor, view: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` into ``total``, the sum of ``piece``, where ``view`` and ``piece`` overlap in memory."""
    if view.untyped_storage().data_ptr() != piece.untyped_storage().data_ptr():
        return
    start = view.storage_offset() - piece.storage_offset()
    low, high = max(start, 0), min(start + view.numel(), piece.numel())
    if low < high:
        total[low:high] = values.reshape(-1)[low - start : high - start]
