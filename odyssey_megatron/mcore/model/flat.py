"""A layer's numbers one behind the other, as a rank of a whole cell has them: optimizer slices are spans of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from odyssey_megatron.mcore.model.experts import is_spread
from odyssey_megatron.plan.slices import Span, elements


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
    parameter: torch.nn.Parameter
    cut: Cut
    start: int
    stop: int
    span: Span
    """That they belong to."""

    @property
    def text(self) -> str:
        """A name."""
        return f"{self.name}[{self.start}:{self.stop}]"

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


def ranges(layer: Any, each: int, spans: Iterable[Span]) -> Iterator[Range]:
    """Which numbers of a held ``layer``, of a rank with ``each`` parts of it, are in ``spans``.

    Experts that are spread over ranks are a row of numbers of their own: their holders are others.
    """
    spans = list(spans)
    for parameters, begins in _rows(layer, each):
        for span in spans:
            low, high = elements(span, begins[-1])
            at = bisect_right(begins, low) - 1
            while at < len(parameters) and begins[at] < high:
                start, stop = max(low, begins[at]), min(high, begins[at + 1])
                if start < stop:
                    yield Range(*parameters[at], start - begins[at], stop - begins[at], span)
                at += 1


_Row = tuple[list[tuple[str, torch.nn.Parameter, Cut]], list[int]]
"""Parameters, and where each begins; last, where the row ends."""


def _rows(layer: Any, each: int) -> list[_Row]:
    known: dict[int, list[_Row]] = layer.__dict__.setdefault("flat_rows", {})
    if each not in known:
        rows: list[_Row] = [([], [0]), ([], [0])]
        for name, parameter in sorted(layer.named_parameters()):
            parameters, begins = rows[is_spread(parameter)]
            cut = Cut.of(parameter, each)
            parameters.append((name, parameter, cut))
            begins.append(begins[-1] + parameter.numel() // (each if cut.dim is not None else 1))
        known[each] = rows
    return known[each]
