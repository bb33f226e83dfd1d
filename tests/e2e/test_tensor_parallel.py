"""Cells of two ranks: with one of them both are lost, and what they share is summed once."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import TOLERANCE, assert_equal_numbers, assert_equal_runs

pytestmark = pytest.mark.matrix

CELLS = "--tensor-model-parallel-size 2 --num-layers 4 --global-batch-size 6"
SEQUENCE = f"{CELLS} --sequence-parallel"
RANKS, STAGES = 8, 2  # workers 0 and 1 are the first stage, 2 and 3 the last


@pytest.mark.parametrize("flags", ["", "--qk-layernorm"])
def test_sequence_parallelism_changes_nothing(undisturbed, flags):
    """Its norms see a part of the sequence each; those of queries and keys a part of the heads in any case."""
    whole, parts = (undisturbed(f"{cells} {flags}".strip()).run.steps for cells in (CELLS, SEQUENCE))
    assert_equal_numbers(parts, whole, rel=TOLERANCE)


@pytest.mark.parametrize("flags", [CELLS, SEQUENCE])
@pytest.mark.parametrize(
    "inject",
    [
        "rank=3,step=2,at=backward",
        "rank=4,step=1,at=weight_grad;rank=0,step=3,at=reduce",
        "rank=6,step=2,at=agreement",
    ],
)
def test_a_run_that_loses_cells_equals_one_that_does_not(jobs, undisturbed, name, flags, inject):
    shot = jobs.run(name, ranks=RANKS, stages=STAGES, flags=f"{flags} --odyssey-inject {inject}")
    assert_equal_runs(shot, undisturbed(flags), kills=inject.count("rank="))


def test_a_cell_comes_back(jobs, undisturbed, name):
    """Both ranks of it join, with the shards of their places, and are filled by those of the same place."""
    job = f"{SEQUENCE} --train-iters 20 --global-batch-size 4"
    flags = f"{job} --odyssey-respawn 1 --odyssey-inject rank=3,step=2,at=backward"
    shot = jobs.run(name, ranks=RANKS, stages=STAGES, flags=flags)
    assert_equal_runs(shot, undisturbed(job), kills=1)
    started = shot.named("generation_started")
    last = max(event["generation"] for event in started)
    assert {len(event["members"]) for event in started if event["generation"] == last} == {RANKS}
    # Not the plan's hash: layers may have to move back, and the plan says which.
    plans = {event["generation"]: (event["layout"], event["schedule"]) for event in shot.named("decision")}
    assert plans[last] == plans[1]
