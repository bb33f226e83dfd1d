"""Holders that have not the same bytes are found, and named."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

W0, O0, W1, O1 = 100, 101, 200, 201


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([(0, 0, W0, O0, W1, O1), (4, 0, W0, O0, W1, O1)], []),
        ([(0, 0, W0, O0, -1, -1), (4, 0, -1, -1, W1, O1)], []),  # other layers
        ([(0, 0, W0, O0, W1, -1), (4, 0, W0, -1, W1, O1)], []),  # not all keep optimizer state
        ([(0, 0, W0, O0, W1, O1), (1, 1, 5, 6, 7, 8)], []),  # other shards
        (
            [(0, 0, W0, O0, W1, O1), (4, 0, W0, O0, 7, O1), (6, 0, W0, O0, W1, O1)],
            ["weights of the head on ranks [0, 6] and on [4]"],
        ),
        (
            [(0, 0, 7, 8, -1, -1), (4, 0, W0, O0, W1, O1)],
            [
                "weights of the embedding on ranks [0] and on [4]",
                "optimizer state of the embedding on ranks [0] and on [4]",
            ],
        ),
    ],
)
def test_who_has_what(rows, found):
    from odyssey_megatron.mcore.holders import differences

    assert differences(rows, num_layers=2) == found
