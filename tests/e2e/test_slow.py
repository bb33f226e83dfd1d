"""A rank, or a link, becomes slow: it is found, gets less to do, and gets it back. The losses stay the same.

What is found goes by measured times, so these want a machine with nothing else to do, and are run by hand.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.jobs import LONG, assert_equal_runs
from tests.e2e.test_shrinking import decisions, trained
from tests.launch.jobserver import events, wait_for

pytestmark = pytest.mark.matrix
SLOW = "--odyssey-profile-steps 2 --odyssey-rebalance auto --odyssey-inject rank=3,step=6,slow=4"
RECOVERS = "--train-iters 400 --lr 1e-3"


def shares(outcome) -> list[int]:
    """Of each plan that was decided on, how many visits of microbatches to layers the slow worker has."""
    return [
        sum(
            len(route["microbatches"]) * (hop["last"] - hop["first"])
            for route in event["layout"]["routes"]
            for hop in route["hops"]
            if hop["worker"] == 3
        )
        for event in outcome.named("decision")
    ]


def found(outcome) -> list[dict[str, object]]:
    return [event for event in outcome.named("slowness") if event["kind"] == "slow worker"]


def test_found_and_given_less_to_do_between_two_steps(jobs, reference, name):
    shot = jobs.run(name, ranks=4, stages=2, flags=f"{LONG} {SLOW}")
    assert_equal_runs(shot, reference, kills=0)
    assert {rank for event in found(shot) for rank in event["slow_ranks"]} == {3}
    assert found(shot)[0]["speed"] == pytest.approx(1 / 4, rel=0.3)
    assert shares(shot)[-1] < shares(shot)[0]
    assert not shot.run.recoveries, "nothing was interrupted"
    assert any("rank(s) [3] slow" in one.why for one in shot.run.switches), "the report shows it"


def test_without_leave_to_act_it_is_only_said(jobs, reference, name):
    shot = jobs.run(name, ranks=4, stages=2, flags=f"{LONG} {SLOW} --odyssey-rebalance off")
    assert_equal_runs(shot, reference, kills=0)
    assert len(shot.named("decision")) == 1
    assert "with --odyssey-rebalance auto" in shot.log


def test_layers_move_off_a_heavy_stage_of_a_healthy_job(jobs, undisturbed, name):
    job = f"{LONG} --num-layers 4"
    shot = jobs.run(
        name, ranks=4, stages=2, flags=f"{job} --odyssey-profile-steps 2 --odyssey-rebalance auto"
    )
    assert_equal_runs(shot, undisturbed(job), kills=0)
    assert any("times the time of other stages: steps" in one.why for one in shot.run.switches)
    assert not shot.run.recoveries, "nothing was interrupted"


@pytest.mark.timeout(400)
def test_it_gets_its_work_back(jobs, undisturbed, name):
    shot = jobs.run(name, ranks=4, stages=1, flags=f"{RECOVERS} {SLOW},until=150", timeout_s=180)
    assert_equal_runs(shot, undisturbed(RECOVERS), kills=0)
    assert found(shot)[-1]["speed"] == 1.0
    assert min(shares(shot)) < shares(shot)[0] == shares(shot)[-1]
    hashes = [event["plan_hash"] for event in shot.named("decision")]
    assert hashes[0] == hashes[-1], "exactly the first plan"


STAYS_SLOW = "--train-iters 400 --lr 1e-3"
"""Until slowness has cost what a start costs, by steps of 20 ms; the rate as in ``SPLIT``."""


@pytest.mark.timeout(400)
def test_it_leaves_and_a_fresh_process_takes_its_place(jobs, undisturbed, name):
    shot = jobs.run(name, ranks=4, stages=2, flags=f"{STAYS_SLOW} {SLOW} --odyssey-respawn 1", timeout_s=180)
    assert_equal_runs(shot, undisturbed(STAYS_SLOW), kills=0)
    assert [one["slow_ranks"] for one in shot.named("replaced")] == [[3]]
    assert [one["target"] for one in shot.named("rank_joined")] == [3]
    hashes = [event["plan_hash"] for event in shot.named("decision")]
    assert hashes[0] in hashes[1:], "exactly the first plan"
    assert not shot.run.recoveries, "nothing was interrupted"
    assert any("they leave, and fresh processes take their place" in one.why for one in shot.run.switches)


def of_all(rank: int, times: float, incarnations: int) -> str:
    """``rank`` is slow, and so are its next processes."""
    return ";".join(f"rank={rank},step=6,slow={times},incarnation={one}" for one in range(incarnations))


SPLIT = "--num-layers 4 --train-iters 160 --global-batch-size 12 --odyssey-profile-steps 2 --lr 1e-3"
"""A norm that leaps shows what is rounded elsewhere: with three times the rate one of 160 was 4e-10 apart."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [3, 2], ids=["last", "first"])
@pytest.mark.parametrize("cells", ["tensor-model", "context"])
def test_a_cell_goes_on_without_its_slow_rank_and_is_whole_again(jobs, undisturbed, name, cells, rank):
    """Of two cells. A first replacement does not help; the third process of the rank is healthy. Where the first rank
    is slow, the second one plays it.
    """
    job = f"{SPLIT} --{cells}-parallel-size 2"
    inject = f"--odyssey-rebalance auto --odyssey-respawn 1 --odyssey-inject {of_all(rank, 8, 2)}"
    shot = jobs.run(name, ranks=4, stages=1, flags=f"{job} {inject} --odyssey-hang-s 10", timeout_s=400)
    assert_equal_runs(shot, undisturbed(job), kills=0)
    assert shot.named("replaced")[0]["slow_ranks"] == [2, 3]
    assert [one["slow_ranks"] for one in shot.named("set_aside")] == [[rank]]
    assert [(one["ranks"], one["whole"]) for one in shot.named("cell_shrinks")] == [([2], 2)]
    assert [[1, 2]] in trained(shot)
    assert decisions(shot)[-1]["shapes"] == []
    left = " ".join(event["why"] for event in decisions(shot))
    assert f"rank(s) [{rank}] have cost" in left
    assert "their cell leaves, and comes back without them" in left
    assert f"to be without rank(s) [{rank}], which were slow" in left
    assert not shot.named("failure_detected"), "nobody was lost"
    assert not shot.run.recoveries, "nothing was interrupted"


@pytest.mark.parametrize(
    "kill",
    [
        "rank=3,step=30,at=agreement",
        "rank=1,step=30,at=forward",
        "rank=0,step=-1,at=groups,generation=2",
        "rank=3,step=-1,at=groups,generation=2",
        "rank=2,step=-1,at=agree,generation=2",
        "rank=1,step=-1,at=transfer,generation=2",
        "rank=3,step=-1,at=agreement,generation=2",
        "rank=2,step=-1,at=reduce,generation=2",
        "rank=0,step=-1,at=optimizer,generation=2",
        "rank=1,step=-1,at=commit,generation=2",
        "rank=2,step=-1,at=forward,generation=3",
    ],
)
def test_a_rank_dies_while_another_one_is_slow(jobs, undisturbed, name, kill):
    # Of two stages the last one is heavy, and the second generation is its. Where it is to be the slow rank's own, one.
    stages = 1 if kill.startswith("rank=3,step=-1") else 2
    shot = jobs.run(name, ranks=4, stages=stages, flags=f"--train-iters 100 {SLOW};{kill}", timeout_s=150)
    assert_equal_runs(shot, undisturbed("--train-iters 100"), kills=1)
    assert found(shot)


ROBBED = "--train-iters 150 --odyssey-profile-steps 2 --lr 1e-3"
"""The rate as in ``SPLIT``."""


def test_a_rank_that_loses_70_percent_of_its_cpu_for_a_while(jobs, undisturbed, name):
    """Taken from outside, by stopping its process and letting it run by turns."""
    run_dir = jobs.folder / name
    flags = f"{ROBBED} --odyssey-rebalance auto"
    argv = ["--nproc-per-node", "4", str(jobs.example), *jobs.flags(name, stages=2), *flags.split()]
    job = jobs.server.run(argv, log=jobs.folder / f"{name}.log")

    def reached(step: int) -> bool:
        return any(e["step"] >= step for e in events(run_dir, "step_committed"))

    wait_for(lambda: reached(20), 150, "steps from before")
    by_hand = [sys.executable, "-m", "odyssey_megatron", "inject", str(run_dir), "--rank", "3"]
    with subprocess.Popen([*by_hand, "--slow", "3.3"]) as robber:
        wait_for(lambda: reached(60), 200, "40 steps")
        robber.terminate()
    shot = jobs.outcome(name, exit_code=job.wait(300), log=job.log())
    assert_equal_runs(shot, undisturbed(ROBBED), kills=0)
    assert found(shot)[0]["slow_ranks"] == [3]
    assert "does not get its processor" in found(shot)[0]["why"]
    assert min(shares(shot)) < shares(shot)[0]
    assert not shot.run.recoveries, "nothing was interrupted"


LINK = (
    "--train-iters 100 --odyssey-profile-steps 2 --odyssey-policy reroute --odyssey-rebalance auto "
    "--odyssey-time-links on --odyssey-inject link=0>3,step=10,slow=400"
)


def test_a_slow_link_is_found_and_no_message_takes_it_any_more(jobs, undisturbed, name):
    """Three pipelines of two stages, 0 to 3, 1 to 4 and 2 to 5."""
    shot = jobs.run(name, ranks=6, stages=2, flags=LINK, timeout_s=180)
    assert_equal_runs(shot, undisturbed("--train-iters 100"), kills=0)
    (event,) = [event for event in shot.named("slowness") if event["kind"] == "slow link"]
    assert event["slow_ranks"] == [0, 3]
    assert event["speed"] < 1 / 4
    layouts = [event["layout"] for event in shot.named("decision")]
    assert [goes_by(one, 0, 3) for one in layouts] == [True, False]
    assert layouts[0]["holders"] == layouts[1]["holders"], "nothing moves"
    assert not shot.run.recoveries, "nothing was interrupted"
    assert any("link between ranks [0, 3] slow" in one.why for one in shot.run.switches), (
        "the report shows it"
    )


def test_without_leave_to_act_a_slow_link_is_only_said(jobs, undisturbed, name):
    flags = f"{LINK},until=60 --odyssey-rebalance off"
    shot = jobs.run(name, ranks=6, stages=2, flags=flags, timeout_s=180)
    assert_equal_runs(shot, undisturbed("--train-iters 100"), kills=0)
    events = [event for event in shot.named("slowness") if event["kind"] == "slow link"]
    assert [(event["slow_ranks"], event["speed"] < 1) for event in events] == [
        ([0, 3], True),
        ([0, 3], False),
    ]
    assert len(shot.named("decision")) == 1
    assert "with --odyssey-rebalance auto, relink would make" in shot.log


def goes_by(layout, sender: int, receiver: int) -> bool:
    ways = [[hop["worker"] for hop in route["hops"]] for route in layout["routes"]]
    return any([sender, receiver] == way[at : at + 2] for way in ways for at in range(len(way)))
