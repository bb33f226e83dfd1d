"""What is left of blocks that others have replaced."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tests.mcore.test_layers import gradients, held, run

torch = pytest.importorskip("torch")

LAYERS = 4
WHOLE, HALVES = (4,), (2, 4)


def assembled_anew(layers: list[Any], before: Any, ends: tuple[int, ...], make: Any) -> Any:
    """The blocks of worker 0 that end at ``ends``, after the blocks ``before``."""
    from odyssey_megatron.mcore.model.assembling import assembled
    from odyssey_megatron.plan.layout import Layout

    # Each block has another worker among its holders, by which it is told from its neighbours.
    others = [1 + sum(layer >= end for end in ends) for layer in range(LAYERS)]
    layout = Layout(holders=tuple((0, other) for other in others), routes=())
    return assembled(layout, 0, dict(enumerate(layers)), before, make, replacing=lambda: None)


@pytest.fixture
def change(spec, megatron):
    """A function that cuts the same layers into other blocks; and the layers."""
    from odyssey_megatron.mcore.model.layers import LayerBlock

    model = spec()
    layers, now = held(model, megatron), {}

    def changed(ends: tuple[int, ...]) -> list[Any]:
        nonlocal now
        now = assembled_anew(layers, now, ends, lambda some: LayerBlock(model, some, megatron))
        return [now[span] for span in sorted(now)]

    return changed, layers


def test_blocks_that_are_replaced_leave_no_gradient_buffers(change):
    """I10: they are as large as the weights, in the device's memory, so they do not wait for a collection either."""
    cut, _ = change
    gc.disable()
    try:
        wrappers = [weakref.ref(block.model) for block in cut(HALVES)]
        buffers = [weakref.ref(block.buffers[0]) for block in cut(HALVES)]
        for ends in (WHOLE, HALVES, WHOLE):
            run(cut(ends)).backward()
        assert [one() for one in (*wrappers, *buffers)] == [None] * 4
    finally:
        gc.enable()


def test_buffers_are_freed_before_the_next_block_is_made(spec, megatron):
    """Else a rank would have all of its gradients twice for a moment."""
    from torch.multiprocessing.reductions import StorageWeakRef

    from odyssey_megatron.mcore.model.layers import LayerBlock

    model = spec()
    layers, alive = held(model, megatron), []

    def make(some: list[Any]) -> Any:
        alive.append([not one.expired() for one in buffers])
        return LayerBlock(model, some, megatron)

    gc.disable()
    try:
        buffers: list[StorageWeakRef] = []
        now = assembled_anew(layers, {}, HALVES, make)
        run([*now.values()]).backward()
        sums = gradients(layers)
        buffers = [StorageWeakRef(block.buffers[0].untyped_storage()) for block in now.values()]
        alive.clear()
        assembled_anew(layers, now, (1, 2, 3, 4), make)
        assert alive == [[True, True], [True, True], [False, True], [False, True]]
        assert all(one.expired() for one in buffers)
    finally:
        gc.enable()
    assert all(torch.equal(one, sums[name]) for name, one in gradients(layers).items())


def test_a_backward_does_not_get_longer_with_each_change(change):
    """I10: one hook for each parameter is called, and not one for each wrapper that it has had."""
    from torch.autograd.graph import get_gradient_edge

    cut, layers = change
    for ends in (WHOLE, HALVES, WHOLE, HALVES):
        run(cut(ends)).backward()
    for layer in layers:
        for parameter in layer.parameters():
            handle = get_gradient_edge(parameter).node.register_hook(lambda *gradients: None)
            assert len(handle.hooks_dict_ref()) == 1 + 1, "DDP's, and this one"
            handle.remove()


@pytest.mark.parametrize("ends", [WHOLE, HALVES], ids=["one block", "two blocks"])
def test_a_microbatch_in_flight_is_added_to_the_new_buffers(change, ends):
    cut, layers = change
    run(cut(HALVES)).backward()
    once = gradients(layers)
    loss = run(cut(WHOLE))
    cut(HALVES)
    cut(WHOLE)
    cut(ends)
    loss.backward()
    for name, grad in gradients(layers).items():
        assert torch.equal(grad, 2 * once[name]), name
