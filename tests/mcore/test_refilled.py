"""Layers that get their optimizer state while microbatches are in flight on them."""

from __future__ import annotations

from typing import Any

import pytest

from odyssey_megatron.plan.slices import EVERYTHING
from tests.mcore.test_ahead import backward, gradients

torch = pytest.importorskip("torch")


def forward(model: Any) -> None:
    inner = model.forward(0, 0, 2, None).detach()
    model.forward(0, 2, 4, inner)


def refill(model: Any, layer: int) -> None:
    """As a worker that held only weights gets the optimizer state, too: it is sent the whole layer."""
    sent = {name: one.clone() for name, one in model.tensors_to_send(layer, 0).items()}
    model._held[layer].optimizer = None
    model.expect({layer: (EVERYTHING,)})
    rooms = model.tensors_to_fill(layer, 0)
    for name, room in rooms.items():
        room.copy_(sent[name])
    model.take_layout(model._layout, 0)
    model.filled(layer, 0, EVERYTHING, rooms)
    model.settled()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_microbatches_in_flight_and_their_sums_go_on(model, times):
    forward(model)
    backward(model)
    expected = gradients(model)
    model.begin_step(0)
    forward(model)
    for _ in range(times):
        refill(model, 2)
    backward(model)
    assert torch.equal(gradients(model), expected)
