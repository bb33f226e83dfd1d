"""Holders that have not the same bytes are found and named, and it is told who of them is right, where it can be."""

from __future__ import annotations

import pytest

from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import EVERYTHING, WHOLE

pytest.importorskip("torch")

W0, O0, W1, O1 = 100, 101, 200, 201
GOOD = (0, W0, O0, W1, O1)


def layout(workers: int, copies: int = 0) -> Layout:
    """Two layers on all workers; with ``copies`` of their optimizer state cut over them."""
    all_ = tuple(range(workers))
    return Layout(holders=(all_,) * 2, routes=(), keepers=(all_,) * 2 if copies else (), copies=copies)


def seen(rows):
    """Of each rank its number, a shard, and of two layers what its weights and its optimizer state hash to; -1: it has
    none.
    """
    kinds = [(layer, span) for layer in range(2) for span in (None, EVERYTHING)]
    return [
        (rank, shard, {kind: value for kind, value in zip(kinds, values, strict=True) if value != -1})
        for rank, shard, *values in rows
    ]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([(0, *GOOD), (4, *GOOD)], []),
        ([(0, 0, W0, O0, -1, -1), (4, 0, -1, -1, W1, O1)], []),  # other layers
        ([(0, 0, W0, O0, W1, -1), (4, 0, W0, -1, W1, O1)], []),  # not all keep optimizer state
        ([(0, *GOOD), (1, 1, 5, 6, 7, 8)], []),  # other shards
        (
            [(0, *GOOD), (4, 0, W0, O0, 7, O1), (6, *GOOD)],
            ["weights of the head on ranks [0, 6] and on [4]"],
        ),
        (
            [(0, 0, 7, 8, -1, -1), (4, *GOOD)],
            [
                "weights of the embedding on ranks [0] and on [4]",
                "optimizer state of the embedding on ranks [0] and on [4]",
            ],
        ),
    ],
)
def test_who_has_what(rows, found):
    from odyssey_megatron.mcore.model.holders import differences

    assert [one.said(2) for one in differences(seen(rows))] == found


@pytest.mark.parametrize(
    ("rows", "odd"),
    [
        ([(0, *GOOD), (1, 0, 7, O0, W1, O1), (2, *GOOD)], [1]),
        ([(0, *GOOD), (1, 0, 7, O0, W1, 8), (2, *GOOD), (3, *GOOD)], [1]),
        ([(0, *GOOD), (1, 0, 7, O0, W1, O1), (2, *GOOD), (3, 0, W0, O0, 8, O1), (4, *GOOD)], [1, 3]),
        ([(0, *GOOD), (1, 0, 7, O0, W1, O1), (2, *GOOD), (3, 0, 8, O0, W1, O1), (4, *GOOD)], [1, 3]),
        ([(0, *GOOD), (1, 0, 7, O0, W1, O1)], None),  # one against one
        ([(0, *GOOD), (1, *GOOD), (2, 0, 7, O0, W1, O1), (3, 0, 7, O0, W1, O1)], None),
        (
            [(0, *GOOD), (1, *GOOD), (2, 0, 7, O0, W1, O1), (3, 0, 8, O0, W1, O1)],
            None,
        ),  # half is no majority
        ([(0, 0, 7, O0, W1, O1), (1, 0, W0, O0, 7, O1), (2, *GOOD)], [0, 1]),
        ([(0, 0, 7, O0, W1, O1), (1, 0, W0, O0, 7, O1), (2, *GOOD[:3], 8, O1)], None),
    ],
)
def test_who_is_right(rows, odd):
    from odyssey_megatron.mcore.model.holders import decided, differences

    found = decided(differences(seen(rows)), layout(len(rows)), cell_size=1)
    assert (None if found is None else sorted(found)) == odd


@pytest.mark.parametrize(
    ("copies", "weights", "states", "odd"),
    [
        (2, (W0, W0, 7, W0), {}, [2]),  # changed behind the step
        (2, (W0, W0, 7, 7), {}, None),
        (
            2,
            (W0, 7, 7, 7),
            {(0, 0): 8},
            None,
        ),  # what it sent to all was wrong, or what another one has: who knows
        (3, (7, W0, W0, 7), {(0, 0): 8}, [0]),  # what it sent was, and is sent again
        (3, (W0, W0, W0, W0), {(1, 3): 8}, [1]),
        (3, (7, W0, W0, 7), {(0, 0): 8, (2, 1): 9}, [0, 2]),
        (3, (W0, W0, W0, W0), {(0, 0): 8, (1, 0): 9}, None),
    ],
)
def test_who_is_right_about_a_slice(copies, weights, states, odd):
    """``states``: (worker, slice) -> what others have not."""
    from odyssey_megatron.mcore.model.holders import decided, differences

    cut = layout(4, copies)
    rows = [
        (
            worker,
            0,
            {(0, None): weights[worker]}
            | {
                (0, one.span): states.get((worker, number), O0)
                for number, one in enumerate(cut.states[0])
                if worker in one.owners
            },
        )
        for worker in range(4)
    ]
    found = decided(differences(rows), cut, cell_size=1)
    assert (None if found is None else sorted(found)) == odd


def test_a_cell_is_one_holder():
    from odyssey_megatron.mcore.model.holders import decided, differences

    rows = [(rank, rank % 2, *([7] if rank == 3 else [W0 + rank % 2]), O0, W1, O1) for rank in range(6)]
    found = decided(differences(seen(rows)), layout(3), cell_size=2)
    assert list(found) == [1]
    assert "hash to 0000000000000007 on rank(s) [3], and to 0000000000000065 on ranks [1, 5]" in found[1]


def test_a_cell_whose_own_ranks_differ_has_nothing_that_is_right():
    """Context parallelism: both ranks of a cell have the same shard, and one of cell 0 another's bytes."""
    from odyssey_megatron.mcore.model.holders import decided, differences

    rows = [(rank, 0, *([7] if rank == 1 else [W0]), O0, W1, O1) for rank in range(6)]
    found = decided(differences(seen(rows)), layout(3), cell_size=2)
    assert list(found) == [0]
    assert "not the same on its own ranks" in found[0]
    assert decided(differences(seen(rows[:4])), layout(2), cell_size=2) is None, "one opinion against none"


def test_nobody_leaves_who_alone_has_a_layer():
    from odyssey_megatron.mcore.model.holders import decided, differences

    rows = [(0, *GOOD), (1, 0, 7, O0, -1, -1), (2, 0, W0, O0, -1, -1)]
    holders = ((0, 1, 2), (1,))
    assert decided(differences(seen(rows)), Layout(holders=holders, routes=()), cell_size=1) is None


def test_owners_compare_the_weights_of_their_slices_by_themselves(model):
    """Others have been sent them by the first owner, and so what is wrong with it, too."""
    from odyssey_megatron.mcore.model.holders import digests

    half = (0, WHOLE // 2)
    held = model.holdings.held[1]
    held.optimizer = model.holdings.optimizer_of(held, (half,))

    def seen(**how):
        found, _ = digests([held], model.holdings.parts, model.holdings.stretches, **how)
        return found

    before, state = seen(with_stepped=True), seen()
    weights = [*held.weights().values()]
    weights[-1].data.view(-1)[-1] += 1.0  # which others step
    assert [key for key, one in seen(with_stepped=True).items() if one != before[key]] == [(1, None)]
    weights[0].data.view(-1)[0] += 1.0
    assert seen(with_stepped=True)[1, half] != before[1, half]
    assert seen()[1, half] == state[1, half]
