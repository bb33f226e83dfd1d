"""Who was frozen with its whole surroundings has lost nobody; one that hangs alone is found as ever."""

from __future__ import annotations

import os
import signal
import time

import pytest

from odyssey_megatron.launch.wire.awake import Awake
from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.recoveries import recoveries
from odyssey_megatron.metrics.timeline import last_job
from tests.launch.jobserver import events, pid_of, wait_for
from tests.launch.test_nodes import start
from tests.launch.test_survival import check, committed, decided, is_running
from tests.surroundings.trees import freeze, tree

pytestmark = pytest.mark.usefixtures("server")

RANKS = 4


def test_silence_counts_from_the_end_of_the_watchers_own_gap():
    awake = Awake(2.0)
    assert awake.since_s(100.0) == 100.0
    assert [awake.since_s(100.0 + 0.5 * look) for look in range(5)] == [100.0] * 5
    assert awake.since_s(109.0) == 109.0
    assert awake.since_s(110.0) == 109.0


def running(toy, tmp_path, *flags):
    job = toy(RANKS, "--steps", 60, "--hold", tmp_path / "go", "--odyssey-hang-s", 1.0, *flags)
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == RANKS, 20, "all ranks in their groups")
    return job


@pytest.mark.parametrize(
    "who",
    [
        "all",
        pytest.param("the agent last", marks=pytest.mark.matrix),
        pytest.param("the agent first", marks=pytest.mark.matrix),
        "the agent alone",
    ],
)
def test_a_job_that_is_stopped_as_a_whole(toy, tmp_path, who):
    """For twice as long as a rank may be silent; the processes stop and go on in any order."""
    job = running(toy, tmp_path)
    ranks = [pid_of(tmp_path / "run", rank) for rank in range(RANKS)]
    agent = [pid for pid in tree(job.pid) if pid not in ranks]
    order = {
        "all": agent + ranks,
        "the agent first": agent + ranks,
        "the agent last": ranks + agent,
        "the agent alone": agent,
    }[who]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in order:
            os.kill(pid, number)
            time.sleep(0.1 if who != "all" else 0.0)
        time.sleep(2.0 if number == signal.SIGSTOP else 0.0)
    (tmp_path / "go").touch()
    check(job, tmp_path, steps=60, survivors=set(range(RANKS)))
    assert decided(tmp_path) == []


def test_a_rank_dies_while_the_agent_alone_is_stopped(toy, tmp_path):
    """The others wait for the agent, for longer than they would for a generation, and the stall says so."""
    limits = ("--odyssey-op-timeout-s", 1.5, "--odyssey-recovery-timeout-s", 3.0)
    job = running(toy, tmp_path, *limits)
    wait_for((tmp_path / "go.waits").exists, 20, "rank 0 holds")
    os.kill(job.pid, signal.SIGSTOP)
    try:
        os.kill(pid_of(tmp_path / "run", 2), signal.SIGKILL)
        time.sleep(9.0)
    finally:
        os.kill(job.pid, signal.SIGCONT)
    (tmp_path / "go").touch()
    check(job, tmp_path, steps=60, survivors={0, 1, 3})
    assert [dead for dead in decided(tmp_path) if dead] == [[2]]
    (paused,) = events(tmp_path / "run", "stood_still")
    assert paused["lasted_s"] > 8.9
    assert "[odyssey] this job's host stood still for" in job.log()
    rows = recoveries(last_job(list(read_journal(tmp_path / "run"))))
    (recovery,) = (row for row in rows if row.dead == (2,))
    assert recovery.stall_s > paused["lasted_s"] - 0.5, "ranks waited from its beginning on"


def test_one_that_hangs_after_the_freeze_is_found(toy, tmp_path):
    job = running(toy, tmp_path)
    freeze(tree(job.pid), 2.0)
    time.sleep(0.3)
    os.kill(pid_of(tmp_path / "run", 2), signal.SIGSTOP)
    wait_for(lambda: events(tmp_path / "run", "failure_detected"), 5, "the hang is noticed")
    (tmp_path / "go").touch()
    check(job, tmp_path, steps=60, survivors={0, 1, 3})


def test_messages_that_time_out_while_everybody_is_stopped(toy, tmp_path):
    """gloo counts the time that it was not running."""
    job = running(toy, tmp_path, "--odyssey-op-timeout-s", 1.5, "--step-s", 0.05)
    freeze(tree(job.pid), 3.0)
    (tmp_path / "go").touch()
    check(job, tmp_path, steps=60, survivors=set(range(RANKS)))
    assert all(not dead for dead in decided(tmp_path))


@pytest.mark.parametrize(
    ("frozen", "seconds"),
    [("both", 2.0), ("the first", 2.0), pytest.param("both", 6.0, marks=pytest.mark.matrix)],
)
def test_nodes_that_are_stopped(server, tmp_path, frozen, seconds):
    """Whoever is not stopped waits for a lease and 2.5 s, as the other's kernel answers."""
    jobs = start(server, tmp_path, ("two nodes", "two nodes"))
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 30, "all ranks in their groups")
    pids = [pid for job in jobs[: 2 if frozen == "both" else 1] for pid in tree(job.pid)]
    freeze(pids, seconds)
    (tmp_path / "go").touch()
    assert [job.wait(30) for job in jobs] == [0, 0], jobs[0].log() + jobs[1].log()
    assert committed(tmp_path) == dict.fromkeys(range(4), 30)
    assert decided(tmp_path) == []


@pytest.mark.matrix
def test_the_first_node_is_stopped_for_longer_than_the_other_one_waits(server, tmp_path):
    """It does not go on with the ranks of its own node."""
    jobs = start(server, tmp_path, ("two nodes", "two nodes"))
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 30, "all ranks in their groups")
    freeze(tree(jobs[0].pid), 6.0)
    assert [job.wait(10) for job in jobs] == [1, 1], jobs[0].log() + jobs[1].log()
    assert "this host of the job stood still for 6." in jobs[0].log()
    assert "Traceback" not in jobs[0].log()
    assert not any(decided(tmp_path)), "the other node was not lost"


@pytest.mark.matrix
@pytest.mark.parametrize("who", ["the first node", "the first agent"])
def test_the_first_node_is_stopped_for_ever(server, tmp_path, who):
    """Its kernel answers for it, so that no connection breaks."""
    jobs = start(server, tmp_path, ("two nodes", "two nodes"))
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 30, "all ranks in their groups")
    others = tree(jobs[1].pid)
    stopped = tree(jobs[0].pid) if who == "the first node" else [jobs[0].pid]
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        assert jobs[1].wait(30) == 1, jobs[1].log()
        wait_for(lambda: not any(map(is_running, others)), 5, "the second node's ranks end")
        assert time.monotonic() - began_s < 0.8 + 5.0
        assert "the first agent, which hosts the coordinator, is gone" in jobs[1].log()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_another_node_while_the_first_is_stopped(server, tmp_path, number):
    jobs = start(server, tmp_path, ("two nodes", "two nodes"))
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 30, "all ranks in their groups")
    stopped, others = tree(jobs[0].pid), tree(jobs[1].pid)
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        os.kill(jobs[1].pid, number)
        assert jobs[1].wait(30), jobs[1].log()
        wait_for(lambda: not any(map(is_running, others)), 5, "the second node's ranks end")
        assert time.monotonic() - began_s < 0.8 + 5.0
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.matrix
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seconds", [7, 20])
@pytest.mark.parametrize("how", ["SIGSTOP", "slowly", "freezer"])
@pytest.mark.parametrize("seed", range(2))
def test_as_it_was_reported(toy, tmp_path, how, seconds, seed):
    job = toy(8, "--steps", 400, "--hold", tmp_path / "go")
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 8, 20, "all ranks in their groups")
    if how == "freezer":
        _cgroup_freeze(tree(job.pid), seconds)
    else:
        freeze(tree(job.pid), seconds, seed=seed, apart_s=0.2 if how == "slowly" else 0.0)
    (tmp_path / "go").touch()
    assert job.wait(90) == 0, job.log()
    assert committed(tmp_path) == dict.fromkeys(range(8), 400), job.log()
    assert all(not dead for dead in decided(tmp_path)), "fresh groups at most"


def _cgroup_freeze(pids: list[int], seconds: float) -> None:
    root = "/sys/fs/cgroup/freezer"
    if not os.path.isdir(root) or os.geteuid() != 0:
        pytest.skip("needs root and the freezer of cgroups, version 1")
    group = f"{root}/odyssey-test-{os.getpid()}"
    os.mkdir(group)
    try:
        for pid in pids:
            with open(f"{group}/cgroup.procs", "w") as out:
                out.write(str(pid))
        for state in ("FROZEN", "THAWED"):
            with open(f"{group}/freezer.state", "w") as out:
                out.write(state)
            time.sleep(seconds if state == "FROZEN" else 0.0)
        for pid in pids:
            with open(f"{root}/cgroup.procs", "w") as out:
                out.write(str(pid))
    finally:
        os.rmdir(group)
