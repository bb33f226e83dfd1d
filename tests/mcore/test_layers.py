"""Layers, blocks, split weight gradients, seeds and the learning rate of one rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def held(spec: Any, groups: Any) -> list[Any]:
    from odyssey_megatron.mcore.model import rng
    from odyssey_megatron.mcore.model.layers import HeldLayer, initial_parts

    seeds = rng.LayerSeeds(spec.seed)
    parts = initial_parts(spec, range(spec.num_layers), groups)
    return [HeldLayer(spec, index, parts[index], groups, seeds) for index in range(spec.num_layers)]


def batch(seq_length: int = 16) -> tuple[Any, Any]:
    tokens = torch.arange(seq_length)[None] % 11
    return tokens, torch.arange(seq_length)[None]


def run(blocks: list[Any]) -> Any:
    """Sum of the losses through a chain of blocks."""
    from megatron.core.utils import get_attr_wrapped_model

    tokens, positions = batch()
    tensor = None
    for block in blocks:
        get_attr_wrapped_model(block.model, "set_input_tensor")([tensor])
        last = block is blocks[-1]
        tensor = block.model(tokens, positions, None, labels=tokens if last else None)
    return tensor.sum()


def equal(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(one, others[name]) for name, one in some.items())


def gradients(layers: list[Any]) -> dict[str, Any]:
    return {
        f"{layer.index}.{name}": parameter.main_grad.clone()
        for layer in layers
        for name, parameter in layer.named_parameters()
    }


def blocks_of(spec: Any, layers: list[Any], groups: Any, *ends: int) -> list[Any]:
    from odyssey_megatron.mcore.model.layers import LayerBlock

    return [LayerBlock(spec, layers[a:b], groups) for a, b in zip((0, *ends), ends, strict=False)]


@pytest.mark.parametrize(
    ("name", "differs"), [("data-parallel-rng", False), ("model-parallel-rng", True)], ids=["alike", "cut"]
)
def test_what_all_tensor_parallel_ranks_have_alike_is_drawn_alike(megatron, name, differs):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from odyssey_megatron.mcore.model import rng

    def drawn_from(tensor: int) -> Any:
        rng.set_state(1, step=-1, microbatch=-1, layer=3, part=rng.LayerPart(tensor=tensor))
        return get_cuda_rng_tracker().get_states()[name]

    assert torch.equal(drawn_from(0), drawn_from(0))
    assert torch.equal(drawn_from(0), drawn_from(1)) != differs


def test_initial_weights_depend_on_the_layer_alone(spec, megatron):
    from odyssey_megatron.mcore.model.layers import initial_parts

    model = spec()
    first = initial_parts(model, [2], megatron)[2].state_dict()
    initial_parts(model, [0], megatron)  # other layers built in between draw other numbers
    again = initial_parts(model, [2], megatron)[2].state_dict()
    other = initial_parts(model, [1], megatron)[1].state_dict()
    weight = "layer.mlp.linear_fc1.weight"
    assert torch.equal(first[weight], again[weight])
    assert not torch.equal(first[weight], other[weight])


@pytest.mark.parametrize("ends", [(4,), (1, 4), (2, 3, 4), (1, 2, 3, 4)])
def test_any_cut_into_blocks_computes_the_same(spec, megatron, ends):
    model = spec()
    layers = held(model, megatron)
    run(blocks_of(model, layers, megatron, 4)).backward()
    whole = gradients(layers)
    blocks = blocks_of(model, layers, megatron, *ends)
    assert all(float(grad.abs().sum()) == 0.0 for grad in gradients(layers).values()), "fresh buffers"
    run(blocks).backward()
    assert gradients(layers).keys() == whole.keys()
    for name, grad in gradients(layers).items():
        assert torch.equal(grad, whole[name]), name


@pytest.mark.parametrize("ffn_hidden_size", [48, 0])
def test_split_weight_gradients_are_the_fused_ones(spec, megatron, ffn_hidden_size):
    """Also of an MLP without units, as Megatron makes it of a hidden size below 24 with --swiglu alone."""
    from odyssey_megatron.mcore.model.wgrad import WeightGrads

    model = spec(ffn_hidden_size=ffn_hidden_size)
    layers = held(model, megatron)
    blocks = blocks_of(model, layers, megatron, 4)
    run(blocks).backward()
    fused = gradients(layers)
    blocks[0].zero_gradients()
    later = WeightGrads()
    loss = run(blocks)
    with later.collecting():
        loss.backward()
    name = "1.parts.layer.mlp.linear_fc1.weight"
    assert float(gradients(layers)[name].abs().sum()) == 0.0, "left for later"
    later.flush()
    for name, grad in gradients(layers).items():
        assert torch.equal(grad, fused[name]), name


OPTIMIZERS = {
    "adam": {},
    "sgd": {"optimizer": "sgd"},
    "sgd-without-momentum": {"optimizer": "sgd", "sgd_momentum": 0.0},
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_moved_layer_is_the_same_layer(spec, megatron, kind, steps):
    """Weights and what the optimizer keeps, before its first step and after others; equal further steps on both."""
    model = spec(**OPTIMIZERS[kind])
    layers, copies = held(model, megatron), held(replace(model, seed=model.seed + 1), megatron)
    for _ in range(steps):
        blocks = blocks_of(model, layers, megatron, 4)
        run(blocks).backward()
        for layer in layers:
            layer.optimizer.apply(0.5)
    for source, target in zip(layers, copies, strict=True):
        assert not equal(source.weights(), target.weights())
        for name, ours in target.moved_tensors().items():
            ours.copy_(source.moved_tensors()[name])
    for group in (layers, copies):
        run(blocks_of(model, group, megatron, 4)).backward()
        for layer in group:
            layer.optimizer.apply(0.5)
    for source, target in zip(layers, copies, strict=True):
        assert equal(source.moved_tensors(), target.moved_tensors())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_is_there_before_the_first_step_and_changes_no_step(spec, megatron, kind):
    """As if the optimizer itself had created it lazily."""
    model = spec(**OPTIMIZERS[kind])
    layers, lazy = held(model, megatron), held(model, megatron)
    for layer in lazy:
        (megatrons,) = layer.optimizer._megatron
        megatrons.optimizer.state.clear()
    for group in (layers, lazy):
        for _ in range(2):
            run(blocks_of(model, group, megatron, 4)).backward()
            for layer in group:
                names = list(layer.optimizer.state_tensors())
                layer.optimizer.apply(0.5)
                assert group is lazy or list(layer.optimizer.state_tensors()) == names
    for ours, theirs in zip(layers, lazy, strict=True):
        assert equal(ours.moved_tensors(), theirs.moved_tensors())
        weights = len(ours.weights())
        state = {"adam": 3 * weights, "sgd": weights, "sgd-without-momentum": 0}[kind]
        assert len(ours.moved_tensors()) == weights + state


def test_dropout_is_a_function_of_step_microbatch_and_layer(spec, megatron):
    from odyssey_megatron.mcore.model import rng
    from odyssey_megatron.mcore.model.layers import HeldLayer, initial_parts

    model = spec(attention_dropout=0.2, hidden_dropout=0.2)
    seeds = rng.LayerSeeds(model.seed)
    parts = initial_parts(model, range(model.num_layers), megatron)
    layers = [HeldLayer(model, index, parts[index], megatron, seeds) for index in range(model.num_layers)]
    whole = blocks_of(model, layers, megatron, 4)

    def loss(step: int, microbatch: int, blocks: list[Any]) -> float:
        seeds.step, seeds.microbatch = step, microbatch
        return float(run(blocks).detach())

    first = loss(3, 5, whole)
    assert loss(3, 6, whole) != first
    assert loss(4, 5, whole) != first
    torch.rand(17)  # whatever was drawn before does not matter
    assert loss(3, 5, whole) == first
    assert loss(3, 5, blocks_of(model, layers, megatron, 1, 3, 4)) == first, "nor do the blocks"


def test_learning_rate_is_megatron_s(spec, megatron):
    import pretrain_llama
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from odyssey_megatron.mcore.loop.batches import Batches
    from odyssey_megatron.mcore.model.loss_scale import LossScale
    from odyssey_megatron.mcore.model.optimizer import LearningRate

    none = LossScale(spec().optimizer_config, ends_job=True)

    class Args:
        train_iters, global_batch_size, lr, min_lr, lr_warmup_iters, weight_decay = 10, 8, 1e-3, 1e-4, 3, 0.1

    group = {"params": [], "lr": 0.0}
    arguments = pretrain_llama.scheduler_arguments(Args)
    plain = SimpleNamespace(param_groups=[group])
    scheduler, ours = OptimizerParamScheduler(plain, **arguments), LearningRate(**arguments)
    for step in range(10):
        assert ours.set([], step, Batches.constant(8), none) == group["lr"]
        scheduler.step(increment=8)


def test_float64_stays_float64(spec, megatron):
    model = spec()
    layers = held(model, megatron)
    assert {p.dtype for layer in layers for p in layer.parameters()} == {torch.float64}
    loss = run(blocks_of(model, layers, megatron, 4))
    assert loss.dtype == torch.float64
    as_float32 = float(loss.detach().to(torch.float32))
    assert float(loss.detach()) != as_float32, "no float32 on the way"


def test_collectives_on_groups_that_are_not_ours_fail_loudly(megatron):
    from megatron.core import parallel_state

    for asked in (parallel_state.get_data_parallel_world_size, parallel_state.get_data_parallel_rank):
        with pytest.raises(RuntimeError, match="of Megatron's data-parallel group: replicas change"):
            asked()
    with pytest.raises(ValueError, match="not initialized"):
        torch.distributed.all_reduce(torch.ones(1), group=parallel_state.get_data_parallel_group())
