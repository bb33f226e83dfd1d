"""A rank runs out of its device's memory: nobody is lost, the step is done again, by a plan that needs less."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.e2e.jobs import LONG, assert_equal_runs

CASES = {
    "healthy": "rank=0,step=2,at=forward,microbatch=4,signal=FULL",
    "backward": "rank=6,step=2,at=backward,microbatch=2,signal=FULL",
    "behind-a-loss": "rank=5,step=1,at=backward;rank=4,step=3,at=weight_grad,signal=FULL",
    "while-layers-move": "rank=6,step=2,at=forward;rank=1,step=-1,at=transfer,generation=2,signal=FULL",
    "again": "rank=0,step=2,at=forward,signal=FULL;rank=0,step=2,at=backward,generation=2,signal=FULL",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(one, marks=[pytest.mark.matrix] * (one not in ("healthy", "while-layers-move")))
        for one in CASES
    ],
)
def test_a_rank_that_runs_out_of_memory(jobs, undisturbed, name, case):
    inject = CASES[case]
    batch = "--global-batch-size 24"  # of which early stages keep several microbatches
    flags = f"{batch} --odyssey-policy replan --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=8, stages=4, flags=flags)
    assert_equal_runs(shot, undisturbed(batch), kills=inject.count("rank="))
    lost = {rank for event in shot.named("failure_detected") for rank in event["dead"]}
    killed = [one for one in inject.split(";") if "FULL" not in one]
    assert lost == {int(one[len("rank=")]) for one in killed}, "nobody else is lost"
    decisions = shot.named("decision")
    for before, after in pairwise(decisions):
        if "out of memory" in after["why"]:
            assert after["schedule"] != before["schedule"]
    assert sum("out of memory" in one["why"] for one in decisions) == inject.count("FULL")


@pytest.mark.matrix
def test_a_rank_that_finds_no_memory_when_it_joins(jobs, undisturbed, name):
    """It fails, and is started once more. The others need no other plan for that."""
    inject = "rank=5,step=1,at=backward;rank=5,step=-1,at=transfer,incarnation=1,signal=FULL"
    flags = f"{LONG} --odyssey-respawn 2 --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=8, stages=4, flags=flags)
    assert_equal_runs(shot, undisturbed(LONG), kills=2)
    assert not any("out of memory" in one["why"] for one in shot.named("decision"))
    assert [event["target"] for event in shot.named("rank_joined")] == [5, 5]


@pytest.mark.matrix
def test_a_rank_that_no_plan_helps_is_left_out(jobs, undisturbed, name):
    """Of two pipelines one would be left if its stages were to keep less: something else may be in its memory."""
    again = ";".join(f"rank=3,step=2,at=forward,generation={one},signal=FULL" for one in range(1, 20))
    shot = jobs.run(name, ranks=4, stages=2, flags=f"--odyssey-inject {again}")
    assert_equal_runs(shot, undisturbed(), kills=len(shot.named("injected")))
    (lost,) = shot.named("failure_detected")
    assert (lost["dead"], lost["causes"]) == ([3], ["memory"])
    assert "rank(s) [3] have run out of memory and are left out" in shot.log
