"""Transformer Engine's layers. What needs them runs where a GPU and TE are at hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")


def test_the_model_is_built_with_layers_that_always_add(spec, megatron):
    from odyssey_megatron.mcore.layers import build_parts
    from odyssey_megatron.mcore.model import MegatronModel

    model = spec()
    assert model.config.disable_parameter_transpose_cache is False, "Megatron's default"
    MegatronModel(model, num_microbatches=1, message_shape=(16, 1, 32), cell=megatron)
    linear = build_parts(model, 1, 2, megatron)[1]["layer"].mlp.linear_fc1
    assert linear.config.disable_parameter_transpose_cache is True


@pytest.mark.parametrize("name", ["fp8", "fp4", "use_kitchen", "quant_recipe"])
def test_quantized_training_is_refused(name):
    from odyssey_megatron.errors import ConfigError
    from odyssey_megatron.mcore import te

    with pytest.raises(ConfigError, match=f"{name} of the transformer config"):
        te.prepare(SimpleNamespace(**{name: "hybrid"}))
