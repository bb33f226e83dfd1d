"""Experts in slots, as many for each rank of a gang as the fullest one has experts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odyssey_megatron.cluster.slots import Slots


def test_three_ranks_have_eight_experts():
    slots = Slots.evenly(8, 3)
    assert slots.held == ((0, 1, 2), (3, 4, 5), (6, 7))
    assert (slots.each, slots.count) == (3, 9)
    assert slots.of_experts == (0, 1, 2, 3, 4, 5, 6, 7)
    assert Slots.evenly(5, 3).of_experts == (0, 1, 2, 3, 4), "a last rank has fewer"
    assert Slots.evenly(4, 3).of_experts == (0, 1, 2, 4)


def test_any_expert_may_be_on_any_rank():
    slots = Slots(((1, 4), (0,), (2, 3)))
    assert slots.of_experts == (2, 0, 4, 5, 1)


@given(st.integers(1, 12), st.integers(0, 60))
def test_each_expert_has_a_slot_of_its_rank(ranks, more):
    slots = Slots.evenly(ranks + more, ranks)
    assert sorted(one for own in slots.held for one in own) == [*range(ranks + more)]
    assert max(map(len, slots.held)) - min(map(len, slots.held)) <= 1
    if more % ranks == 0:
        assert slots.of_experts == tuple(range(ranks + more)), "slots are experts, as in Megatron"
    assert len(set(slots.of_experts)) == ranks + more
    for rank, own in enumerate(slots.held):
        for expert in own:
            assert slots.of_experts[expert] // slots.each == rank


def test_a_rank_without_experts_is_refused():
    with pytest.raises(ValueError, match="2 experts on 3 ranks"):
        Slots.evenly(2, 3)
