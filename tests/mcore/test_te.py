"""Transformer Engine's layers: what does not need them. ``test_te_gpu.py`` has the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from odyssey_megatron.plan.placing.slices import EVERYTHING

torch = pytest.importorskip("torch")

PUT = ("tensor_list", "func")


def test_the_model_is_built_with_layers_that_always_add(spec, megatron):
    from odyssey_megatron.mcore.model.layers import build_parts
    from odyssey_megatron.mcore.model.model import MegatronModel

    model = spec()
    assert model.config.disable_parameter_transpose_cache is False, "Megatron's default"
    MegatronModel(model, num_microbatches=1, seq_length=16, micro_batch_size=1, groups_of_cell=megatron)
    linear = build_parts(model, 1, 2, megatron)[1]["layer"].mlp.linear_fc1
    assert linear.config.disable_parameter_transpose_cache is True


@pytest.mark.parametrize("name", ["fp8_param", "fp4", "use_kitchen", "quant_recipe"])
def test_quantized_training_is_refused(name):
    from odyssey_megatron.errors import ConfigError
    from odyssey_megatron.mcore.model import te

    with pytest.raises(ConfigError, match=f"{name} of the transformer config"):
        te.prepare(SimpleNamespace(**{name: "hybrid"}))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("delayed", "goes by what each rank has seen before"),
        ("tensorwise", "fp8 needs Transformer Engine 2.3"),
    ],
)
def test_fp8_that_keeps_a_history_or_would_not_be_fp8_is_refused(recipe, said):
    """Without Transformer Engine Megatron's context of fp8 does nothing."""
    from odyssey_megatron.errors import ConfigError
    from odyssey_megatron.mcore.model import te

    with pytest.raises(ConfigError, match=said):
        te.prepare(SimpleNamespace(fp8="hybrid", fp8_recipe=recipe))


@pytest.mark.parametrize(
    ("config", "layer", "reason"),
    [
        ({}, {}, None),
        ({"tp_comm_overlap": False}, {}, None),
        ({}, {"put": ()}, "does not delay"),
        ({}, {"put": ("tensor_list", "func", "stream")}, "does not delay"),
        ({"fp8": "hybrid"}, {}, "fp8"),
        ({"tp_comm_overlap": True}, {}, "tp_comm_overlap"),
        ({"cpu_offloading": True}, {}, "cpu_offloading"),
        ({"fine_grained_activation_offloading": True}, {}, "fine_grained_activation_offloading"),
        ({}, {"has_bias": True}, "bias"),
        ({}, {"weights": ("query_weight", "key_weight", "value_weight")}, "several weights"),
    ],
)
def test_where_the_backward_is_not_split_there_is_a_reason(config, layer, reason):
    from odyssey_megatron.mcore.model.te import why_whole

    facts = {"has_bias": False, "weights": ("weight",), "put": PUT} | layer
    said = why_whole(SimpleNamespace(**config), **facts)
    assert said is None if reason is None else reason in said


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_put_waits_with_its_microbatch(fused):
    """Two microbatches in flight, flushed in the other order; a third is abandoned; outside of one nothing waits."""
    from odyssey_megatron.mcore.model.te import Later
    from odyssey_megatron.mcore.model.wgrad import WeightGrads

    weight = torch.nn.Parameter(torch.zeros(2, 3))
    weight.main_grad = torch.zeros(2, 3)
    store, inputs = Later(weight, fused=fused), torch.randn(4, 5, 3)
    assert store.delay_wgrad_compute()

    def put(microbatch: int) -> None:
        buffer = weight.main_grad  # what a fused multiplication adds to is settled in the backward

        def multiply(columns, rows):
            gradient = rows.t().matmul(columns)
            return (buffer.add_(gradient) if fused else gradient), None

        store.put([inputs[microbatch], torch.ones(5, 2)], multiply)

    def gradient(*microbatches: int):
        return sum(inputs[m].sum(0).expand(2, 3) for m in microbatches)

    flights = [WeightGrads() for _ in range(3)]
    for microbatch, flight in enumerate(flights):
        with flight.collecting():
            put(microbatch)
    assert not weight.main_grad.any()
    flights[1].flush()
    torch.testing.assert_close(weight.main_grad, gradient(1))
    flights[1].flush()
    torch.testing.assert_close(weight.main_grad, gradient(1), msg="once")
    flights[0].flush()
    torch.testing.assert_close(weight.main_grad, gradient(0, 1))
    del flights[2]
    put(3)
    torch.testing.assert_close(weight.main_grad, gradient(0, 1, 3))


def test_what_waits_is_not_lost_when_its_block_is_cut_anew(spec, megatron):
    """Between input gradient and weight gradient, as in a step that goes on after a failure."""
    import pretrain_llama

    from odyssey_megatron.mcore.loop.data import MicrobatchSource
    from odyssey_megatron.mcore.model import wgrad
    from odyssey_megatron.mcore.model.model import MegatronModel
    from odyssey_megatron.plan.layout import Layout

    tokens = torch.arange(16) % 11
    sample = {
        "tokens": tokens,
        "position_ids": torch.arange(16),
        "labels": tokens,
        "loss_mask": torch.ones(16),
    }

    def gradient(bound: bool, *later_holders: tuple[int, ...]):
        model = MegatronModel(
            spec(), forward_step=pretrain_llama.forward_step, num_microbatches=1, seq_length=16, micro_batch_size=1,
            groups_of_cell=megatron, source=MicrobatchSource([sample], micro_batch_size=1),
        )  # fmt: skip
        model.holdings.create_layers(range(4), dict.fromkeys(range(4), (EVERYTHING,)))
        model.take_layout(Layout(holders=((0,),) * 4, routes=()), 0)
        layer = model.holdings.chunks[0].layers[1].parts["layer"]
        weight = layer.mlp.linear_fc1.weight

        def leave(norm_gradient) -> None:
            wgrad.later(weight, lambda buffer=weight.main_grad: buffer.add_(1.0))

        if bound:
            layer.input_layernorm.weight.register_hook(leave)
        model.begin_step(0)
        model.compute.forward(0, 0, 4, None)
        model.compute.input_grad(0, 0, 4, None)
        before = weight.main_grad
        assert not before.any()
        if later_holders:
            model.take_layout(Layout(holders=later_holders, routes=()), 0)
            assert weight.main_grad is not before
        model.compute.weight_grad(0, 0, 4)
        return weight.main_grad.clone()

    undisturbed = gradient(bound=False)
    assert undisturbed.any()
    cut = (0,), (0, 1), (0,), (0,)
    torch.testing.assert_close(gradient(False, *cut), undisturbed)
    torch.testing.assert_close(gradient(True), undisturbed + 1.0)
    torch.testing.assert_close(gradient(True, *cut), undisturbed + 1.0)


def test_the_doctor_warns_of_the_versions_that_are_refused():
    from odyssey_megatron.doctor import packages
    from odyssey_megatron.mcore.model import te

    assert te.READS_LATE == ".".join(map(str, (*packages._TE_READS_LATE, 0)))
