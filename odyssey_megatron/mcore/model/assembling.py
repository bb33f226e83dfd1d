"""How the blocks that a rank computes with are made from the layers that it holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch.autograd.graph import get_gradient_edge

from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import Span

Blocks = dict[tuple[int, int], LayerBlock]
"""Blocks by (first layer, last layer + 1)."""


def assembled(
    layout: Layout,
    worker: int,
    held: Mapping[int, HeldLayer],
    before: Blocks,
    make: Callable[[Sequence[HeldLayer]], LayerBlock],
    replacing: Callable[[], None],
) -> Blocks:
    """The blocks of ``worker`` under ``layout``.

    Blocks of ``before`` whose layers are the same objects are kept. For the others new blocks are made, into which the
    gradient sums of an interrupted step are copied.

    Args:
        held: all layers that the worker holds under ``layout``, by index.
        before: the blocks so far, which are taken out. The buffers of one are freed as soon as all its layers are in
            new blocks, and not only when all of these are made, unless others refer to it.
        make: makes a block of the given layers, with zero gradients.
        replacing: called before each block that is made.
    """
    own = [(block.first, block.last) for block in layout.blocks() if worker in block.holders]
    layers_of = {ends: [held[layer] for layer in range(*ends)] for ends in own}
    kept = {
        ends: before.pop(ends)
        for ends in own
        if ends in before and all(a is b for a, b in zip(before[ends].layers, layers_of[ends], strict=True))
    }
    replaced = (layer for block in before.values() for layer in block.layers)
    summed = {layer.index for layer in replaced if layer is held.get(layer.index)}
    before.clear()
    found = {}
    for ends in own:
        if ends in kept:
            found[ends] = kept[ends]
            continue
        replacing()
        going_on = [layer for layer in layers_of[ends] if layer.index in summed]
        of_interrupted_step = [one for layer in going_on for one in layer.gradients()]
        unwrap(layers_of[ends])
        found[ends] = make(layers_of[ends])
        if of_interrupted_step:
            now = [one for layer in going_on for one in layer.gradients()]
            torch._foreach_copy_(now, of_interrupted_step)
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
