"""A layer's numbers in one flat sequence, as a rank of a whole cell has them; optimizer slices are spans of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from odyssey_megatron.cluster.shapes import Each
from odyssey_megatron.mcore.model.experts import in_whole, is_spread, of_all_in_whole, of_one_rank
from odyssey_megatron.plan.placing.slices import EVERYTHING, Span, elements
from odyssey_megatron.plan.placing.stretches import of_kind


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor that contains several parts is composed of them."""

    each: int = 1
    """Number of parts."""
    dim: int | None = None
    """Dimension along which the parts are concatenated; None: all parts have the same tensor."""
    stride: int = 1
    """Number of separate pieces of a part, such as the gate and the projection of a gated MLP: the first pieces of all
    parts come before the second ones (Megatron's ``partition_stride``).
    """

    @classmethod
    def of(cls, parameter: torch.Tensor, each: int) -> Cut:
        """The cut of a layer's ``parameter``, or of a tensor of its shape, into ``each`` parts.

        Megatron marks the parameters that it cuts: core_v0.16.1 core/tensor_parallel/layers.py,
        ``set_tensor_model_parallel_attributes``.
        """
        if each == 1 or not getattr(parameter, "tensor_model_parallel", False) or is_duplicated(parameter):
            return cls(each)
        return cls(each, dim=parameter.partition_dim, stride=parameter.partition_stride)  # type: ignore[attr-defined]

    def _pieces(self, merged: torch.Tensor, number: int) -> torch.Tensor:
        """A view of the pieces of part ``number``: [..., stride, length of a piece, ...]."""
        assert self.dim is not None
        return torch.unflatten(merged, self.dim, (self.stride, self.each, -1)).select(self.dim + 1, number)

    def part(self, merged: torch.Tensor, number: int) -> torch.Tensor:
        """Part ``number`` of ``merged``, in the shape that it has in a whole cell: a view, or a copy where its pieces
        lie apart.
        """
        if self.dim is None or self.each == 1:
            return merged
        return self._pieces(merged, number).flatten(self.dim, self.dim + 1)

    def put(self, merged: torch.Tensor, number: int, part: torch.Tensor) -> None:
        """Replace part ``number`` of ``merged`` by ``part``. A tensor that all parts share is taken from part 0."""
        if self.dim is None or self.each == 1:
            if number == 0 and part.data_ptr() != merged.data_ptr():
                merged.copy_(part)
            return
        if part.untyped_storage().data_ptr() != merged.untyped_storage().data_ptr():  # else it is a view
            self._pieces(merged, number).copy_(torch.unflatten(part, self.dim, (self.stride, -1)))


_DUPLICATED = "_odyssey_duplicated"


def mark_duplicated(module: torch.nn.Module) -> None:
    """Say that all tensor-parallel ranks have the whole parameters of ``module``, though these are marked as cut."""
    for one in module.parameters():
        setattr(one, _DUPLICATED, True)


def is_duplicated(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` has been marked so: each tensor-parallel rank counts it in norms, as if it were cut."""
    return getattr(parameter, _DUPLICATED, False)


class Range(NamedTuple):
    """The numbers ``[start, stop)`` of one parameter of a layer, indexed as in one part of it."""

    name: str
    """Name of the parameter on this rank."""
    in_whole: str
    """Name of the parameter on a rank of a whole cell."""
    part: int | None
    """Number of the part that has the parameter, among this rank's parts, if only one of them has it; else None."""
    parameter: torch.nn.Parameter
    cut: Cut
    start: int
    stop: int
    span: Span
    """The span of the layer that contains these numbers."""

    @property
    def text(self) -> str:
        """A name for these numbers."""
        return f"{self.in_whole}[{self.start}:{self.stop}]"

    def of_part(self, merged: torch.Tensor, number: int) -> torch.Tensor:
        """These numbers of part ``number`` of ``merged``, which is shaped like the parameter: 1-D; a copy where they
        lie apart.
        """
        return self.cut.part(merged.data, number).reshape(-1)[self.start : self.stop]

    def put(self, merged: torch.Tensor, number: int, numbers: torch.Tensor) -> None:
        """The inverse of :meth:`of_part`: write ``numbers`` into ``merged``."""
        part = self.cut.part(merged.data, number)
        flat = part.reshape(-1)
        flat[self.start : self.stop].copy_(numbers)
        self.cut.put(merged.data, number, flat.view(part.shape))

    def together(self, merged: torch.Tensor) -> torch.Tensor:
        """These numbers of all parts, one part after the other: a view where possible, else a copy."""
        if self.parts == 1:
            return self.of_part(merged, 0)
        return torch.cat([self.of_part(merged, number) for number in range(self.parts)])

    @property
    def parts(self) -> int:
        """Number of different parts in the parameter; 1 if all parts have it alike."""
        return self.cut.each if self.cut.dim is not None else 1


def ranges(layer: Any, each: Each, spans: Iterable[Span], part: int | None = None) -> Iterator[Range]:
    """The ranges of a held ``layer``'s parameters that lie in ``spans``.

    Experts that are spread over ranks form a flat sequence of their own, since they have other holders.

    Args:
        each: how much of the layer this rank has.
        spans: spans of both flat sequences, or of one (``plan/placing/stretches.py``).
        part: yield only what the part of this number has; None: all parts.
    """
    spans = list(spans)
    for spread, (kinds, begins) in enumerate(_rows(layer, each)):
        for span in spans:
            if (own := of_kind(span, spread=bool(spread))) is None:
                continue
            low, high = elements(own, begins[-1])
            at = bisect_right(begins, low) - 1
            while at < len(kinds) and begins[at] < high:
                start, stop = max(low, begins[at]), min(high, begins[at + 1])
                for one in kinds[at] if start < stop else ():
                    if part is None or one.part in (None, part):
                        yield one._replace(start=start - begins[at], stop=stop - begins[at], span=span)
                at += 1


_Row = tuple[list[list[Range]], list[int]]
"""One flat sequence: its parameters (those of an expert together, one for each part) and the offset of each; the last
offset is the end of the sequence.
"""


def _rows(layer: Any, each: Each) -> list[_Row]:
    known: dict[Each, list[_Row]] = layer.__dict__.setdefault("flat_rows", {})
    if each not in known:
        rows: list[_Row] = [([], [0]), ([], [0])]
        for _, kind in sorted(_by_name_in_whole(layer, each).items()):
            kinds, begins = rows[kind.is_spread]
            kinds.append(sorted(kind.here, key=lambda one: one.part or 0))
            begins.append(begins[-1] + kind.numel)
        known[each] = rows
    return known[each]


class _Kind(NamedTuple):
    """A parameter of a whole cell's rank."""

    here: list[Range]
    """What this rank has of that name: in a smaller gang of several experts, or of none."""
    numel: int
    is_spread: bool


def _by_name_in_whole(layer: Any, each: Each) -> dict[str, _Kind]:
    found: dict[str, _Kind] = {}
    for name, parameter in layer.named_parameters():
        part, in_whole_cell, spread = None, name, is_spread(parameter)
        if spread and each.cuts_experts:
            part, in_whole_cell = in_whole(name, of_one_rank(layer.config), each)
        cut = Cut.of(parameter, each.shards)
        one = Range(name, in_whole_cell, part, parameter, cut, 0, parameter.numel(), EVERYTHING)
        kind = found.setdefault(in_whole_cell, _Kind([], parameter.numel() // one.parts, spread))
        kind.here.append(one)
        # The sequence is that of a whole cell's rank, also where others have some of its experts.
        for other in of_all_in_whole(name, of_one_rank(layer.config)) if spread and each.runs else ():
            found.setdefault(other, _Kind([], kind.numel, spread))
    return found
