"""Layers that get their optimizer state while microbatches are in flight on them, and such as lose it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from odyssey_megatron.plan.placing.slices import EVERYTHING, WHOLE
from tests.mcore.test_ahead import backward, gradients

torch = pytest.importorskip("torch")


def forward(model: Any) -> None:
    inner = model.compute.forward(0, 0, 2, None).detach()
    model.compute.forward(0, 2, 4, inner)


def refill(model: Any, layer: int) -> None:
    """As a worker that held only weights gets the optimizer state, too: it is sent the whole layer."""
    sent = {name: one.clone() for name, one in model.transfer.tensors_to_send(layer, 0).items()}
    model.holdings.held[layer].optimizer = None
    model.transfer.expect({layer: (EVERYTHING,)})
    rooms = model.transfer.tensors_to_fill(layer, 0)
    for name, room in rooms.items():
        room.copy_(sent[name])
    model.take_layout(model.holdings.layout, 0)
    model.transfer.filled(layer, 0, EVERYTHING, rooms)
    model.transfer.settled()


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


@pytest.mark.parametrize("left_out", [False, True])
def test_what_others_keep_from_now_on_is_let_go_of_behind_the_step(model, left_out):
    """Be it one that trains on nothing: whoever compares state looks for what the layout says that a worker has."""
    from odyssey_megatron.mcore.loop.batches import Batches

    rings = ((0,), (0,), (1,), (1,))
    model.take_layout(replace(model.holdings.layout, keepers=rings, copies=1), 0)
    model.microbatches.batches = Batches([], 2, left_out=[0] if left_out else [])
    model.begin_step(0)
    assert "2.optimizer" in model.holdings.digests(), "others may go back to it"
    outcome = model.end.apply(torch.ones(model.end.num_totals, dtype=torch.float64), lambda: None)
    assert outcome.skipped is left_out
    kept = [name for name in model.holdings.digests() if "optimizer" in name]
    assert kept == ["0.optimizer", "1.optimizer"]


def test_who_has_given_layers_away_writes_the_others(model):
    """Until the next step it has them still, and behind the last one there is none: somebody died in the export."""
    model.take_layout(replace(model.holdings.layout, holders=((0,), (0,), (0,), (1,))), 0)
    assert sorted(layer for layer, _ in model.holdings.weights()) == [0, 1, 2]


def test_a_first_layout_that_came_to_nothing_leaves_nothing_to_wait_for(model):
    """A rank was lost before all were live: the next layout is the first one, too, and cuts the state otherwise."""
    first, second = (0, WHOLE // 2), (WHOLE // 2, WHOLE)
    for spans in ((first,), (second,), (EVERYTHING,), ()):
        kept = {1: spans} if spans else {}
        model.holdings.create_layers(range(4), kept)
        model.transfer.expect(kept)
        model.transfer.settled()
        assert [one.spans for one in model.holdings.held[1].states] == [spans][: len(spans)]
