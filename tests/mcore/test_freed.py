"""What is not needed any more is freed at once, and not by Python's next collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
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


def memory(model: Any) -> dict[tuple[int, str], list[StorageWeakRef]]:
    """(layer, kind) -> references to the memory of what a rank holds of the layer."""
    found = {}
    for layer in model.holdings.layers:
        state = layer.optimizer.state_tensors() if layer.optimizer is not None else {}
        kinds = {"weights": layer.weights().values(), "state": state.values(), "gradients": layer.gradients()}
        for kind, tensors in kinds.items():
            found[layer.index, kind] = [StorageWeakRef(one.untyped_storage()) for one in tensors]
    return found


def left(refs: dict[tuple[int, str], list[StorageWeakRef]]) -> list[tuple[int, str]]:
    return [of for of, own in refs.items() if not all(one.expired() for one in own)]


def trained(model: Any) -> None:
    """Make a step."""
    inner = model.compute.forward(0, 0, 2, None)
    sent = inner.detach().clone()
    model.compute.forward(0, 2, 4, sent)
    model.compute.kept(0, 0, 2)
    for first, grad in ((2, None), (0, torch.ones_like(sent))):
        model.compute.input_grad(0, first, first + 2, grad)
        model.compute.weight_grad(0, first, first + 2)


def committed(model: Any) -> None:
    model.end.apply(torch.ones(model.end.num_totals, dtype=torch.float64), lambda: None)
    model.begin_step(1)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """In the test Python collects nothing, as with --manual-gc."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_layer_that_leaves_is_freed_with_the_step(make_model, uncollected):
    """With the gradient buffers of the block that it was in; other layers of the block have new ones."""
    model = make_model(bf16=True)
    trained(model)
    before = memory(model)
    model.take_layout(replace(model.holdings.layout, holders=((0,), (0,), (0, 1), (1,))), 0)
    committed(model)
    gone = {(2, "gradients"), (3, "gradients"), (3, "weights"), (3, "state")}
    assert {*left(before)} == before.keys() - gone


def test_state_that_leaves_is_freed_with_the_step(make_model, uncollected):
    model = make_model(bf16=True)
    trained(model)
    before = memory(model)
    model.take_layout(replace(model.holdings.layout, keepers=((0,), (0,), (1,), (1,)), copies=1), 0)
    committed(model)
    assert {*left(before)} == before.keys() - {(2, "state"), (3, "state")}


def test_a_rank_that_is_to_hold_nothing_frees_all(make_model, uncollected):
    model = make_model(bf16=True)
    trained(model)
    before = memory(model)
    model.forget()
    assert left(before) == []


def test_a_block_to_look_at_is_freed_with_its_last_user(model, uncollected):
    """Also where a layout takes its place."""
    layout = model.holdings.layout
    model.forget()
    model.holdings.create_layers(range(4), dict.fromkeys(range(4), (EVERYTHING,)))
    model.holdings.stand_in()
    (stand_in,) = model.holdings.blocks.values()
    refs = [StorageWeakRef(stand_in.buffers[0].untyped_storage())]
    del stand_in
    model.take_layout(layout, 0)
    block = model.holdings.idle_block()
    refs.append(StorageWeakRef(block.buffers[0].untyped_storage()))
    del block
    assert [one.expired() for one in refs] == [True, True]


def test_a_layer_that_returns_before_the_step_is_over_has_the_hooks_of_one_wrapper(model):
    from torch.autograd.graph import get_gradient_edge

    both = model.holdings.layout
    trained(model)
    model.take_layout(replace(both, holders=((0,), (0,), (0, 1), (1,))), 0)
    model.take_layout(both, 0)
    for parameter in model.holdings.held[3].parameters():
        handle = get_gradient_edge(parameter).node.register_hook(lambda *gradients: None)
        assert len(handle.hooks_dict_ref()) == 1 + 1, "DDP's, and this one"
        handle.remove()
