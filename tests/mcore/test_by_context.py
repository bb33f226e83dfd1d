"""A rank that has the parts of several context-parallel ranks has their loss: the mean of the means over their own."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.cluster.cell import Cell  # noqa: E402
from odyssey_megatron.mcore.contexts import places  # noqa: E402
from odyssey_megatron.mcore.model.by_context import forward_step_of  # noqa: E402

ROWS, TOKENS = 2, 16


def loss_function(loss_mask, losses):
    """As that of Megatron-LM's pretrain_gpt.py."""
    total = torch.sum(losses.view(-1) * loss_mask.view(-1))
    tokens = loss_mask.sum().clone().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens])}


def mean(loss_func, output):
    """What Megatron makes of it (core_v0.16.1 core/pipeline_parallel/schedules.py, line 256)."""
    total, tokens, _ = loss_func(output)
    return total / torch.clamp(tokens, min=1)


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("masked", [0, 5, 9, 16])
def test_it_is_the_mean_of_their_means(context, masked):
    mask, losses = (
        torch.ones(ROWS, TOKENS, dtype=torch.float64),
        torch.rand(ROWS, TOKENS, dtype=torch.float64),
    )
    mask[:, :masked] = 0.0
    own = [places(torch.tensor([0, TOKENS]), TOKENS, context, one) for one in range(context)]
    several, one = losses.clone().requires_grad_(), losses.clone().requires_grad_()
    means = [mean(functools.partial(loss_function, mask[:, at]), several[:, at]) for at in own]
    expected = sum(means) / context
    cell = Cell.of(0, tensor=1, context=context).smaller(1)
    step = forward_step_of(
        cell, lambda data, model: (one, functools.partial(loss_function, mask)), sums_losses=False
    )
    output, loss_func = step(None, None)
    found = mean(loss_func, output)
    assert torch.allclose(found, expected, rtol=1e-14)
    found.backward()
    expected.backward()
    assert torch.allclose(one.grad, several.grad, rtol=1e-14, atol=0.0)
    assert torch.equal(loss_func(output)[2]["lm loss"][1], mask.sum())


def test_elsewhere_nothing_is_changed():
    def step(data, model):
        return data, None

    cell = Cell.of(0, tensor=1, context=4)
    assert forward_step_of(cell, step, sums_losses=False) is step
    assert forward_step_of(cell.smaller(2), step, sums_losses=True) is step
    assert forward_step_of(cell.smaller(2), step, sums_losses=False)(1, 2) == (1, None)
