"""From the layers that a rank holds to the blocks that it computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock
from odyssey_megatron.plan.layout import Layout

Blocks = Mapping[tuple[int, int], LayerBlock]
"""By first layer and the one behind the last."""


def assembled(
    layout: Layout,
    worker: int,
    held: Mapping[int, HeldLayer],
    before: Blocks,
    make: Callable[[Sequence[HeldLayer]], LayerBlock],
    replacing: Callable[[], None],
) -> dict[tuple[int, int], LayerBlock]:
    """The blocks of ``worker`` under ``layout``. Those ``before`` whose layers stay the same are kept; the others' sums
    of an interrupted step go on in the new ones.

    Args:
        held: all layers that the worker holds under ``layout``, by index.
        make: a block of these layers, with gradients of zero.
        replacing: is called before each block that is made.
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
    """Layers of which ``worker`` keeps optimizer state under ``layout`` that it neither has, nor is sent.

    Args:
        arriving: whether state of a layer is expected here, or has come.
    """
    return [
        layer
        for layer, spans in layout.spans_kept_by(worker).items()
        if not arriving(layer)
        and (layer not in held or not any(one.spans == spans for one in held[layer].states[:1]))
    ]
