"""The loss scale of 16-bit training: a step that overflows changes nothing but the scale, which all ranks know."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.errors import ConfigError, NotFinite  # noqa: E402


def config(**changes: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        **{"fp16": True, "initial_loss_scale": 2.0**20, "loss_scale_window": 3.0} | changes
    )


def scale_of(optimizer_config: Any, *, ends_job: bool = True) -> Any:
    from odyssey_megatron.mcore.model.loss_scale import LossScale

    return LossScale(optimizer_config, ends_job=ends_job)


def rescale(model: Any, optimizer_config: Any) -> None:
    """Give ``model`` the loss scale of another config."""
    model.loss_scale.scaler = scale_of(optimizer_config).scaler


def train(model: Any, step: int) -> Any:
    """One step of two microbatches, of which this worker does all; its outcome."""
    model.begin_step(step)
    for microbatch in (0, 1):
        inner = model.compute.forward(microbatch, 0, 2, None).detach().clone()
        model.compute.kept(microbatch, 0, 2)
        model.compute.forward(microbatch, 2, 4, inner)
        grad = model.compute.input_grad(microbatch, 2, 4, None)
        model.compute.weight_grad(microbatch, 2, 4)
        model.compute.input_grad(microbatch, 0, 2, grad)
        model.compute.weight_grad(microbatch, 0, 2)
    return model.end.apply(model.end.local_totals(), lambda: None)


def tensors(model: Any) -> dict[str, Any]:
    return {
        f"{layer}.{name}": tensor.clone()
        for layer in range(4)
        for name, tensor in model.transfer.tensors_to_send(layer, 0).items()
    }


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_an_overflow_changes_nothing_but_the_scale(megatron, make_model):
    model = make_model(fp16=True)
    before, scale = tensors(model), model.loss_scale.value.item()
    outcomes = []
    while not outcomes or outcomes[-1].skipped:
        assert model.loss_scale.blames_nobody
        assert same(tensors(model), before)
        outcomes.append(train(model, len(outcomes)))
    *skipped, done = outcomes
    assert len(skipped) == model.loss_scale.skipped_steps > 2
    assert model.loss_scale.value.item() == scale / 2 ** (len(skipped) - 1), (
        "the first is forgiven (--hysteresis 2)"
    )
    assert {one.grad_norm for one in skipped} == {None}
    assert math.isfinite(done.grad_norm)
    assert not same(tensors(model), before)
    assert done.lr == skipped[0].lr, "skipped steps do not count in the schedule"
    unscaled = make_model()
    assert done.lr == train(unscaled, 0).lr
    assert train(model, len(outcomes)).lr == train(unscaled, 1).lr != done.lr


def test_gradients_are_those_without_a_scale(megatron, make_model):
    """In bfloat16, where no scale makes anything overflow or vanish: powers of two change no digit."""
    found = []
    for scale in (None, 2.0**14):
        model = make_model(bf16=True)
        rescale(model, config(fp16=False, bf16=True, loss_scale=scale))
        norms = [train(model, step).grad_norm for step in range(3)]
        found.append((norms, tensors(model)))
    (norms, weights), (scaled_norms, scaled_weights) = found
    assert scaled_norms == norms
    assert same(scaled_weights, weights)


@pytest.mark.parametrize("seed", range(5))
def test_who_joins_goes_on_like_the_others(megatron, seed):
    draw = random.Random(seed)
    known, joined = scale_of(config()), scale_of(config())
    for _ in range(draw.randrange(20)):
        known.update(skipped=draw.random() < 0.5, samples=draw.randrange(9))
    joined.take_over(known.state())
    for _ in range(20):
        assert joined.scaler.state_dict() == known.scaler.state_dict()
        assert (joined.skipped_steps, joined.skipped_samples) == (known.skipped_steps, known.skipped_samples)
        skipped = draw.random() < 0.3
        for one in (known, joined):
            one.update(skipped=skipped, samples=4)


def test_what_is_blamed_on_the_scale(megatron):
    dynamic = scale_of(config(min_loss_scale=2.0**19, hysteresis=1))
    assert dynamic.skips
    assert dynamic.blames_nobody
    dynamic.update(skipped=True, samples=4)
    assert dynamic.skips
    assert not dynamic.blames_nobody, "it is as small as it may be"
    for ends_job in (True, False):
        constant = scale_of(config(loss_scale=128.0), ends_job=ends_job)
        assert constant.skips is constant.blames_nobody is not ends_job
    none = scale_of(config(fp16=False))
    assert not none
    assert not none.skips
    assert not none.blames_nobody


def test_with_a_constant_scale_an_overflow_ends_the_job(megatron, make_model):
    model = make_model(fp16=True)
    rescale(model, config(loss_scale=2.0**40))
    with pytest.raises(NotFinite, match="No weight was changed"):
        train(model, 0)


@pytest.mark.parametrize(
    "numbers",
    [{"min_loss_scale": 2.0**21}, {"loss_scale": -1.0}, {"hysteresis": 0}, {"loss_scale_window": 0}],
)
def test_bad_numbers_are_refused(megatron, numbers):
    (name,) = numbers
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} {next(iter(numbers.values()))}"):
        scale_of(config(**numbers))
