"""Adam's moments, kept in a shorter type than they are stepped in."""

from __future__ import annotations

import pytest
import torch

from odyssey_megatron.mcore.model.optimizer import _create_state, _in_full

LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-8, 0.1


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_a_step_is_adams_between_roundings(kept):
    """Against the formulas of Adam (Kingma and Ba, arXiv 1412.6980, algorithm 1) with decoupled weight decay."""
    draw = torch.Generator().manual_seed(7)
    weight = torch.nn.Parameter(torch.randn(3, 5, generator=draw))
    expected = weight.detach().double()
    moments = {"exp_avg": kept, "exp_avg_sq": kept}
    adam = torch.optim.AdamW([weight], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    _create_state(adam, moments)
    state = adam.state[weight]
    assert {state[name].dtype for name in moments} == {kept}
    tensors = {name: state[name] for name in moments}
    first, second = torch.zeros(3, 5), torch.zeros(3, 5)
    for step in range(1, 6):
        weight.grad = torch.randn(3, 5, generator=draw)
        with _in_full(adam, moments):
            adam.step()
        first = BETA1 * first + (1 - BETA1) * weight.grad
        second = BETA2 * second + (1 - BETA2) * weight.grad**2
        expected = expected * (1 - LR * DECAY)
        expected -= LR * (first / (1 - BETA1**step)).double() / ((second / (1 - BETA2**step)).sqrt() + EPS)
        first, second = first.to(kept).float(), second.to(kept).float()
        assert torch.allclose(weight.double(), expected, rtol=1e-5, atol=1e-6)
        for name, value in (("exp_avg", first), ("exp_avg_sq", second)):
            assert state[name] is tensors[name], "what moves, and what is parked, is this tensor"
            assert torch.allclose(state[name].float(), value, rtol=1e-2 if kept is torch.bfloat16 else 1e-5)
