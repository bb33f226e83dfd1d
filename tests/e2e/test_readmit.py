"""Ranks that are killed until they are given up come back by ``odyssey readmit``: the first plan, the same numbers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from odyssey_megatron import cli
from tests.e2e.jobs import LONG, SCRIPT, Jobs, Outcome, assert_equal_runs
from tests.e2e.test_rejoin import members, plans
from tests.e2e.test_shrinking import (
    CONTEXT,
    FOUR,
    GANG,
    ONE_AFTER_THE_OTHER,
    SEQUENCE,
    SLICES,
    SPENT,
    UNEVEN,
    decisions,
    lost,
    trained,
)
from tests.launch.jobserver import events, wait_for

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(300)]


def played(
    jobs: Jobs, name: str, act: Callable[[Path], None], *, ranks: int, stages: int, flags: str
) -> Outcome:
    """A job, while which runs ``act`` is called with its run folder."""
    folder = jobs.folder / name
    argv = ["--nproc-per-node", str(ranks), str(SCRIPT), *jobs.flags(name, stages=stages), *flags.split()]
    job = jobs.server.run(argv, log=jobs.folder / f"{name}.log")
    try:
        act(folder)
        exit_code = job.wait(250)
    finally:
        if job.process.poll() is None:
            job.kill()
    return jobs.outcome(name, exit_code=exit_code, log=job.log())


def given_up(folder: Path, count: int = 1) -> None:
    wait_for(lambda: len(events(folder, "given_up")) == count, 60, f"{count} rank(s) to be given up")


def trains_as(folder: Path, shapes: list[list[int]]) -> None:
    """Returns once the newest generation that has begun has these smaller cells."""

    def is_so() -> bool:
        begun = {event["generation"] for event in events(folder, "generation_started")}
        found = [event["shapes"] for event in events(folder, "decision") if event["generation"] in begun]
        return bool(found) and found[-1] == shapes

    wait_for(is_so, 100, f"smaller cells {shapes}")


def readmit(folder: Path, rank: int, *more: str) -> None:
    assert cli.main(["readmit", str(folder), "--rank", str(rank), *more]) == 0


def test_a_rank_that_was_given_up_is_back_in_the_first_plan(jobs, reference, name, capsys):
    def act(folder: Path) -> None:
        given_up(folder)
        readmit(folder, 2)

    shot = played(jobs, name, act, ranks=4, stages=2, flags=f"{LONG} {SPENT} {lost(2, 1)}")
    assert capsys.readouterr().out.startswith("rank 2 starts (pid ")
    assert_equal_runs(shot, reference, kills=2)
    assert plans(shot)[0] == plans(shot)[-1]
    assert members(shot)[-1] == 4


@pytest.mark.parametrize("cells", [SEQUENCE, CONTEXT, GANG], ids=["tensor", "context", "gang"])
def test_a_smaller_cell_is_whole_again(jobs, undisturbed, name, cells, capsys):
    def act(folder: Path) -> None:
        trains_as(folder, [[1, 1]])
        readmit(folder, 3)

    job = f"{cells} --train-iters 70"
    shot = played(jobs, name, act, ranks=8, stages=2, flags=f"{job} {SPENT} {lost(3, 1)}")
    said = capsys.readouterr().out
    assert "With it its cell, ranks 2 to 3, is whole: it leaves between two steps" in said
    assert_equal_runs(shot, undisturbed(job), kills=2)
    assert trained(shot) == [[[1, 1]], []]
    assert plans(shot)[0] == plans(shot)[-1]
    assert members(shot)[-1] == 8


def kill(folder: Path, rank: int) -> None:
    """Its newest process; returns once there is another one, or the rank is given up."""

    def seen() -> tuple[int, int]:
        return len(pids(folder, rank)), len(events(folder, "given_up"))

    before = seen()
    os.kill(pids(folder, rank)[-1], signal.SIGKILL)
    wait_for(lambda: seen() != before, 60, f"rank {rank} is started again, or given up")


def pids(folder: Path, rank: int) -> list[int]:
    return [event["pid"] for event in events(folder, "rank_started") if event["target"] == rank]


@pytest.mark.timeout(600)
def test_a_gang_that_lacks_two_is_whole_with_the_second(jobs, undisturbed, name, capsys):
    """Rank 5 is given up, and plays where rank 7 was; then rank 6 is. The first to be back stands by until the gang
    loses a process, as ranks join only a gang that starts.
    """

    def act(folder: Path) -> None:
        trains_as(folder, [[1, 3]])
        kill(folder, 6)
        kill(folder, 6)
        given_up(folder, 2)
        trains_as(folder, [[1, 2]])
        readmit(folder, 6)
        kill(folder, 4)
        trains_as(folder, [[1, 3]])
        readmit(folder, 5)

    job = f"{UNEVEN} --train-iters 70"
    shot = played(jobs, name, act, ranks=8, stages=1, flags=f"{job} {SPENT} {lost(5, 1)}")
    stands_by, whole = capsys.readouterr().out.splitlines()
    assert "trains with 2 ranks until it lacks none, and still lacks 1." in stands_by
    assert whole.startswith("rank 7 starts")
    assert "is whole: it leaves between two steps" in whole
    assert_equal_runs(shot, undisturbed(job, ranks=4), kills=2)
    assert [shapes for shapes in trained(shot) if shapes] == [[[1, 3]], [[1, 2]], [[1, 3]]]
    assert plans(shot)[0] == plans(shot)[-1]
    assert members(shot)[-1] == 8


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("cells", "state"), [(FOUR, ""), (f"{FOUR} --sequence-parallel", SLICES)], ids=["whole", "slices"]
)
def test_four_tensor_ranks_are_two_then_one_then_four(jobs, undisturbed, name, cells, state):
    """Three GPUs of a cell are given up in turn; it is whole again with the last of them that works again."""

    def act(folder: Path) -> None:
        trains_as(folder, [[1, 2]])
        given_up(folder, 3)
        trains_as(folder, [[1, 1]])
        for event in events(folder, "given_up"):
            readmit(folder, event["target"], "--gpu", str(event["slot"]))

    job = f"{cells} --train-iters 90"
    flags = f"{job} {state} {SPENT} {lost(5, 1)};{ONE_AFTER_THE_OTHER}"
    shot = played(jobs, name, act, ranks=8, stages=1, flags=flags)
    assert_equal_runs(shot, undisturbed(job, ranks=4), kills=6)
    assert trained(shot) == [[[1, 2]], [], [[1, 2]], [], [[1, 1]], []]
    assert members(shot)[-1] == 8
    first, *_, last = decisions(shot)
    for what in ("layout", "schedule"):  # slices move behind the first step of the last plan
        assert first[what] == last[what]
