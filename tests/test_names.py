"""What people read counts as Megatron does."""

from __future__ import annotations

import pytest

from odyssey_megatron.names import layer_name, layer_names, lengths_text, step_name


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((0,), "the embedding"),
        ((5,), "the head"),
        ((1,), "layer 1"),
        ((0, 1, 2), "the embedding and layers 1 to 2"),
        ((0, 1, 3, 4, 5), "the embedding, layer 1, layers 3 to 4 and the head"),
    ],
)
def test_layers(layers, text):
    assert layer_names(layers, 6) == text
    if len(layers) == 1:
        assert layer_name(layers[0], 6) == text


def test_steps():
    assert step_name(3) == "step 3 (iteration 4)"


def test_pipelines_are_counted_where_there_are_many():
    assert lengths_text([(8, 2), (7, 1)]) == "8+8+7"
    assert lengths_text([*[(18, 1)] * 900, (17, 2)]) == "900x18+2x17"
