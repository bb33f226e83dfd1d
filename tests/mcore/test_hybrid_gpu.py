"""mamba-ssm's kernels on a GPU: ``bash tests/run.sh -m gpu tests/mcore/test_hybrid_gpu.py``.

Written without a GPU at hand. What jobs on a CPU compute in their place, they compute too.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

BATCH, LENGTH, HEADS, CHANNELS, GROUPS, STATES, WIDTH = 2, 256, 8, 64, 2, 16, 4
CLOSE = {"rtol": 2e-2, "atol": 2e-2}
"""The kernels multiply in TensorFloat-32."""


@pytest.fixture
def kernels():
    """``mamba_ssm.ops.triton.ssd_combined``."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if hasattr(torch, "_odyssey_cpu_device"):
        pytest.skip("an earlier test has redirected torch.cuda to the CPU: run with -m gpu")
    return pytest.importorskip("mamba_ssm.ops.triton.ssd_combined")


def test_the_stand_in_is_what_the_kernel_computes(kernels):
    from odyssey_megatron.mcore.cpu import hybrid as cpu_hybrid

    generator = torch.Generator().manual_seed(1)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator)

    inner = HEADS * CHANNELS
    mixed = inner + 2 * GROUPS * STATES
    given = drawn(BATCH, LENGTH, inner + mixed + HEADS), drawn(mixed, WIDTH) / WIDTH, drawn(mixed)
    rest = drawn(HEADS), -drawn(HEADS).exp(), drawn(HEADS)
    results = []
    for function, device in (
        (kernels.mamba_split_conv1d_scan_combined, "cuda"),
        (cpu_hybrid.mamba_split_conv1d_scan_combined, "cpu"),
    ):
        tensors = [one.to(device).requires_grad_() for one in (*given, *rest)]
        y = function(*tensors, 128, headdim=CHANNELS, ngroups=GROUPS, norm_before_gate=False)
        gradients = torch.autograd.grad(y.square().mean(), tensors)
        results.append([one.cpu() for one in (y, *gradients)])
    for kernel, stand_in in zip(*results, strict=True):
        torch.testing.assert_close(kernel / kernel.abs().max(), stand_in / kernel.abs().max(), **CLOSE)
