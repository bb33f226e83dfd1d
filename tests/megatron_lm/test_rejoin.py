"""Ranks of an unmodified Megatron-LM job come back: the new process goes on at the iteration of the others."""

from __future__ import annotations

import re

import pytest
import torch

from tests.e2e.jobs import assert_equal_numbers
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


@pytest.mark.matrix
def test_the_time_limit_of_a_job_is_not_begun_anew(jobs, name):
    """The first rank, which has come back, says when the job exits: by the time since the job started."""
    run = jobs.odyssey(
        name,
        f"{MOCK} --train-iters 100000 --exit-duration-in-mins 1 --odyssey-respawn 1",
        ranks=2, stages=1, without="--train-iters", inject="rank=0,step=2,at=commit",
    )  # fmt: skip
    assert run.exit_code == 0, run.log[-4000:]
    assert len(run.named("rank_joined")) == len(run.killed) == 1
    (minutes,) = re.findall(r"exiting program after ([.\d]+) minutes", run.log)
    assert 1.0 < float(minutes) < 1.1


def test_one_that_comes_back_evaluates_what_the_others_do(jobs, name):
    """In a job that goes on from a checkpoint; and it writes to its own how many samples that were."""
    by_samples = {"ranks": 4, "stages": 2, "without": "--train-iters --lr-warmup-iters"}
    flags = f"{MOCK} --train-samples 960 --lr-decay-samples 960 --lr-warmup-samples 24"
    flags += " --eval-interval 10 --eval-iters 1"
    first, own, other = (jobs.folder / f"{name}-{which}" for which in ("first", "plain", "back"))
    jobs.plain(f"{flags} --save {first} --save-interval 20 --exit-interval 20", **by_samples)
    flags = f"{flags} --load {first} --save-interval 1000"
    plain = jobs.plain(f"{flags} --save {own}", **by_samples)
    run = jobs.odyssey(
        name,
        f"{flags} --save {other} --odyssey-respawn 1",
        inject="rank=0,step=21,at=backward",
        **by_samples,
    )
    assert len(run.named("rank_joined")) == len(run.killed) == 1
    assert [at for at, _ in run.evaluations] == [at for at, _ in plain.evaluations]
    assert [loss for _, loss in run.evaluations] == pytest.approx(
        [loss for _, loss in plain.evaluations], rel=1e-3
    ), "in float32, which drifts apart; of other samples it is many times as much"
    assert _evaluated_samples(other) == _evaluated_samples(own)


def _evaluated_samples(saved):
    (last,) = saved.glob("iter_*/common.pt")
    return torch.load(last, weights_only=False)["args"].consumed_valid_samples


@pytest.fixture(scope="module")
def undisturbed_wide(jobs):
    return jobs.odyssey("undisturbed-wide", STEPS, ranks=8, stages=2)


@pytest.mark.parametrize("other", ["rank=1,step=-1,at=backward", "rank=3,step=-1,at=commit,incarnation=1"])
def test_asked_again_when_its_first_step_came_to_nothing(jobs, undisturbed_wide, name, other):
    """By then the others have done steps without it: its loop must begin at the one that it has its part in."""
    inject = f"rank=3,step=4,at=backward;{other},generation=3"
    run = jobs.odyssey(name, f"{STEPS} --odyssey-respawn 3", ranks=8, stages=2, inject=inject)
    assert_same_lines(run, undisturbed_wide, rel=FLOAT64)
    assert len(run.named("rank_joined")) == len(run.killed) == 2
    begun = {e["generation"]: e["members"] for e in run.named("generation_started")}
    assert begun[max(begun)] == list(range(8))


def test_a_rank_with_nothing_to_hold_waits_and_is_used_when_it_can_be(jobs, undisturbed_wide, name):
    """Rank 4 is lost for good; by rerouting alone, rank 0 has no better place then, until rank 3 is lost.

    Rank 0 writes to a checkpoint what all ranks have in common, also while it has nothing itself.
    """
    lost = "rank=4,step=2,at=forward;rank=4,step=-1,at=groups,incarnation=1"
    inject = (
        f"{lost};rank=0,step=14,at=backward;rank=3,step=60,at=backward;rank=3,step=-1,at=groups,incarnation=1"
    )
    saved = jobs.folder / name / "saved"
    saves = f"--save {saved} --save-interval 15"
    run = jobs.odyssey(
        name,
        f"{STEPS} --odyssey-respawn 1 --odyssey-policy reroute {saves}",
        ranks=8,
        stages=2,
        inject=inject,
    )
    assert_same_lines(run, undisturbed_wide, rel=FLOAT64)
    plans = [{rank for ranks in e["layout"]["holders"] for rank in ranks} for e in run.named("decision")]
    members = {e["generation"]: set(e["members"]) for e in run.named("generation_started")}
    idle = [one for one in sorted(members) if members[one] - plans[one - 1]]
    assert idle, "somebody stood by"
    assert all(min(members[one]) not in plans[one - 1] for one in idle), "the lowest rank did"
    flags = f"{STEPS} --load {saved} --ckpt-step 45 --exit-interval 48"
    loaded = jobs.odyssey(f"{name}-loaded", flags, ranks=2, stages=2)
    assert_equal_numbers(loaded.run.steps, undisturbed_wide.run.steps[45:48], rel=FLOAT64)


CELLS = f"{STEPS} --tensor-model-parallel-size 2"


@pytest.fixture(scope="module")
def undisturbed_cells(jobs):
    return jobs.odyssey("undisturbed-cells", CELLS, ranks=8, stages=2)


def test_a_tensor_parallel_cell_comes_back(jobs, undisturbed_cells, name):
    run = jobs.odyssey(
        name, f"{CELLS} --odyssey-respawn 1", ranks=8, stages=2, inject="rank=5,step=2,at=backward"
    )
    assert_same_lines(run, undisturbed_cells, rel=FLOAT64)
    assert sorted(event["target"] for event in run.named("rank_joined")) == [4, 5]
    assert {event["rank"] for event in run.named("switched")} == set(range(8))


def test_one_cell_out_of_what_is_left_of_two(jobs, undisturbed_cells, name):
    """Ranks 3 and 6 die until they are not started any more; then rank 3 is started where rank 7 stood by."""
    inject = ";".join(
        f"rank={rank},step={step},at=backward,incarnation={incarnation}"
        for incarnation, step in ((0, 2), (1, -1))
        for rank in (3, 6)
    )
    flags = (
        f"{CELLS} --odyssey-respawn 1 --odyssey-shrink off"  # or ranks 7 and 2 may be it, one after the other
    )
    run = jobs.odyssey(name, flags, ranks=8, stages=2, inject=inject)
    assert_same_lines(run, undisturbed_cells, rel=FLOAT64)
    (taken,) = run.named("place_taken")
    assert (taken["target"], taken["spare"]) == (3, 7)
    begun = {e["generation"]: e["members"] for e in run.named("generation_started")}
    assert begun[max(begun)] == [0, 1, 2, 3, 4, 5]
