"""Experts that get more tokens than others hold up the ranks over which they are spread, and so does a smaller gang."""

from __future__ import annotations

from dataclasses import replace

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.expert_loads import expert_loads
from odyssey_megatron.cluster.state import initial_state, with_expert_loads

GANG = Cell.of(0, tensor=1, expert=4, experts=8)
EVEN = [10.0] * 8
HOT = [0.0, 40.0, 0.0, 0.0, 10.0, 10.0, 10.0, 10.0]
"""The first rank of four has half of all tokens."""


def test_equal_experts_load_ranks_by_their_number():
    assert expert_loads(GANG, [EVEN]) == {4: 1.0, 3: 1.5, 2: 2.0, 1: 4.0}


def test_the_busiest_rank_of_each_layer_counts():
    assert expert_loads(GANG, [HOT]) == {4: 2.0, 3: 2.0, 2: 2.0, 1: 4.0}
    assert expert_loads(GANG, [HOT, EVEN])[4] == 1.5, "all wait for it in each layer"
    other = [*reversed(HOT)]
    assert expert_loads(GANG, [HOT, other])[4] == 2.0, "even if it is another rank in each"


def test_layers_with_more_tokens_count_more():
    assert expert_loads(GANG, [HOT, [70.0] * 8])[4] == 1.125


def test_nothing_is_known_without_tokens():
    assert expert_loads(GANG, []) == expert_loads(GANG, [[0.0] * 8]) == {}


def test_tensor_parallel_ranks_share_their_experts():
    cells = Cell.of(0, tensor=2, expert=2, experts=4)
    assert cells.size == 4
    assert expert_loads(cells, [[30.0, 10.0, 0.0, 0.0]]) == {4: 2.0, 2: 2.0}


def paces(loads, experts_work=0.5):
    state = with_expert_loads(
        initial_state(nodes=(0,) * 8, cell_size=4, experts=2, experts_work=experts_work), loads
    )
    return {size: state.workers[0].smaller(size).pace for size in (4, 3, 2)}


def test_a_smaller_gang_is_as_slow_as_its_busiest_rank_beside_that_of_a_whole_one():
    """Its other work takes two turns in any case."""
    assert paces({}) == paces(expert_loads(GANG, [EVEN])) == {4: 1.0, 3: 1 / 1.75, 2: 0.5}
    assert paces(expert_loads(GANG, [HOT])) == {4: 1.0, 3: 1 / 1.5, 2: 1 / 1.5}, (
        "it waits no longer than before"
    )
    assert paces(expert_loads(GANG, [HOT]), experts_work=0.0) == {4: 1.0, 3: 0.5, 2: 0.5}


def test_a_smaller_gang_is_never_faster_than_a_whole_one():
    assert paces({4: 3.0, 3: 1.5, 2: 2.0}, experts_work=1.0) == {4: 1.0, 3: 1.0, 2: 1.0}


def test_loads_do_not_count_as_memory():
    state = initial_state(nodes=(0,) * 8, cell_size=4, experts=2, experts_work=0.5)
    known = with_expert_loads(state, expert_loads(GANG, [HOT]))
    for size in (4, 3, 2):
        small = state.workers[0].smaller(size)
        assert known.workers[0].smaller(size).beside_whole == small.beside_whole
        assert replace(known.workers[0].smaller(size), expert_loads=()) == small
