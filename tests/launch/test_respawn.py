"""Which broken cell becomes whole again, out of what."""

from __future__ import annotations

from itertools import combinations

import pytest

pytest.importorskip("torch")

from odyssey_megatron.launch.places import Move, Places, completed, shrunk

EIGHT = {rank: rank for rank in range(8)}


def left(*lost: int) -> dict[int, int]:
    return {rank: slot for rank, slot in EIGHT.items() if rank not in lost}


@pytest.mark.parametrize(
    ("cell_size", "lost", "expected"),
    [
        (1, [3], {}),  # nobody stands by
        (1, [3, 5], {}),
        (2, [3], {}),  # rank 2 stands by, and nothing lacks it
        (2, [3, 6], {3: 7}),
        (2, [6, 3], {3: 7}),  # the order of the deaths does not matter
        (2, [2, 3, 5], {}),  # both of one cell are gone
        (2, [3, 4, 6], {3: 5}),
        (4, [1, 6], {1: 4}),
        (4, [1, 5, 6], {1: 4}),
        (4, [1, 2, 5], {5: 0}),  # the cell that lacks fewest
        (4, [0, 1, 4, 5], {0: 6, 1: 7}),
        (4, [0, 1, 2, 4, 5], {}),  # lacks two, and one is left
    ],
)
def test_one_broken_cell_is_completed_from_the_others(cell_size, lost, expected):
    assert completed(left(*lost), lost, cell_size) == expected


def test_slots_stay_with_their_processes():
    """Rank 3 plays in slot 7 by now, and dies there for good, as does rank 4: rank 2 is what cell 1 has left."""
    slots = {0: 0, 1: 1, 2: 2, 5: 5}
    assert completed(slots, [6, 7, 3, 4], 2) == {3: 5}


@pytest.mark.parametrize(
    ("cell_size", "lost", "worker", "each", "moves"),
    [
        (2, [3], 1, 2, {}),  # rank 2 alone
        (2, [2], 1, 2, {2: 3}),  # rank 3 plays it
        (2, [2, 3], 1, 0, {}),
        (2, [3], 0, 1, {}),  # whole
        (4, [5], 1, 2, {5: 7}),  # and rank 6 stands by
        (4, [7], 1, 2, {}),
        (4, [4, 5], 1, 2, {4: 7, 5: 6}),
        (4, [4, 5, 6], 1, 4, {4: 7}),
        (8, [0, 1, 2, 3, 4], 0, 4, {0: 7, 1: 6}),  # of three that are left two divide eight
    ],
)
def test_what_is_left_of_a_cell_has_its_first_numbers(cell_size, lost, worker, each, moves):
    sizes = [one for one in range(cell_size, 0, -1) if cell_size % one == 0]
    assert shrunk(left(*lost), worker, sizes) == (each, moves)


@pytest.mark.parametrize("lost", [subset for n in range(7) for subset in combinations(range(6), n)])
def test_as_many_ranks_go_on_as_divide_a_cell(lost):
    slots = left(*lost)
    each, moves = shrunk(slots, 0, [6, 3, 2, 1])
    living = 6 - len(lost)
    assert each == {0: 0, 1: 6, 2: 3, 3: 2, 4: 2, 5: 2, 6: 1}[living]
    there = (set(slots) | set(moves)) - set(moves.values())
    assert not each or set(range(6 // each)) <= there
    assert set(moves) <= set(lost)


def test_no_rank_of_a_cell_that_trains_goes_to_another():
    """Cells 0 and 1, of four ranks, lack one and two."""
    slots = left(3, 6, 7)
    assert completed(slots, [3, 6, 7], 4) == {3: 4}
    assert completed(slots, [3, 6, 7], 4, {0: 2, 1: 2}) == {}
    assert completed(slots, [3, 6, 7], 4, {1: 2}) == {6: 0, 7: 1}, "four and one, rather than twice two"
    assert completed(left(3, 7), [3, 7], 4, {0: 2}) == {7: 2}, "what stands by beside a smaller cell does"
    assert completed(left(3, 4), [3, 4], 2, {1: 2}) == {3: 5}, "what has just been broken is no cell yet"


def test_a_cell_that_has_become_too_small_stands_by():
    """Of four ranks two may go on, one may not; another cell can have it then."""
    places = Places(EIGHT)
    places.lose(3)
    assert places.can_shrink(0, [4, 2]) == 2
    assert places.shrink(0, [4, 2]) == []
    assert not places.too_few(0, [4, 2])
    places.lose(1)
    assert places.can_shrink(0, [4, 2]) == 2, "rank 2 can be rank 1"
    assert places.shrink(0, [4, 2]) == [Move(1, 2, 2)]
    assert places.can_shrink(0, [4, 2]) == 0
    places.lose(1)
    assert places.can_shrink(0, [4, 2]) == 0
    assert places.too_few(0, [4, 2])
    assert places.filled(0, 4) == 1
    places.lose(5)
    assert places.complete(4)[0] == [Move(5, 0, 0)]
