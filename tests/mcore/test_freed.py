"""What is not needed any more is freed at once, and not by Python's next collection."""

from __future__ import annotations

from typing import Any

import pytest

from odyssey_megatron.plan.placing.slices import EVERYTHING, WHOLE
from tests.mcore.test_layers import held

torch = pytest.importorskip("torch")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_iter  # noqa: E402


class Made(TorchDispatchMode):
    """Follows the memory of all tensors that are made in its body, except for views of ``others``."""

    def __init__(self, others: list[Any]):
        super().__init__()
        self._others = {one.untyped_storage()._cdata for one in others}
        self._refs: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in self._others:
                storage = one.untyped_storage()
                self._refs[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def alive_bytes(self) -> int:
        return sum(size for ref, size in self._refs.values() if not ref.expired())


FLAGS_BYTES = 16
"""Of Megatron's optimizer: a scale of one, and flags for overflows."""
HALF = (0, WHOLE // 2)


@pytest.mark.parametrize("spans", [(EVERYTHING,), (HALF,)], ids=["all", "half"])
def test_an_optimizer_keeps_no_more_than_its_state(spec, megatron, spans):
    """Megatron makes 32-bit copies of all weights, also where only a slice is kept."""
    from odyssey_megatron.mcore.model.optimizer import LayerOptimizer

    model = spec(bf16=True)
    layer = held(model, megatron)[1]
    with Made([*layer.weights().values()]) as made:
        own = LayerOptimizer(layer, model, megatron, spans)
    assert 0 <= made.alive_bytes - own.state_bytes() <= FLAGS_BYTES < own.state_bytes() / 1000
