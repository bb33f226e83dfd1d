"""Memory that changes, and hardware that computes wrongly: the odd one out is named and left out, the job goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from odyssey_megatron.errors import EXIT_UNSOUND
from tests.e2e import corrupted
from tests.e2e.jobs import LONG, assert_equal_runs, assert_holders_agree

EACH = "--check-weight-hash-across-dp-replicas-interval 1"
CORRUPTED = Path(corrupted.__file__)
matrix = pytest.mark.matrix


def assert_left_out(outcome, ranks, what):
    """Each of ``ranks``, once, with its host, the iteration and both hashes."""
    named = outcome.named("left_out")
    assert [event["target"] for event in named] == ranks
    for event in named:
        assert re.search(rf"{what} hash to \w{{16}} on rank\(s\) .*, and to \w{{16}} on ranks", event["why"])
        assert f"RANK {event['target']} (HOST {event['host']}) IS LEFT OUT: {event['why']}" in outcome.log
    dead = [(rank, one["cause"]) for one in outcome.named("failure_detected") for rank in one["dead"]]
    assert sorted(rank for rank, _ in dead) == ranks
    assert all("corrupt" in cause for _, cause in dead)


@pytest.mark.parametrize(
    ("ranks", "stages", "faults", "flags", "gone", "what"),
    [
        (3, 1, "1:2:weights", "", [1], "weights of the embedding"),
        pytest.param(3, 1, "0:2:state", "", [0], "optimizer state of the embedding", marks=matrix),
        pytest.param(
            8, 2, "6:2:weights", "--odyssey-policy replan", [6], r"weights of layer \d", marks=matrix
        ),
        pytest.param(5, 1, "1:2:weights,3:2:state", "", [1, 3], ".* of the embedding", marks=matrix),
        # Of four holders two keep the optimizer state of a layer; the others are sent the first one's weights.
        pytest.param(
            4, 1, "3:2:weights", "--use-distributed-optimizer", [3], "weights of the embedding", marks=matrix
        ),
        pytest.param(
            6,
            1,
            "3:2:weights",
            "--tensor-model-parallel-size 2",
            [2, 3],
            "weights of the embedding",
            marks=matrix,
        ),
        pytest.param(
            4,
            1,
            "0:2:state",
            "--use-distributed-optimizer --odyssey-redundancy-level 2",
            [0],
            "optimizer state of the embedding",
            marks=matrix,
        ),
    ],
)
def test_the_odd_one_out_is_left_out(jobs, undisturbed, name, ranks, stages, faults, flags, gone, what):
    """Found before anybody computes with it: nothing differs from a run in which it never was."""
    shot = jobs.run(
        name, ranks=ranks, stages=stages, flags=f"{EACH} {flags} --corrupt {faults}", script=CORRUPTED
    )
    assert_left_out(shot, gone, what)
    cells = "--tensor-model-parallel-size 2" if "tensor" in flags else ""
    assert_equal_runs(shot, undisturbed(cells, ranks=4 if cells else 2), kills=0)


@pytest.mark.parametrize(
    ("ranks", "flags", "found"),
    [
        (2, "", "optimizer state of the embedding on ranks [0] and on [1]"),
        pytest.param(
            4,
            "--use-distributed-optimizer --odyssey-spare-state host",
            "optimizer state of ",
            marks=matrix,
        ),
        pytest.param(
            4,
            "--corrupt 1:2:state,0:2:state",
            "optimizer state of the embedding on ranks [0, 1] and on [2, 3]",
            marks=matrix,
        ),
    ],
)
def test_where_nobody_can_say_who_is_right_the_job_stops(jobs, name, ranks, flags, found):
    faults = "" if "--corrupt" in flags else "--corrupt 1:2:state"
    outcome = jobs.run(
        name, ranks=ranks, stages=1, flags=f"{EACH} --odyssey-respawn 1 {faults} {flags}", script=CORRUPTED
    )
    assert outcome.exit_code == EXIT_UNSOUND, outcome.log[-3000:]
    assert outcome.log.count(found) == 1, outcome.log[-3000:]
    assert [step.step for step in outcome.run.steps] == [0, 1, 2]
    assert not outcome.named("left_out")


@matrix
@pytest.mark.parametrize("faults", ["1:2:weights", "1:2:weights,1:50:weights"])
def test_it_comes_back_with_what_the_others_have_but_not_twice(jobs, reference, name, faults):
    flags = f"{LONG} {EACH} --odyssey-respawn 3 --corrupt {faults}"
    shot = jobs.run(name, ranks=4, stages=1, flags=flags, script=CORRUPTED)
    times = faults.count("1:")
    assert_left_out(shot, [1] * times, "weights of the embedding")
    assert len(shot.named("rank_joined")) == 1
    assert (
        shot.log.count("rank 1 was left out for wrong numbers before: it is not started again") == times - 1
    )
    assert_equal_runs(shot, reference, kills=0)


@matrix
def test_what_was_computed_with_it_before_the_check_stays(jobs, undisturbed, name):
    """Its gradients went into the sums of all: those who are left have the same, but not what they would have had."""
    flags = "--check-weight-hash-across-dp-replicas-interval 4 --corrupt 1:1:weights"
    shot = jobs.run(name, ranks=3, stages=1, flags=flags, script=CORRUPTED)
    assert shot.exit_code == 0, shot.log[-3000:]
    assert_left_out(shot, [1], "weights of the embedding")
    assert_holders_agree(shot)
    ours, theirs = shot.run.steps, undisturbed().run.steps
    assert [one.step for one in ours] == [one.step for one in theirs]
    assert ours[1].losses == pytest.approx(theirs[1].losses, rel=1e-10)
    assert ours[-1].losses == pytest.approx(theirs[-1].losses, rel=1e-3)
