"""Ranks of an unmodified Megatron-LM job come back: the new process goes on at the iteration of the others."""

from __future__ import annotations

import pytest

from tests.megatron_lm.jobs import FLOAT64, MOCK, assert_same_lines

pytestmark = pytest.mark.timeout(400)
STEPS = f"{MOCK} --train-iters 80 --eval-interval 10 --odyssey-float64 on"
"""Enough for a process to start meanwhile; in float64, as float32 losses drift apart in so many steps."""


@pytest.fixture(scope="module")
def undisturbed(jobs):
    return jobs.odyssey("undisturbed", STEPS, ranks=8, stages=4)


@pytest.mark.parametrize("inject", ["rank=0,step=2,at=forward", "rank=7,step=2,at=backward"])
def test_the_first_and_the_last_rank_come_back(jobs, undisturbed, name, inject):
    """They print the lines, evaluations and checkpoints of all."""
    save = f" --save {jobs.folder / name / 'saved'} --save-interval 70"
    run = jobs.odyssey(name, f"{STEPS} --odyssey-respawn 1{save}", ranks=8, stages=4, inject=inject)
    assert_same_lines(run, undisturbed, rel=FLOAT64)
    assert len(run.named("rank_joined")) == len(run.killed) == 1
    begun = {e["generation"]: e["plan_hash"] for e in run.named("generation_started")}
    assert begun[min(begun)] == begun[max(begun)], "back to the first plan"
    assert {event["rank"] for event in run.named("switched")} == set(range(8))


def test_a_tensor_parallel_cell_comes_back(jobs, name):
    flags = f"{STEPS} --tensor-model-parallel-size 2"
    run = jobs.odyssey(
        name, f"{flags} --odyssey-respawn 1", ranks=8, stages=2, inject="rank=5,step=2,at=backward"
    )
    assert_same_lines(run, jobs.odyssey("undisturbed-tp2", flags, ranks=8, stages=2), rel=FLOAT64)
    assert sorted(event["target"] for event in run.named("rank_joined")) == [4, 5]
    assert {event["rank"] for event in run.named("switched")} == set(range(8))
