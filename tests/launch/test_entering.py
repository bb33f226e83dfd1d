"""What a generation is to a process: whether it enters it, waits, or leaves."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from odyssey_megatron.launch.entering import Part, concerns, part_in
from odyssey_megatron.plan.generation import Generation
from tests.plan.test_wire import planned

_, PLAN = planned("reroute")
GENERATION = Generation(
    number=4, members=(0, 1, 2, 3), dead=(6,), why="failure", previous=None, plan=PLAN, plan_hash=PLAN.hash(),
    incarnations=((3, 1), (5, 2)), fresh=(3, 5),
)  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "incarnation", "part"),
    [
        (0, 0, Part.MEMBER),
        (3, 1, Part.MEMBER),  # it enters as it comes
        (3, 0, Part.REPLACED),  # it was declared dead, and another process has its rank
        (5, 2, Part.WAITS),
        (5, 1, Part.REPLACED),
        (6, 0, Part.LEFT),
        (7, 0, Part.LEFT),  # its cell has lost a rank
        (7, 1, Part.REPLACED),  # nobody has welcomed it
    ],
)
def test_each_process_has_one_part(rank, incarnation, part):
    assert part_in(GENERATION, rank, incarnation) is part
    assert concerns(GENERATION, rank, incarnation) == (part in (Part.MEMBER, Part.LEFT))
