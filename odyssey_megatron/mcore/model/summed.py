"""Which of a rank's gradients are summed with whom, for the methods of ``execute.interpreter.Compute``."""

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
    """The gradients of layers ``[first, last)`` of ``block``, 1-D: in place, or, in a smaller cell, copies of that
    ``part``.
    """
    if parts.each.shards == 1:
        return block.gradients(first, last)
    return parts.stage(block, first, last, part).buffers


def expert_gradients(
    block: LayerBlock, parts: Parts, first: int, last: int, part: int
) -> Sequence[torch.Tensor]:
    """The same for experts that are spread over ranks; in place, too, where parts are runs of experts."""
    if not parts.each.cuts_experts:
        return block.expert_gradients(first, last)
    if parts.each.runs:
        return parts.of_run(block, first, last, part)
    return parts.stage(block, first, last, part, spread=True).buffers


def partial_gradients(
    block: LayerBlock, parts: Parts, first: int, last: int, part: int
) -> Sequence[torch.Tensor]:
    """Views of those of :func:`gradients` of which each tensor-parallel rank has computed only a part."""
    partial = block.partial_parameters(first, last)
    if parts.each.shards == 1:
        return [main_grad(one) for one in partial]
    return parts.staged(first, last, part).of_parameters(partial)


def slices(
    block: LayerBlock, parts: Parts, layout: Layout, first: int, last: int, part: int, *, spread: bool
) -> Sequence[Slices]:
    """Who needs which slices of :func:`gradients`, or of the gradients of experts that are ``spread`` over ranks; empty
    where every holder of these layers needs all sums.
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
    """The gradients of the numbers ``one``, as a 1-D view of what :func:`gradients` has returned."""
    if (parts.each.experts if spread else parts.each.shards) == 1:
        return one.of_part(main_grad(one.parameter), 0)
    (staged,) = parts.staged(first, last, part, spread=spread).of_parameters([one.parameter])
    return staged.reshape(-1)[one.start : one.stop]
