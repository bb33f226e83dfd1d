"""How the blocks that a rank computes with are made from the layers that it holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch.autograd.graph import get_gradient_edge

from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import Span

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
        unwrap(layers)
        found[ends] = make(layers)
        for layer in layers:
            if of_interrupted_step := sums.get(layer.index):
                torch._foreach_copy_(layer.gradients(), of_interrupted_step)
    return found


def unwrap(layers: Iterable[HeldLayer]) -> None:
    """Remove the hooks that DDP has given the parameters of ``layers``, whose blocks are replaced or dropped.

    DDP hooks into each parameter's node of the autograd graph, and has no way to undo it (megatron core_v0.16.1
    core/distributed/distributed_data_parallel.py, line 344). Each wrapper keeps its parameters' nodes alive, and each
    hook its wrapper. So all wrappers that a parameter has ever had would live on with their gradient buffers, and all
    their hooks would be called in each backward. A graph of an interrupted step has the same nodes: there the next
    wrapper's hooks do what these did.
    """
    for parameter in (one for layer in layers for one in layer.parameters()):
        if parameter.requires_grad:
            # A node that nobody else keeps is a new one, and torch gives hooks away only by the handle of one more.
            node = get_gradient_edge(parameter).node
            hooks = node.register_hook(lambda *gradients: None).hooks_dict_ref()
            assert hooks is not None, "the node has them as long as it lives"
            hooks.clear()


def unsent(
    kept: Mapping[int, tuple[Span, ...]], held: Mapping[int, HeldLayer], arriving: Collection[int]
) -> list[int]:
    """The layers of whose optimizer state a rank is to keep the spans ``kept``, but neither has nor is being sent them.

    Args:
        arriving: the layers whose state is expected here, or has arrived.
    """
    return [
        layer
        for layer, spans in kept.items()
        if layer not in arriving
        and (layer not in held or not any(one.spans == spans for one in held[layer].states[:1]))
    ]
