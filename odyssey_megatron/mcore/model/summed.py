"""What of a rank's gradients is summed with whom: see ``execute.interpreter.Compute``, whose methods these are for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from odyssey_megatron.execute.scatter import Slices
from odyssey_megatron.mcore.model.experts import is_spread
from odyssey_megatron.mcore.model.flat import Range, ranges
from odyssey_megatron.mcore.model.layers import LayerBlock, main_grad
from odyssey_megatron.mcore.model.parts import Parts
from odyssey_megatron.plan.layout import Layout


def gradients(block: LayerBlock, parts: Parts, first: int, last: int, part: int) -> Sequence[torch.Tensor]:
    """Of layers ``[first, last)`` of ``block``, 1-D: in place, or, in a smaller cell, in a copy of that ``part``."""
    if parts.each.shards == 1:
        return block.gradients(first, last)
    return parts.stage(block, first, last, part).buffers


def expert_gradients(
    block: LayerBlock, parts: Parts, first: int, last: int, part: int
) -> Sequence[torch.Tensor]:
    """The same of experts that are spread over ranks."""
    if parts.each.experts == 1:
        return block.expert_gradients(first, last)
    return parts.stage(block, first, last, part, spread=True).buffers


def partial_gradients(
    block: LayerBlock, parts: Parts, first: int, last: int, part: int
) -> Sequence[torch.Tensor]:
    """Those of :func:`gradients`, as views, of which each tensor-parallel rank has computed a part only."""
    partial = block.partial_parameters(first, last)
    if parts.each.shards == 1:
        return [main_grad(one) for one in partial]
    return parts.staged(first, last, part).of_parameters(partial)


def slices(
    block: LayerBlock, parts: Parts, layout: Layout, first: int, last: int, part: int, *, spread: bool
) -> Sequence[Slices]:
    """Where not all who hold these layers need all sums, who needs what of :func:`gradients`, or of those of experts
    that are ``spread`` over ranks.
    """
    holders, states = layout.all_holders[first], layout.states
    if all(len(one.owners) == len(holders) for layer in range(first, last) for one in states[layer]):
        return []
    found = []
    for layer in block.inside(first, last):
        for of_layer, owners in states[layer.index]:
            own = [
                _numbers(one, parts, first, last, part, spread=spread)
                for one in ranges(layer, parts.each, [of_layer], parts.number(part) if spread else None)
                if is_spread(one.parameter) == spread
            ]
            found.append(Slices(tuple(map(holders.index, owners)), own))
    return found


def _numbers(one: Range, parts: Parts, first: int, last: int, part: int, *, spread: bool) -> torch.Tensor:
    """Of :func:`gradients`, as a view."""
    if (parts.each.experts if spread else parts.each.shards) == 1:
        return one.of_part(main_grad(one.parameter), 0)
    (staged,) = parts.staged(first, last, part, spread=spread).of_parameters([one.parameter])
    return staged.reshape(-1)[one.start : one.stop]
