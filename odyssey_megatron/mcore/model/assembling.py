"""How the blocks that a rank computes with are made from the layers that it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock
from odyssey_megatron.plan.layout import Layout

Blocks = Mapping[tuple[int, int], LayerBlock]
"""Blocks by (first layer, last layer + 1)."""


def assembled(
    layout: Layout,
    worker: int,
    held: Mapping[int, HeldLayer],
    before: Blocks,
    make: Callable[[Sequence[HeldLayer]], LayerBlock],
    replacing: Callable[[], None],
) -> dict[tuple[int, int], LayerBlock]:
    """The blocks of ``worker`` under ``layout``.

    Blocks of ``before`` whose layers are the same objects are kept. For the others new blocks are made, into which the
    gradient sums of an interrupted step are copied.

    Args:
        held: all layers that the worker holds under ``layout``, by index.
        make: makes a block of the given layers, with zero gradients.
        replacing: called before each block that is made.
    """
    sums = {layer.index: layer.gradients() for block in before.values() for layer in block.layers}
    found = {}
    for block in layout.blocks():
        if worker not in block.holders:
            continue
        ends = block.first, block.last
        layers = [held[layer] for layer in range(*ends)]
        old = before.get(ends)
        if old is not None and all(a is b for a, b in zip(old.layers, layers, strict=True)):
            found[ends] = old
            continue
        replacing()
        found[ends] = make(layers)
        for layer in layers:
            if of_interrupted_step := sums.get(layer.index):
                torch._foreach_copy_(layer.gradients(), of_interrupted_step)
    return found


def unsent(
    layout: Layout, worker: int, held: Mapping[int, HeldLayer], arriving: Callable[[int], bool]
) -> list[int]:
    """The layers whose optimizer state ``worker`` keeps under ``layout``, but neither has nor is being sent.

    Args:
        arriving: whether state of a layer is expected here, or has arrived.
    """
    return [
        layer
        for layer, spans in layout.spans_kept_by(worker).items()
        if not arriving(layer)
        and (layer not in held or not any(one.spans == spans for one in held[layer].states[:1]))
    ]
