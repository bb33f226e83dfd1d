"""Tensors as bytes, and back: some on the host, as torch's Adam counts its steps there."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.rebuild.transfer import packed, unpack  # noqa: E402


def test_all_bytes_lie_where_most_tensors_do():
    """A tensor of torch's device ``meta`` has no bytes; which device they would be on is known."""
    flat = packed([torch.tensor(7.0), torch.ones(3, 5, device="meta"), torch.tensor(8.0)])
    assert (flat.device.type, flat.dtype, flat.numel()) == ("meta", torch.uint8, 4 + 60 + 4)
    assert packed([torch.tensor(7.0)]).device.type == "cpu"


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)
def test_there_and_back(device):
    before = [
        torch.tensor(7.0),
        torch.arange(5, device=device, dtype=torch.bfloat16),
        torch.arange(6.0, device=device).reshape(2, 3).t(),
        torch.tensor(8, dtype=torch.int64),
    ]
    flat = packed(before)
    assert flat.device.type == device
    after = [torch.zeros_like(one) for one in before]
    unpack(flat, after)
    for one, other in zip(before, after, strict=True):
        assert one.device == other.device
        assert torch.equal(one, other)
