"""A loss that ends the job: everything of it has ended within the lease of a node and 5 s, whatever the ranks do."""

from __future__ import annotations

import os
import signal
import time

import pytest

from odyssey_megatron.errors import EXIT_LAYERS_LOST
from tests.launch.jobserver import events, pid_of, wait_for
from tests.launch.test_nodes import start
from tests.launch.test_survival import is_running
from tests.surroundings.trees import tree

pytestmark = pytest.mark.usefixtures("server")

LEASE_S = 0.8


def running(tmp_path, jobs):
    """All pids of ``jobs``, once they train."""
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 60, "all ranks in their groups")
    return [pid for job in jobs for pid in tree(job.pid)]


def lose(tmp_path, *ranks):
    """All at once: stopped first, so that none gives its layers away in a generation without the first."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in ranks:
            os.kill(pid_of(tmp_path / "run", rank), number)


def assert_all_end(jobs, pids, began_s, *, code=EXIT_LAYERS_LOST):
    left = LEASE_S + 5.0
    wait_for(lambda: not any(map(is_running, pids)), left + 20, "agents and ranks end")
    assert time.monotonic() - began_s < left, "".join(job.log() for job in jobs)
    for job in jobs:
        assert job.wait(1) == code, job.log()
        assert "Traceback" not in job.log()


@pytest.mark.parametrize(
    "others",
    [
        "leave",
        pytest.param("are deaf", marks=pytest.mark.matrix),
        pytest.param("hang", marks=pytest.mark.matrix),
    ],
)
def test_on_one_node(toy, tmp_path, others):
    """Four stages, and one rank of each."""
    flags = ("--deaf",) if others == "are deaf" else ()
    job = toy(4, "--pipeline", 4, "--steps", 100_000, "--odyssey-node-lease-s", LEASE_S, *flags)
    pids = running(tmp_path, [job])
    if others == "hang":
        for rank in (0, 1, 3):
            os.kill(pid_of(tmp_path / "run", rank), signal.SIGSTOP)
    began_s = time.monotonic()
    os.kill(pid_of(tmp_path / "run", 2), signal.SIGKILL)
    assert_all_end([job], pids, began_s)


@pytest.mark.parametrize("flags", [(), pytest.param(("--deaf",), marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "lost",
    [
        "the other node",
        *(pytest.param(f"ranks {one}", marks=pytest.mark.matrix) for one in ("0 and 1", "2 and 3")),
    ],
)
def test_on_two_nodes(server, tmp_path, lost, flags):
    """Two stages, one on each node."""
    jobs = start(server, tmp_path, ("two nodes", "two nodes"), "--pipeline", 2, "--steps", 100_000, *flags)
    pids = running(tmp_path, jobs)
    began_s = time.monotonic()
    if lost == "the other node":
        jobs[1].kill()
        return assert_all_end(jobs[:1], pids, began_s)
    lose(tmp_path, *{"ranks 0 and 1": (0, 1), "ranks 2 and 3": (2, 3)}[lost])
    assert_all_end(jobs, pids, began_s)


@pytest.mark.matrix
def test_while_the_other_node_is_frozen(server, tmp_path):
    """It cannot say good-bye: the first one does not wait for it for long, and it ends once it runs again."""
    jobs = start(server, tmp_path, ("two nodes", "two nodes"), "--pipeline", 2, "--steps", 100_000)
    running(tmp_path, jobs)
    frozen, first = tree(jobs[1].pid), tree(jobs[0].pid)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    lose(tmp_path, 0, 1)
    assert_all_end(jobs[:1], first, began_s)
    began_s = time.monotonic()
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    assert_all_end(jobs[1:], frozen, began_s, code=1)
