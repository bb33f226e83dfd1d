"""What stands for mamba-ssm's kernels on a CPU is the state space that they compute."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.mcore.cpu import hybrid as cpu_hybrid  # noqa: E402

BATCH, LENGTH, HEADS, CHANNELS, GROUPS, STATES, WIDTH = 2, 9, 4, 3, 2, 5, 4


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


GENERATOR = torch.Generator().manual_seed(1)


def stepped(x, dt, a, b, c, d):
    """h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t]; y[t] = C[t] h[t] + D x[t], one token behind the other."""
    b, c = (one.repeat_interleave(HEADS // GROUPS, dim=2) for one in (b, c))
    state, found = torch.zeros(BATCH, HEADS, CHANNELS, STATES, dtype=x.dtype), []
    for t in range(LENGTH):
        comes = dt[:, t, :, None, None] * x[:, t, :, :, None] * b[:, t, :, None, :]
        state = torch.exp(dt[:, t] * a)[:, :, None, None] * state + comes
        found.append((state * c[:, t, :, None, :]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(found, dim=1)


def test_it_is_a_recurrence():
    x, dt = drawn(BATCH, LENGTH, HEADS, CHANNELS), drawn(BATCH, LENGTH, HEADS)
    a, d, bias = -drawn(HEADS).exp(), drawn(HEADS), drawn(HEADS)
    b, c = drawn(BATCH, LENGTH, GROUPS, STATES), drawn(BATCH, LENGTH, GROUPS, STATES)
    found = cpu_hybrid.mamba_chunk_scan_combined(x, dt, a, b, c, 4, D=d, dt_bias=bias, dt_softplus=True)
    expected = stepped(x, torch.nn.functional.softplus(dt + bias), a, b, c, d)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(NotImplementedError, match="packed sequences"):
        cpu_hybrid.mamba_chunk_scan_combined(x, dt, a, b, c, 4, seq_idx=torch.zeros(BATCH, LENGTH))


def test_what_is_projected_is_gated_and_convolved():
    inner, mixed = HEADS * CHANNELS, HEADS * CHANNELS + 2 * GROUPS * STATES
    given = drawn(BATCH, LENGTH, inner + mixed + HEADS).requires_grad_()
    weight, bias = drawn(mixed, WIDTH), drawn(mixed)
    a, d, dt_bias = -drawn(HEADS).exp(), drawn(HEADS), drawn(HEADS)
    found = cpu_hybrid.mamba_split_conv1d_scan_combined(
        given, weight, bias, dt_bias, a, d, 4, headdim=CHANNELS, ngroups=GROUPS
    )
    silu = torch.nn.functional.silu
    z, xbc, dt = given.split([inner, mixed, HEADS], dim=-1)
    rows = [
        sum(weight[:, WIDTH - 1 - back] * xbc[:, t - back] for back in range(min(WIDTH, t + 1))) + bias
        for t in range(LENGTH)
    ]
    x, b, c = silu(torch.stack(rows, dim=1)).split([inner, GROUPS * STATES, GROUPS * STATES], dim=-1)
    y = stepped(
        x.unflatten(-1, (HEADS, -1)), torch.nn.functional.softplus(dt + dt_bias), a,
        b.unflatten(-1, (GROUPS, -1)), c.unflatten(-1, (GROUPS, -1)), d,
    )  # fmt: skip
    expected = y.flatten(-2) * silu(z)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(found.square().sum(), given)
    (right,) = torch.autograd.grad(expected.square().sum(), given)
    assert torch.allclose(gradient, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_norms_are_of_groups_of_channels(norm_before_gate):
    norm = cpu_hybrid.GatedRMSNorm(
        6, eps=1e-5, group_size=3, norm_before_gate=norm_before_gate, dtype=torch.float64
    )
    norm.weight.data = drawn(6)
    x, z = drawn(2, 6), drawn(2, 6)
    gate = torch.nn.functional.silu(z)
    inside = x if norm_before_gate else x * gate
    sizes = inside.view(2, 2, 3).square().mean(-1, keepdim=True).add(1e-5).sqrt()
    expected = (inside.view(2, 2, 3) / sizes).view(2, 6) * norm.weight * (gate if norm_before_gate else 1)
    assert torch.allclose(norm(x, z), expected, rtol=1e-12)
