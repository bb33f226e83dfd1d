"""Ranks that share GPUs (``--odyssey-backend gloo``): all that goes between them goes by way of the hosts, who wait for
their devices then.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.strict.cases import KINDS, POINTS, case, changing, profile  # noqa: E402
from tests.strict.checking import check  # noqa: E402
from tests.strict.job import Case, Kill  # noqa: E402

CELLS = pytest.mark.parametrize("shape", [{"tensor": 2}, {"context": 2}, {"expert": 2}], ids=str)


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("number", range(4))
def test_random_jobs(number, copies):
    check(replace(case(number, copies=copies), share=True), number)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_changes_between_steps(kind):
    check(replace(changing(kind, 1), share=True), 1)


@CELLS
def test_cells_lose_a_rank(shape):
    kill = Kill(rank=1, step=1, point="backward")
    ended = check(
        Case(stages=2, replicas=2, profile=profile(), steps=2, share=True, kills=(kill,), **shape), 0
    )
    assert ended.outcomes()
    assert not ended.wires, "nothing was connected between devices"


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_all_random_jobs(part):
    for number in range(part, 80, 8):
        for copies in (0, 2):
            check(replace(case(number, copies=copies), share=True), number)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("point", POINTS)
@CELLS
def test_cells_killed_anywhere(shape, point):
    for seed in range(3):
        kills = (Kill(rank=1, step=1, point=point),)
        check(Case(stages=2, replicas=2, profile=profile(), steps=2, share=True, kills=kills, **shape), seed)
