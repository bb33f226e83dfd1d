"""Sums of gradients of which each holder needs some slices only: where they lie, and who exchanges them.

The slices of a bucket's layers are put one behind the other, ordered by who keeps them first. So each rank has a
row; all rows are as long as the longest. A reduce-scatter sums the rows and leaves each rank the sums of its own. The
rank then sends them to the others that keep them. Where they lie in the order of these others, they are sent as they
are, without waiting for them (:attr:`GradientRows.passes_on`). All keepers of a slice have one rank's sums of it, and
so the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from odyssey_megatron.plan.placing.stretches import Seats

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Slices(NamedTuple):
    """Slices of gradients that have the same owners, in the same order on all holders."""

    owners: tuple[int, ...]
    """The numbers of the holders that keep these slices, the first owner first."""
    views: Sequence[torch.Tensor]
    """This rank's gradients, as 1-D views."""
    stretch: int = 0
    """Which stretch they are of: one rank of each owner keeps it (``plan/placing/stretches.py``)."""
    stretches: int = 1
    """The number of stretches, the same in all slices."""


class _Piece(NamedTuple):
    start: int
    """Its place in the row."""
    owners: tuple[int, ...]
    """The numbers in the group of the ranks that keep it."""
    view: torch.Tensor


class GradientRows:
    """The gradients of one bucket in their rows, for one ``group`` of their holders."""

    def __init__(self, slices: Sequence[Slices], ranks: Sequence[int], group: dist.ProcessGroup):
        """Put the slices in rows; ``ranks``: for each holder, the number of its ranks in the ``group``."""
        seats, size = Seats(ranks, slices[0].stretches), sum(ranks)
        self.group = group
        self._rows: list[list[_Piece]] = [[] for _ in range(size)]
        lengths = [0] * size
        self.passes_on = max(len(one.owners) for one in slices) == 2
        """Whether each rank's sums can be passed on piece by piece as they are: no slice has more than one other
        owner.
        """
        kept = [(tuple(seats.keeping(owner, one.stretch) for owner in one.owners), one) for one in slices]
        for owners, one in sorted(kept, key=lambda pair: pair[0][1:] or (size,)):
            row = owners[0]
            for view in one.views:
                self._rows[row].append(_Piece(lengths[row], owners, view))
                lengths[row] += view.numel()
        self.width = max(lengths)
        """Number of elements that one rank sums."""
        self._me = group.rank()

    @property
    def element_bytes(self) -> int:
        return next(piece.view.element_size() for row in self._rows for piece in row)

    def _within(self, rank: int, low: int, high: int, keeper: int = -1) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (where, view) of what is in ``[low, high)`` of the row of ``rank``, and is kept by ``keeper``.

        A negative ``keeper`` stands for any.
        """
        for piece in self._rows[rank]:
            if keeper < 0 or keeper in piece.owners:
                start = max(piece.start, low)
                stop = min(piece.start + piece.view.numel(), high)
                if start < stop:
                    yield start - low, piece.view[start - piece.start : stop - piece.start]

    def packed(self, low: int, high: int, share: float) -> torch.Tensor:
        """Return what is in ``[low, high)`` of the row of each rank, times ``share``: [ranks, high - low]."""
        some = next(piece.view for row in self._rows for piece in row)
        rows = some.new_empty(self.group.size(), high - low)
        for rank, row in enumerate(rows):
            end = 0
            for at, view in self._within(rank, low, high):
                end = at + view.numel()
                torch.mul(view, share, out=row[at:end])
            row[end:].zero_()  # a row has no gaps
        return rows

    def own(self, low: int, high: int) -> list[tuple[int, torch.Tensor]]:
        """Return (where, view) of what this rank sums in ``[low, high)`` of its row."""
        return [*self._within(self._me, low, high)]

    def views(self, rows: torch.Tensor, low: int, high: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of a gradient and its place in ``rows``, which :meth:`packed` gave."""
        for rank, row in enumerate(rows):
            for at, view in self._within(rank, low, high):
                yield view, row[at : at + view.numel()]

    def sum(self, rows: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Return this rank's sums of what :meth:`packed` gave. They are there when the work has been waited for."""
        found = rows.new_empty(rows.shape[1])
        return found, _reduce_scatter(found, rows.view(-1), group=self.group, async_op=True)

    def pass_on(
        self, sums: torch.Tensor, low: int, high: int
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], dist.Work]:
        """Send the ``sums`` of ``[low, high)``, which :meth:`sum` gave, to the others that keep them. Collective.

        Only where :attr:`passes_on`. A device comes to it behind that sum, for which no host need have
        waited. Returns pairs of a gradient and its sum, which is there when the work returned has been waited
        for.
        """
        others = [other for other in range(self.group.size()) if other != self._me]
        sent, come = [0] * self.group.size(), [0] * self.group.size()
        views = []
        for other in others:
            sent[other] = sum(view.numel() for _, view in self._within(self._me, low, high, other))
            own = [view for _, view in self._within(other, low, high, self._me)]
            come[other] = sum(view.numel() for view in own)
            views += own
        taken = sums.new_empty(sum(come))
        work = dist.all_to_all_single(taken, sums[: sum(sent)], come, sent, group=self.group, async_op=True)
        return [*zip(views, torch.split(taken, [view.numel() for view in views]), strict=True)], work

    def exchange(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Send this rank's sums to the others that keep them; collective.

        Returns pairs of a gradient and the sum of it that has come from another rank. The gradients are not
        changed yet.
        """
        size = self.group.size()
        sent = [self._between(self._me, other) for other in range(size)]
        come = [self._between(other, self._me) for other in range(size)]
        flat = [view for views in sent for view in views]
        some = next(piece.view for row in self._rows for piece in row)
        given = torch.cat(flat) if flat else some.new_empty(0)
        to_come, to_send = ([sum(view.numel() for view in views) for views in each] for each in (come, sent))
        taken = given.new_empty(sum(to_come))
        dist.all_to_all_single(taken, given, to_come, to_send, group=self.group)
        views = [view for views in come for view in views]
        return [*zip(views, torch.split(taken, [view.numel() for view in views]), strict=True)]

    def _between(self, source: int, target: int) -> list[torch.Tensor]:
        if source == target:
            return []
        return [view for _, view in self._within(source, 0, self.width, target)]
