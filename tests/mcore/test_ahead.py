"""Forwards that are run ahead count for nothing until they are this worker's own."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def gradients(model: Any) -> Any:
    return torch.cat([one.clone() for one in model.sums.summands(2, 4, 0, spread=False).gradients])


def backward(model: Any) -> None:
    model.compute.input_grad(0, 2, 4, None)
    model.compute.weight_grad(0, 2, 4)


def test_a_loss_counts_once_it_is_taken_up(model):
    inner = model.compute.forward(0, 0, 2, None).detach()
    model.compute.forward(0, 2, 4, inner.clone())
    backward(model)
    own, losses, summed = model.end.local_totals(), model.end.samples_of_losses(), gradients(model)
    model.begin_step(0)
    model.compute.forward(0, 2, 4, inner.clone(), ahead=True)
    assert model.end.local_totals().tolist() == [0.0] * model.end.num_totals
    assert model.end.samples_of_losses() == {}
    model.compute.adopt([(0, 2, 4)])
    backward(model)
    assert torch.equal(model.end.local_totals(), own)
    assert model.end.samples_of_losses() == losses == {0: [0]}
    assert torch.equal(gradients(model), summed)


def test_what_is_not_taken_up_is_let_go_of(model):
    inner = model.compute.forward(0, 0, 2, None).detach()
    kept, gone = (model.compute.forward(m, 2, 4, inner.clone(), ahead=True) for m in (0, 1))
    outputs = [weakref.ref(one) for one in (kept, gone)]
    del kept, gone
    model.compute.adopt([(0, 2, 4)])
    gc.collect()
    assert [output() is None for output in outputs] == [False, True], "and with it the graph"
    backward(model)
    assert model.end.samples_of_losses() == {0: [0]}


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_step_that_begins_anew_keeps_no_activations_for_layers_to_come_beside(model, monkeypatch, goes_on):
    from odyssey_megatron.execute import step
    from odyssey_megatron.execute.interrupted import Rest

    rest = Rest(begun=True, program=() if goes_on else None)
    monkeypatch.setattr(step, "go_on", lambda *args, **others: rest)
    output = weakref.ref(model.compute.forward(0, 0, 2, None))
    at_hand = step.StepAtHand(model, torch.device("cpu"), SimpleNamespace(committed=0), None, None)
    at_hand.progress = SimpleNamespace()
    assignment = SimpleNamespace(
        step=lambda number: None, cell=None, plan=SimpleNamespace(keeps_messages=False)
    )
    at_hand.go_on(assignment, None, None)
    gc.collect()
    assert (output() is not None) is goes_on
