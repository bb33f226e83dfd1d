"""Transformer Engine's own layers on a GPU: ``bash tests/run.sh -m gpu tests/mcore/test_te_gpu.py``.

Written without a GPU at hand. In a process of their own: the other tests of this folder redirect ``torch.cuda``.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.jobserver import CHECKOUT
from tests.mcore.conftest import MODEL

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SAME = {"rtol": 1e-5, "atol": 1e-6}
"""Two microbatches in another order: the float32 sums differ by rounding at most."""


@pytest.fixture
def te() -> Any:
    """``transformer_engine.pytorch``."""
    if "tests.te.on_cpu" not in sys.modules:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        if hasattr(torch, "_odyssey_cpu_device"):
            pytest.skip("an earlier test has redirected torch.cuda to the CPU: run with -m gpu")
    try:
        import transformer_engine.pytorch
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no transformer_engine: {error}")
    return transformer_engine.pytorch


def zero(model: Any) -> None:
    for weight in model.parameters():
        weight.main_grad, weight.grad = torch.zeros_like(weight, dtype=torch.float32), None


def mlp(te: Any, *, fused: bool, bias: bool = False) -> Any:
    """Norm, linear, linear, as in Megatron's TE layers; the same weights each time."""
    torch.manual_seed(1)
    usual = {"bias": bias, "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused}
    model = torch.nn.Sequential(
        te.LayerNormLinear(64, 128, normalization="RMSNorm", **usual), te.Linear(128, 64, **usual)
    )
    zero(model)
    return model


def backward(model: Any, microbatch: int, later: Any) -> None:
    torch.manual_seed(100 + microbatch)
    columns = torch.randn(16, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    loss = model(columns).float().square().sum()
    with later.collecting():
        loss.backward()
    for weight in model.parameters():  # Megatron's DDP hook
        if weight.grad is not None:
            weight.main_grad.add_(weight.grad)
            weight.grad = None


def gradients(model: Any) -> dict[str, Any]:
    return {name: weight.main_grad.clone() for name, weight in model.named_parameters()}


def whole(te: Any, microbatches: tuple[int, ...], **kind: bool) -> dict[str, Any]:
    from odyssey_megatron.mcore.model.wgrad import WeightGrads

    model = mlp(te, **kind)
    for microbatch in microbatches:
        backward(model, microbatch, WeightGrads())
    return gradients(model)


def halves(te: Any, **kind: bool) -> Any:
    from odyssey_megatron.mcore.model.te import split

    model = mlp(te, **kind)
    split(model, SimpleNamespace())
    return model


@pytest.mark.parametrize("fused", [False, True])
def test_split_weight_gradients_are_the_fused_ones(te, fused):
    from odyssey_megatron.mcore.model.wgrad import WeightGrads

    model, flights = halves(te, fused=fused), [WeightGrads(), WeightGrads()]
    for microbatch, flight in enumerate(flights):
        backward(model, microbatch, flight)
    assert not model[0].weight.main_grad.any()
    assert not model[1].weight.main_grad.any()
    assert model[0].layer_norm_weight.main_grad.any(), "norms have their ordinary backward"
    for flight in reversed(flights):
        flight.flush()
    torch.testing.assert_close(gradients(model), whole(te, (0, 1), fused=fused), **SAME)


def test_an_abandoned_step_leaves_nothing(te):
    from odyssey_megatron.mcore.model.wgrad import WeightGrads

    model = halves(te, fused=True)
    backward(model, 7, WeightGrads())
    gc.collect()
    zero(model)
    again = WeightGrads()
    backward(model, 0, again)
    again.flush()
    torch.testing.assert_close(gradients(model), whole(te, (0,), fused=True), **SAME)


def test_layers_with_a_bias_are_not_split(te):
    from odyssey_megatron.mcore.model.wgrad import WeightGrads

    model = halves(te, fused=True, bias=True)
    backward(model, 0, WeightGrads())
    torch.testing.assert_close(gradients(model), whole(te, (0,), fused=True, bias=True), **SAME)


def test_a_buffer_that_is_replaced_behind_the_forward_gets_the_gradient(te):
    """What ``te.READS_LATE`` says: a block is cut anew while a microbatch is between its forward and its backward."""
    model = mlp(te, fused=True)
    old = model[1].weight.main_grad
    loss = model(torch.randn(16, 2, 64, device="cuda", dtype=torch.bfloat16)).float().sum()
    zero(model)
    loss.backward()
    assert not old.any()
    assert model[1].weight.main_grad.any()


def test_types_without_kernels_are_refused(te, monkeypatch):
    from odyssey_megatron.errors import ConfigError
    from odyssey_megatron.mcore.model.te import split

    monkeypatch.delitem(te.constants.TE_DType, torch.float64, raising=False)
    with pytest.raises(ConfigError, match=r"no kernels for torch.float64.*--transformer-impl local"):
        split(te.Linear(8, 8, params_dtype=torch.float64), SimpleNamespace())


@pytest.fixture
def te_spec(te: Any) -> Any:
    """The example's model, of Megatron's TE layers, in bfloat16, and its groups."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from odyssey_megatron.mcore.model import groups, rng, span, wgrad

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    collection = groups.initialize()
    rng.initialize(1)
    wgrad.install()
    span.install()
    sys.path.insert(0, str(CHECKOUT / "examples" / "llama"))
    import corpus
    import pretrain_llama
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.enums import AttnBackend

    values = MODEL | {"hidden_size": 128, "ffn_hidden_size": 256, "bf16": True}
    made = pretrain_llama.model_spec(argparse.Namespace(**values), float64=False)
    made.config.attention_backend = AttnBackend.unfused  # the others may sum in any order
    layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()

    def provider(pre_process: bool, post_process: bool, pg_collection: Any) -> Any:
        return GPTModel(
            made.config, layer, vocab_size=corpus.VOCAB_SIZE, max_sequence_length=16, pre_process=pre_process,
            post_process=post_process, share_embeddings_and_output_weights=False, position_embedding_type="rope",
            pg_collection=pg_collection,
        )  # fmt: skip

    return replace(made, model_provider=provider), collection


@pytest.mark.parametrize("fused", [False, True])
def test_a_block_of_megatron_s_te_layers(te_spec, fused):
    """Split in the other order equals whole, and a fresh block adds to the sums that it was given."""
    from odyssey_megatron.mcore.model import te
    from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock, initial_parts
    from odyssey_megatron.mcore.model.rng import LayerSeeds
    from odyssey_megatron.mcore.model.wgrad import WeightGrads

    model, groups = te_spec
    model.config.gradient_accumulation_fusion = fused
    te.prepare(model.config)

    def run(*, apart: bool) -> dict[str, Any]:
        parts = initial_parts(model, [1], groups)
        layer = HeldLayer(model, 1, parts[1], groups, LayerSeeds(7), kept=())
        block = LayerBlock(model, [layer], groups)
        for weight in layer.parameters():
            weight.main_grad.fill_(1.0)
        flights = [WeightGrads(), WeightGrads()]
        for microbatch, flight in enumerate(flights):
            torch.manual_seed(microbatch)
            hidden = torch.randn(16, 1, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            block.model.module.set_input_tensor([hidden])
            loss = block.model(None, None, None).float().square().sum()
            with flight.collecting():
                loss.backward()
            if not apart:
                flight.flush()
        fc1 = layer.parts["layer"].mlp.linear_fc1.weight.main_grad
        assert bool((fc1 == 1.0).all()) is apart, "left for later"
        for flight in reversed(flights):
            flight.flush()
        return gradients(layer)

    torch.testing.assert_close(run(apart=True), run(apart=False), **SAME)


AVAILABLE = {
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


@pytest.mark.parametrize("recipe", AVAILABLE)
def test_fp8_is_a_function_of_weights_and_input(te_spec, recipe):
    """A layer that has seen other microbatches computes what a fresh one does; and not what bf16 does."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    from odyssey_megatron.mcore.model import te
    from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock, initial_parts
    from odyssey_megatron.mcore.model.rng import LayerSeeds

    is_available, why = getattr(FP8GlobalStateManager, AVAILABLE[recipe])()
    if not is_available:
        pytest.skip(why)
    model, groups = te_spec
    model.config.fp8, model.config.fp8_recipe = "hybrid", recipe
    te.prepare(model.config)

    def run(*microbatches: int) -> tuple[Any, dict[str, Any]]:
        parts = initial_parts(model, [1], groups)
        layer = HeldLayer(model, 1, parts[1], groups, LayerSeeds(7), kept=())
        block = LayerBlock(model, [layer], groups)
        for microbatch in microbatches:
            block.zero_gradients()
            torch.manual_seed(microbatch)
            scale = 10.0**microbatch  # other amaxes than before
            hidden = scale * torch.randn(128, 1, 128, device="cuda", dtype=torch.bfloat16)
            block.model.module.set_input_tensor([hidden.requires_grad_()])
            output = block.model(None, None, None)
            output.float().square().sum().backward()
        return output.detach().float(), gradients(layer)

    used, fresh = run(3, 1, 2, 0), run(0)
    torch.testing.assert_close(used[0], fresh[0], rtol=0.0, atol=0.0)
    torch.testing.assert_close(used[1], fresh[1], **SAME)
    model.config.fp8 = None
    assert not torch.equal(run(0)[0], fresh[0]), "it was not fp8"
