"""Which broken cell becomes whole again, out of what."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from odyssey_megatron.launch.respawn import completed

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
