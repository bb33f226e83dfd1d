"""Optimizer state in host memory between steps: its memory is given back, and its numbers stay."""

from __future__ import annotations

from typing import Any

import pytest

from odyssey_megatron.plan.placing.slices import EVERYTHING

torch = pytest.importorskip("torch")


def made(spec: Any, megatron: Any, **changes: Any) -> Any:
    """The optimizer of the first transformer layer, with gradients, and its parameters."""
    from odyssey_megatron.mcore.model.layers import HeldLayer, initial_parts
    from odyssey_megatron.mcore.model.rng import LayerSeeds

    one = spec(**changes)
    layer = HeldLayer(one, 1, initial_parts(one, [1], megatron)[1], megatron, LayerSeeds(one.seed))
    torch.manual_seed(3)
    for parameter in layer.parameters():
        parameter.main_grad = torch.randn(
            parameter.shape, dtype=torch.float32 if one.config.bf16 else parameter.dtype
        )
    return layer


@pytest.mark.parametrize("bf16", [False, True])
def test_parked_between_steps_or_not_the_steps_are_the_same(spec, megatron, bf16):
    there, here = (made(spec, megatron, bf16=bf16) for _ in range(2))
    for _ in range(3):
        for layer in (there, here):
            layer.optimizer.apply(0.5)
        there.optimizer.park([EVERYTHING])
        there.optimizer.park([EVERYTHING])  # a second time does nothing
    assert there.optimizer.host_bytes
    assert not here.optimizer.host_bytes
    ours, theirs = there.moved_tensors(), here.moved_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())
    assert not there.optimizer.host_bytes, "whoever moves it needs it on the device"


@pytest.mark.parametrize("bf16", [False, True])
def test_the_memory_is_given_back(spec, megatron, bf16):
    layer = made(spec, megatron, bf16=bf16)
    layer.optimizer.apply(1.0)
    state = [one for one in layer.optimizer.state_tensors().values() if one.dim()]
    size = sum(one.nbytes for one in state)
    weights = [one.clone() for one in layer.weights().values()]
    parking = layer.optimizer
    assert parking.host_bytes == 0
    parking.park([EVERYTHING])
    assert sum(one.untyped_storage().nbytes() for one in state) == 0
    assert parking.host_bytes == size > 0
    assert all(map(torch.equal, layer.weights().values(), weights)), "weights stay where they are"
    parking.fetch()
    assert sum(one.untyped_storage().nbytes() for one in state) == size
    assert parking.host_bytes == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_memory_given_back_may_be_written_at_once(device):
    from odyssey_megatron.mcore.model.parking import Parking

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    state = [torch.randn(1 << 20, device=device) for _ in range(4)]
    before = [one.clone() for one in state]
    parking = Parking(state)
    for _ in range(3):
        parking.park()
        others = [torch.zeros(1 << 20, device=device) for _ in range(8)]
        parking.fetch()
        assert all(map(torch.equal, state, before))
        assert not any(one.any() for one in others)
