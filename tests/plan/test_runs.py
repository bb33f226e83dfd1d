"""Lists of numbers as short text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odyssey_megatron.plan.sending.runs import from_runs, to_runs


@given(st.lists(st.integers(0, 30)))
def test_there_and_back(numbers):
    assert from_runs(to_runs(numbers)) == tuple(numbers)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        ((5,), "5"),
        ((0, 1, 2, 3, 7, 8, 48, 88, 128), "0-3,7,8-128:40"),
        ((9, 5, 1), "9,5,1"),
        ((4, 4, 4, 4), "4,4,4,4"),
    ],
)
def test_as_it_looks(numbers, text):
    assert to_runs(numbers) == text
    assert from_runs(text) == numbers
