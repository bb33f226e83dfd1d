"""A layer's numbers one behind the other, as a rank of a whole cell has them: optimizer slices are spans of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from odyssey_megatron.cluster.cell import Each
from odyssey_megatron.mcore.model.experts import in_whole, is_spread, of_one_rank
from odyssey_megatron.plan.slices import EVERYTHING, Span, elements


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor of several parts is put together from theirs."""

    each: int = 1
    """Parts."""
    dim: int | None = None
    """Along which one comes behind the other; None: all of them have it alike."""
    stride: int = 1
    """Pieces of a part that lie apart, such as the gate and what it lets through: the first pieces of all parts come
    before the second ones (Megatron's ``partition_stride``).
    """

    @classmethod
    def of(cls, parameter: torch.Tensor, each: int) -> Cut:
        """Of a parameter of a layer of Megatron's, or a tensor of its shape.

        Megatron marks what it cuts: core_v0.16.1 core/tensor_parallel/layers.py,
        ``set_tensor_model_parallel_attributes``.
        """
        if each == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return cls(each)
        return cls(each, dim=parameter.partition_dim, stride=parameter.partition_stride)  # type: ignore[attr-defined]

    def _pieces(self, merged: torch.Tensor, number: int) -> torch.Tensor:
        """A view of the pieces of part ``number``: [..., stride, length of a piece, ...]."""
        assert self.dim is not None
        return torch.unflatten(merged, self.dim, (self.stride, self.each, -1)).select(self.dim + 1, number)

    def part(self, merged: torch.Tensor, number: int) -> torch.Tensor:
        """Part ``number`` of those in ``merged``, in the shape that it has in a whole cell: a view, or a copy where its
        pieces lie apart.
        """
        if self.dim is None or self.each == 1:
            return merged
        return self._pieces(merged, number).flatten(self.dim, self.dim + 1)

    def put(self, merged: torch.Tensor, number: int, part: torch.Tensor) -> None:
        """Part ``number`` of ``merged`` is ``part`` from now on. What all parts have alike is that of the first."""
        if self.dim is None or self.each == 1:
            if number == 0 and part.data_ptr() != merged.data_ptr():
                merged.copy_(part)
            return
        if part.untyped_storage().data_ptr() != merged.untyped_storage().data_ptr():  # else it is a view
            self._pieces(merged, number).copy_(torch.unflatten(part, self.dim, (self.stride, -1)))


class Range(NamedTuple):
    """Of a parameter of a layer the numbers ``[start, stop)``, as a part of it has them."""

    name: str
    """Its own."""
    in_whole: str
    """That of a whole cell's."""
    part: int | None
    """The number of the part, among those of the rank, if it is of that one alone."""
    parameter: torch.nn.Parameter
    cut: Cut
    start: int
    stop: int
    span: Span
    """That they belong to."""

    @property
    def text(self) -> str:
        """A name."""
        return f"{self.in_whole}[{self.start}:{self.stop}]"

    def of_part(self, merged: torch.Tensor, number: int) -> torch.Tensor:
        """These numbers of part ``number`` of a tensor like the parameter, 1-D; a copy where they lie apart."""
        return self.cut.part(merged.data, number).reshape(-1)[self.start : self.stop]

    def put(self, merged: torch.Tensor, number: int, numbers: torch.Tensor) -> None:
        """The other way round."""
        part = self.cut.part(merged.data, number)
        flat = part.reshape(-1)
        flat[self.start : self.stop].copy_(numbers)
        self.cut.put(merged.data, number, flat.view(part.shape))

    def together(self, merged: torch.Tensor) -> torch.Tensor:
        """These numbers of all parts: a view where there is one, else a copy."""
        if self.parts == 1:
            return self.of_part(merged, 0)
        return torch.cat([self.of_part(merged, number) for number in range(self.parts)])

    @property
    def parts(self) -> int:
        """Of the parameter, that are not alike."""
        return self.cut.each if self.cut.dim is not None else 1


def ranges(layer: Any, each: Each, spans: Iterable[Span], part: int | None = None) -> Iterator[Range]:
    """Which numbers of a held ``layer``, of a rank with ``each`` of it, are in ``spans``: of all its parts, or of the
    one of that number.

    Experts that are spread over ranks are a row of numbers of their own: their holders are others.
    """
    spans = list(spans)
    for kinds, begins in _rows(layer, each):
        for span in spans:
            low, high = elements(span, begins[-1])
            at = bisect_right(begins, low) - 1
            while at < len(kinds) and begins[at] < high:
                start, stop = max(low, begins[at]), min(high, begins[at + 1])
                for one in kinds[at] if start < stop else ():
                    if part is None or one.part in (None, part):
                        yield one._replace(start=start - begins[at], stop=stop - begins[at], span=span)
                at += 1


_Row = tuple[list[list[Range]], list[int]]
"""Parameters, of experts those of each part together, and where each begins; last, where the row ends."""


def _rows(layer: Any, each: Each) -> list[_Row]:
    known: dict[Each, list[_Row]] = layer.__dict__.setdefault("flat_rows", {})
    if each not in known:
        rows: list[_Row] = [([], [0]), ([], [0])]
        for _, kind in sorted(_by_name_in_whole(layer, each).items()):
            kinds, begins = rows[is_spread(kind[0].parameter)]
            kinds.append(kind)
            begins.append(begins[-1] + kind[0].parameter.numel() // kind[0].parts)
        known[each] = rows
    return known[each]


def _by_name_in_whole(layer: Any, each: Each) -> dict[str, list[Range]]:
    found: dict[str, list[Range]] = {}
    for name, parameter in layer.named_parameters():
        part, in_whole_cell = None, name
        if is_spread(parameter) and each.experts > 1:
            part, in_whole_cell = in_whole(name, of_one_rank(layer.config))
        cut = Cut.of(parameter, each.shards)
        one = Range(name, in_whole_cell, part, parameter, cut, 0, parameter.numel(), EVERYTHING)
        found.setdefault(in_whole_cell, []).append(one)
    return {name: sorted(kind, key=lambda one: one.part or 0) for name, kind in found.items()}
