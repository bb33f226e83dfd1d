"""The totals of a step."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.cluster.cell import Cell  # noqa: E402


@pytest.mark.parametrize("shape", [(350,), (7, 50), (99,)])
def test_a_norm_copies_no_more_than_a_piece_of_a_gradient(megatron, monkeypatch, shape):
    from odyssey_megatron.mcore.loop import outcome

    taken, norm = [], torch.linalg.vector_norm
    monkeypatch.setattr(outcome, "_AT_ONCE", 100)
    monkeypatch.setattr(
        torch.linalg, "vector_norm", lambda one, **asked: taken.append(one.numel()) or norm(one, **asked)
    )
    gradient = torch.randn(shape)
    gradient.view(-1)[::5] = 0.0
    totals = outcome.local_totals(
        [(gradient, 2), (gradient, 0)], {}, [], tokens=(), sequences={}, cell=Cell(rank=0), with_zeros=True
    )
    squared, zeros, *_ = totals.tolist()
    assert squared == pytest.approx(2 * gradient.double().square().sum().item(), rel=1e-13)
    assert zeros == 2 * int((gradient == 0).sum())
    assert max(taken) <= 100
