"""Memory that changes, and hardware that computes wrongly: the odd one out is named and left out, the job goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from odyssey_megatron.errors import EXIT_UNSOUND
from tests.e2e import corrupted, not_finite
from tests.e2e.jobs import LONG, assert_equal_runs, assert_holders_agree
from tests.e2e.test_shrinking import CONTEXT, GANG

pytestmark = pytest.mark.matrix

EACH = "--check-weight-hash-across-dp-replicas-interval 1"
CORRUPTED, NOT_FINITE = Path(corrupted.__file__), Path(not_finite.__file__)
CELLS = "--tensor-model-parallel-size 2"
THREE_OWNERS = "--use-distributed-optimizer --odyssey-redundancy-level 2"


def assert_left_out(outcome, ranks, what):
    """Each of ``ranks``, once, with its host and the iteration."""
    named = outcome.named("left_out")
    assert [event["target"] for event in named] == ranks
    for event in named:
        assert re.search(what, event["why"]), event
        who = f"RANK {event['target']} (HOST {event['host']}) IS LEFT OUT"
        when = f"step {event['step']} (iteration {event['step'] + 1})"
        assert f"{who}, {when}: {event['why']}" in outcome.log
    dead = [(rank, one["cause"]) for one in outcome.named("failure_detected") for rank in one["dead"]]
    assert sorted(rank for rank, _ in dead) == sorted(ranks)
    assert all("corrupt" in cause for _, cause in dead)


def hashes(what):
    return rf"{what} hash to \w{{16}} on rank\(s\) .*, and to \w{{16}} on ranks"


@pytest.mark.parametrize(
    ("ranks", "stages", "faults", "flags", "gone", "what"),
    [
        (3, 1, "1:2:weights", "", [1], "weights of the embedding"),
        (3, 1, "0:2:state", "", [0], "optimizer state of the embedding"),
        (8, 2, "6:2:weights", "--odyssey-policy replan", [6], r"weights of layer \d"),
        (5, 1, "1:2:weights,3:2:state", "", [1, 3], ".* of the embedding"),
        # Of four holders two keep a slice of a layer; the others are sent the first one's weights.
        (4, 1, "3:2:sent", "--use-distributed-optimizer", [3], "weights of the embedding"),
        (6, 1, "3:2:weights", "--tensor-model-parallel-size 2", [2, 3], "weights of the embedding"),
        (
            4,
            1,
            "0:2:state",
            THREE_OWNERS,
            [0],
            "optimizer state of the embedding",
        ),
        # It has sent what it has to rank 3: as many have the wrong weights as have the right ones.
        (
            4,
            1,
            "0:2:weights",
            THREE_OWNERS,
            [0],
            "weights or optimizer state of the embedding",
        ),
    ],
)
def test_the_odd_one_out_is_left_out(jobs, undisturbed, name, ranks, stages, faults, flags, gone, what):
    """Found before anybody computes with it: nothing differs from a run in which it never was."""
    shot = jobs.run(
        name, ranks=ranks, stages=stages, flags=f"{EACH} {flags} --corrupt {faults}", script=CORRUPTED
    )
    assert_left_out(shot, gone, hashes(what))
    cells = "--tensor-model-parallel-size 2" if "tensor" in flags else ""
    assert_equal_runs(shot, undisturbed(cells, ranks=4 if cells else 2), kills=0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cells", [CONTEXT, GANG], ids=["contexts", "gangs"])
@pytest.mark.parametrize(
    ("fault", "flags", "gone", "what"),
    [
        ("3:2:state", THREE_OWNERS, [2, 3], "optimizer state of the embedding"),
        # What it has sent is wrong on its own other rank as well, where ranks share the state out.
        ("0:2:weights", THREE_OWNERS, [0, 1], "weights or optimizer state of the embedding"),
        (
            "6:3:state",
            f"{THREE_OWNERS} --odyssey-inject rank=5,step=1,at=param_gather",
            [6, 7],
            "optimizer state of the embedding",
        ),
    ],
    ids=["state", "sent-wrong", "with-a-failure"],
)
def test_the_odd_cell_out_is_left_out(jobs, undisturbed, name, cells, fault, flags, gone, what):
    job = f"{cells} --lr 1e-3 --train-iters 6"
    flags = f"{job} {EACH} {flags} --corrupt {fault}"
    shot = jobs.run(name, ranks=8, stages=1, flags=flags, script=CORRUPTED)
    assert [event["target"] for event in shot.named("left_out")] == gone
    assert all(what in event["why"] for event in shot.named("left_out"))
    assert_equal_runs(shot, undisturbed(job), kills=flags.count("rank="))


@pytest.mark.parametrize(
    ("ranks", "flags", "found"),
    [
        (2, "", "optimizer state of the embedding on ranks [0] and on [1]"),
        (4, "--use-distributed-optimizer --odyssey-spare-state host", "optimizer state of "),
        # Ranks 2 and 3 have what rank 0 has sent, and so no opinion.
        (
            4,
            "--use-distributed-optimizer --corrupt 0:2:weights",
            "weights or optimizer state of the embedding on ranks [0] and on [1]",
        ),
        (
            4,
            "--corrupt 1:2:state,0:2:state",
            "optimizer state of the embedding on ranks [0, 1] and on [2, 3]",
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


@pytest.mark.parametrize("faults", ["1:2:weights", "1:2:weights,1:50:weights"])
def test_it_comes_back_with_what_the_others_have_but_not_twice(jobs, reference, name, faults):
    flags = f"{LONG} {EACH} --odyssey-respawn 3 --corrupt {faults}"
    shot = jobs.run(name, ranks=4, stages=1, flags=flags, script=CORRUPTED)
    times = faults.count("1:")
    assert_left_out(shot, [1] * times, hashes("weights of the embedding"))
    assert len(shot.named("rank_joined")) == 1
    assert (
        shot.log.count("rank 1 was left out for wrong numbers before: it is not started again") == times - 1
    )
    assert_equal_runs(shot, reference, kills=0)


def test_what_was_computed_with_it_before_the_check_stays(jobs, undisturbed, name):
    """Its gradients went into the sums of all: those who are left have the same, but not what they would have had."""
    flags = "--check-weight-hash-across-dp-replicas-interval 4 --corrupt 1:1:weights"
    shot = jobs.run(name, ranks=3, stages=1, flags=flags, script=CORRUPTED)
    assert shot.exit_code == 0, shot.log[-3000:]
    assert_left_out(shot, [1], hashes("weights of the embedding"))
    assert_holders_agree(shot)
    ours, theirs = shot.run.steps, undisturbed().run.steps
    assert [one.step for one in ours] == [one.step for one in theirs]
    assert ours[1].losses == pytest.approx(theirs[1].losses, rel=1e-10)
    assert ours[-1].losses == pytest.approx(theirs[-1].losses, rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "stages", "fault", "flags", "gone"),
    [
        (3, 1, "1:2:forward", "", [1]),
        (2, 1, "1:2:forward:once", "", [1]),
        (3, 1, "0:2:input_grad", "", [0]),
        (3, 1, "1:2:weight_grad", "", [1]),
        (2, 1, "1:2:weight_grad:once", "", [1]),
        (4, 2, "1:2:forward", "", [1]),
        (8, 2, "6:2:forward:once", "", [6]),
        (8, 2, "5:2:input_grad:once", "", [5]),
        (8, 2, "2:2:weight_grad", "--odyssey-policy replan", [2]),
        (8, 4, "4:2:input_grad", "--odyssey-interrupted-step redo", [4]),
        (4, 2, "3:2:forward", "--use-distributed-optimizer", [3]),
        (6, 1, "3:2:forward", CELLS, [2, 3]),
        # Of a norm, whose gradient each rank of a cell has by itself, and the first one counts.
        (4, 1, "3:2:weight_grad:once", CELLS, [2, 3]),
        (4, 1, "3:2:weight_grad:once", f"{CELLS} --use-distributed-optimizer", [2, 3]),
        (8, 2, "5:2:weight_grad", f"{CELLS} --sequence-parallel", [4, 5]),
    ],
)
def test_what_is_finite_elsewhere_was_computed_wrongly(
    jobs, undisturbed, name, ranks, stages, fault, flags, gone
):
    shot = jobs.run(
        name, ranks=ranks, stages=stages, flags=f"--not-finite {fault} {flags}", script=NOT_FINITE
    )
    assert_left_out(shot, gone, r"of microbatch\(es\) \[.+\] were not finite, and")
    assert {event["step"] for event in shot.named("left_out")} == {2}
    cells = CELLS if CELLS in flags else ""
    assert_equal_runs(shot, undisturbed(cells, ranks=4 if cells else 2), kills=0)


def test_wrong_numbers_after_a_failure(jobs, undisturbed, name):
    """Pipelines share workers by then."""
    flags = "--odyssey-inject rank=7,step=1,at=backward --not-finite 2:3:forward"
    shot = jobs.run(name, ranks=8, stages=4, flags=flags, script=NOT_FINITE)
    assert [event["target"] for event in shot.named("left_out")] == [2]
    assert_equal_runs(shot, undisturbed(), kills=1)


def test_a_failure_while_it_is_found_out(jobs, undisturbed, name):
    """Rank 0 dies where the step is done a second time."""
    flags = "--not-finite 3:2:forward,0:2:dies"
    shot = jobs.run(name, ranks=4, stages=1, flags=flags, script=NOT_FINITE)
    assert [event["target"] for event in shot.named("left_out")] == [3]
    assert [one["dead"] for one in shot.named("failure_detected")] == [[0], [3]]
    assert_equal_runs(shot, undisturbed(), kills=0)


@pytest.mark.parametrize(
    ("ranks", "stages", "fault"),
    [
        (4, 2, "all:2:forward"),
        (3, 1, "all:2:weight_grad"),
        (2, 2, "0:2:forward"),  # who has no twin
    ],
)
def test_what_is_not_finite_anywhere_stops_the_job(jobs, name, ranks, stages, fault):
    outcome = jobs.run(name, ranks=ranks, stages=stages, flags=f"--not-finite {fault}", script=NOT_FINITE)
    assert outcome.exit_code == EXIT_UNSOUND, outcome.log[-3000:]
    assert outcome.log.count("No weight was changed.") == 1
    named = "numbers of microbatch(es) [3] of the step are not finite" in outcome.log
    assert named is (fault == "all:2:forward"), "the others are all microbatches, or none"
    assert [step.step for step in outcome.run.steps] == [0, 1]
    assert not outcome.named("left_out")
