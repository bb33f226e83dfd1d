"""Two agents on loopback play two nodes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from odyssey_megatron.errors import EXIT_AS_ASKED, EXIT_BAD_INPUT
from tests.launch.jobserver import CHECKOUT, Job, events, free_port, pid_of, wait_for
from tests.launch.test_survival import committed, is_running

pytestmark = pytest.mark.usefixtures("server")

STEPS = 30


def start(
    server, tmp_path, tokens: tuple[str, str], *flags: object, c10d: bool = False, shared: bool = True
) -> list[Job]:
    """Two agents of two ranks each; the first one hosts the coordinator. ``c10d``: by torch's own rendezvous."""
    port = free_port()
    # One stage: Megatron puts a stage's replicas side by side, and so a stage of two on one node.
    script = [
        *(CHECKOUT / "tests/launch/toy.py", "--steps", STEPS, "--hold", tmp_path / "go", "--pipeline", 1),
        *("--odyssey-device", "cpu", "--odyssey-node-lease-s", 0.8),
    ]
    address = ["--master-addr", "127.0.0.1", "--master-port", port]
    if c10d:
        address = ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    return [
        server.run(
            [
                "--nnodes",
                2,
                "--node-rank",
                node,
                "--nproc-per-node",
                2,
                *address,
                *script,
                *flags,
                "--odyssey-run-dir",
                tmp_path / ("run" if shared and len({*tokens}) == 1 else f"run{node}"),
            ],
            log=tmp_path / f"node{node}",
            env={"ODYSSEY_TOKEN": token, "SLURMD_NODENAME": f"gpu{node}"},
        )
        for node, token in enumerate(tokens)
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_each_node_names_the_faults_that_its_ranks_have_not_had(server, tmp_path, shared):
    """Of its own ranks alone, whose journals it has also where nodes share no folder."""
    inject = "rank=0,step=2,at=forward;rank=1,step=99,at=forward;rank=2,step=4,at=forward;rank=3,step=98,at=forward"
    flags = ("--odyssey-inject", inject)
    jobs = start(server, tmp_path, ("two nodes", "two nodes"), *flags, shared=shared)
    (tmp_path / "go").touch()
    assert [job.wait(40) for job in jobs] == [0, 0], jobs[0].log() + jobs[1].log()
    for job, left in zip(jobs, ("rank=1,step=99,at=forward", "rank=3,step=98,at=forward"), strict=True):
        (told,) = [line for line in job.log().splitlines() if "no record that" in line]
        assert told.endswith(f"1 fault(s) struck, so this job does not show that it survives them: {left}")


@pytest.fixture
def nodes(server, tmp_path):
    jobs = start(server, tmp_path, ("two nodes", "two nodes"))
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 30, "all ranks in their groups")
    yield jobs
    for job in jobs:
        if job.process.poll() is None:
            job.kill()


def test_a_rank_of_the_other_node_dies(nodes, tmp_path):
    os.kill(pid_of(tmp_path / "run", 3), signal.SIGKILL)
    (tmp_path / "go").touch()
    assert [job.wait(30) for job in nodes] == [0, 0], nodes[0].log() + nodes[1].log()
    assert committed(tmp_path) == dict.fromkeys((0, 1, 2), STEPS)
    (found,) = events(tmp_path / "run", "failure_detected")
    assert found["dead"] == [3]
    # By Slurm's names for the nodes, as they stand in "exclude them from the next job".
    hosts = {one["target"]: one["host"] for one in events(tmp_path / "run", "rank_started")}
    assert hosts == {0: "gpu0", 1: "gpu0", 2: "gpu1", 3: "gpu1"}


def test_the_other_agent_is_killed_with_its_ranks(nodes, tmp_path):
    pids = [pid_of(tmp_path / "run", rank) for rank in (2, 3)]
    nodes[1].kill()
    (tmp_path / "go").touch()
    assert nodes[0].wait(30) == 0, nodes[0].log()
    assert committed(tmp_path) == dict.fromkeys((0, 1), STEPS)
    assert not any(map(is_running, pids))
    assert [e["dead"] for e in events(tmp_path / "run", "failure_detected")] == [[2, 3]]


def test_the_first_agent_is_killed(nodes, tmp_path):
    pids = [pid_of(tmp_path / "run", rank) for rank in range(4)]
    began_s = time.monotonic()
    nodes[0].kill()
    assert nodes[1].wait(15) == 1, nodes[1].log()
    assert time.monotonic() - began_s < 10
    assert "the first agent, which hosts the coordinator, is gone" in nodes[1].log()
    wait_for(lambda: not any(map(is_running, pids)), 5, "all ranks end")


def test_nodes_with_different_secrets(server, tmp_path):
    jobs = start(server, tmp_path, ("one", "other"))
    assert jobs[1].wait(30) == 2, jobs[1].log()
    assert "the nodes have different secrets" in jobs[1].log()
    # A stranger at the door must not end a job: the first node goes on waiting for the right one.
    wait_for(lambda: "a node at 127.0.0.1 has another secret" in jobs[0].log(), 10, "the first node says so")
    assert jobs[0].process.poll() is None
    jobs[0].kill()
    assert not any(events(path, "decision") for path in tmp_path.glob("run?"))


class Apart:
    """A job of two nodes of two ranks each that ``odyssey host`` hosts."""

    def __init__(self, server, folder, *flags: object):
        self._server, self._folder = server, folder
        self.run_dir, self.at = folder / "run", f"127.0.0.1:{free_port()}"
        self._script = [
            *(CHECKOUT / "tests/launch/toy.py", "--steps", STEPS, "--hold", folder / "go", "--pipeline", 1),
            *("--odyssey-device", "cpu", "--odyssey-node-lease-s", 0.8, "--odyssey-run-dir", self.run_dir),
            *("--odyssey-job-host", self.at, *flags),
        ]
        # Before there is a host: they wait for it.
        self.nodes = [self.start("run", node) for node in range(2)]
        self.host = self.start("host")
        wait_for(lambda: len(events(self.run_dir, "recovered")) == 4, 30, "all ranks in their groups")

    def start(
        self, command: str, node: int = 0, ranks: int = 2, *flags: object, log: str | None = None
    ) -> Job:
        return self._server.run(
            ["--nnodes", 2, "--node-rank", node, "--nproc-per-node", ranks, *self._script, *flags],
            log=self._folder / (log or f"{command}{node}"),
            env={"ODYSSEY_TOKEN": "three machines"},
            command=command,
        )

    def end(self) -> None:
        for job in (self.host, *self.nodes):
            if job.process.poll() is None:
                job.kill()


@pytest.fixture
def apart(server, tmp_path):
    job = Apart(server, tmp_path)
    yield job
    job.end()


def test_the_first_node_is_lost_where_it_hosts_nothing(apart, tmp_path):
    pids = [pid_of(apart.run_dir, rank) for rank in (0, 1)]
    apart.nodes[0].kill()
    (tmp_path / "go").touch()
    assert apart.nodes[1].wait(30) == apart.host.wait(30) == 0, apart.host.log() + apart.nodes[1].log()
    assert committed(tmp_path) == dict.fromkeys((2, 3), STEPS)
    assert not any(map(is_running, pids))
    assert [e["dead"] for e in events(apart.run_dir, "failure_detected")] == [[0, 1]]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_node_is_not_replaced_by_one_with_other_ranks(apart, tmp_path, ranks):
    """More of them would be ranks of the next node, too."""
    apart.nodes[1].kill()
    wait_for(lambda: events(apart.run_dir, "failure_detected"), 20, "the loss of the node")
    other = apart.start("join", 1, ranks)
    assert other.wait(30) == EXIT_BAD_INPUT
    assert f"node 1 has 2 rank(s) in this job, and this command would start {ranks}" in other.log()
    (tmp_path / "go").touch()
    assert apart.nodes[0].wait(30) == apart.host.wait(30) == 0, apart.host.log()


def test_a_node_that_was_started_for_another_job_makes_room_for_the_right_one(apart, tmp_path):
    apart.nodes[1].kill()
    wait_for(lambda: events(apart.run_dir, "failure_detected"), 20, "the loss of the node")
    other = apart.start("join", 1, 2, "--pipeline", 2, log="other")
    assert other.wait(20) == EXIT_BAD_INPUT, other.log()
    assert "Use the arguments that the job was started with." in other.log()
    assert other.log().count("node 1 does not join the job, as its rank") == 1
    right = apart.start("join", 1)
    wait_for(lambda: len(events(apart.run_dir, "rank_started")) == 8, 20, "its ranks")
    (tmp_path / "go").touch()
    assert right.wait(30) == apart.nodes[0].wait(30) == apart.host.wait(30) == 0, right.log()
    assert "cannot join" not in right.log()


def test_a_node_that_has_not_joined_yet_is_told_to_end(apart, tmp_path):
    """Its part in the job has not begun: the others go on, and another agent may take its place."""
    apart.nodes[1].kill()
    wait_for(lambda: events(apart.run_dir, "failure_detected"), 20, "the loss of the node")
    other = apart.start("join", 1, 2, "--late", tmp_path / "speak", log="other")
    wait_for(lambda: len(events(apart.run_dir, "rank_started")) == 6, 20, "its ranks")
    os.kill(other.pid, signal.SIGTERM)
    assert other.wait(20) == 128 + signal.SIGTERM, other.log()
    assert other.log().count("this node does not join the job, as SIGTERM came to the agent of node 1") == 1
    right = apart.start("join", 1)
    wait_for(lambda: len(events(apart.run_dir, "rank_started")) == 8, 20, "its ranks")
    (tmp_path / "go").touch()
    assert right.wait(30) == apart.nodes[0].wait(30) == apart.host.wait(30) == 0, right.log()


def test_the_host_of_a_job_is_killed(apart):
    pids = [pid_of(apart.run_dir, rank) for rank in range(4)]
    apart.host.kill()
    assert [job.wait(15) for job in apart.nodes] == [1, 1], apart.nodes[0].log()
    assert f"odyssey host at {apart.at}, which hosts the coordinator, is gone" in apart.nodes[0].log()
    wait_for(lambda: not any(map(is_running, pids)), 5, "all ranks end")


def test_the_host_of_a_job_is_asked_to_end(apart):
    os.kill(apart.host.pid, signal.SIGTERM)
    code = 128 + signal.SIGTERM
    assert [job.wait(20) for job in (apart.host, *apart.nodes)] == [code] * 3, apart.host.log()
    why = "the job was ended by SIGTERM to the job's host"
    assert [job.log().count(why) for job in (apart.host, *apart.nodes)] == [1] * 3, (
        "nodes have logs of their own"
    )


def test_all_say_that_the_agent_of_one_node_was_asked_to_end_the_job(apart):
    os.kill(apart.nodes[1].pid, signal.SIGTERM)
    there = (apart.host, *apart.nodes)
    assert [job.wait(20) for job in there] == [128 + signal.SIGTERM] * 3, apart.host.log()
    why = "the job was ended by SIGTERM to the agent of node 1"
    assert [job.log().count(why) for job in there] == [1] * 3, [job.log() for job in there]


def test_the_first_node_says_that_the_agent_of_another_one_has_ended_the_job(server, tmp_path):
    jobs = start(server, tmp_path, ("one", "one"))
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 30, "all ranks in their groups")
    os.kill(jobs[1].pid, signal.SIGTERM)
    assert [job.wait(20) for job in jobs] == [128 + signal.SIGTERM] * 2, jobs[0].log()
    why = "the job was ended by SIGTERM to the agent of node 1"
    assert [job.log().count(why) for job in jobs] == [1] * 2, [job.log() for job in jobs]


def without_ranks(job: Apart, node: int) -> None:
    """The ranks of ``node`` are dead for good, and its agent stays."""
    lost = (2 * node, 2 * node + 1)
    for rank in lost:
        os.kill(pid_of(job.run_dir, rank), signal.SIGKILL)
    wait_for(lambda: len(events(job.run_dir, "recovered")) >= 6, 20, "the others go on")
    assert job.nodes[node].process.poll() is None


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_without_ranks_is_asked_to_end_the_job(server, tmp_path, node):
    """Its own cannot hear of it: those of the other node do, and end behind a step."""
    job = Apart(server, tmp_path, "--odyssey-on-sigterm", "save")
    try:
        without_ranks(job, node)
        os.kill(job.nodes[node].pid, signal.SIGTERM)
        wait_for(lambda: events(job.run_dir, "asked"), 10, "the agent to take note")
        (tmp_path / "go").touch()
        ended = [one.wait(30) for one in (job.host, *job.nodes)]
        assert ended == [EXIT_AS_ASKED] * 3, job.nodes[1 - node].log() + job.host.log()
    finally:
        job.end()


def test_the_host_of_a_job_is_asked_to_end_it_with_a_save(server, tmp_path):
    job = Apart(server, tmp_path, "--odyssey-on-sigterm", "save")
    try:
        os.kill(job.host.pid, signal.SIGTERM)
        wait_for(lambda: events(job.run_dir, "asked"), 10, "the host to take note")
        (tmp_path / "go").touch()
        ended = [one.wait(30) for one in (job.host, *job.nodes)]
        assert ended == [EXIT_AS_ASKED] * 3, job.host.log()
    finally:
        job.end()


def test_all_are_asked_at_once(server, tmp_path):
    """As a batch system does. Whoever hears first of another's signal has still to be sent its own."""
    job = Apart(server, tmp_path, "--odyssey-on-sigterm", "save")
    try:
        wait_for((tmp_path / "go.waits").exists, 20, "no step to end")
        for one in (job.host, *job.nodes):
            os.kill(one.pid, signal.SIGTERM)
            time.sleep(0.5)
        (tmp_path / "go").touch()
        ended = [one.wait(30) for one in (job.host, *job.nodes)]
        assert ended == [EXIT_AS_ASKED] * 3, job.host.log()
    finally:
        job.end()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_all_processes_are_told_of_a_time_limit(server, tmp_path, number):
    """As by Slurm's --signal=USR1@120. Python, and so a rank, dies of it by default."""
    job = Apart(server, tmp_path, "--odyssey-on-sigterm", "save")
    try:
        wait_for((tmp_path / "go.waits").exists, 20, "no step to end")
        for pid in [
            *(pid_of(job.run_dir, rank) for rank in range(4)),
            job.host.pid,
            *(one.pid for one in job.nodes),
        ]:
            os.kill(pid, number)
        wait_for(lambda: events(job.run_dir, "asked"), 10, "somebody to take note")
        (tmp_path / "go").touch()
        ended = [one.wait(30) for one in (job.host, *job.nodes)]
        assert ended == [EXIT_AS_ASKED] * 3, job.host.log()
        assert not events(job.run_dir, "failure_detected")
    finally:
        job.end()


def test_a_node_without_ranks_leaves_at_once(server, tmp_path):
    job = Apart(server, tmp_path, "--odyssey-on-sigterm", "leave")
    try:
        without_ranks(job, 1)
        os.kill(job.nodes[1].pid, signal.SIGTERM)
        assert job.nodes[1].wait(10) == EXIT_AS_ASKED, job.nodes[1].log()
        (tmp_path / "go").touch()
        assert job.nodes[0].wait(30) == job.host.wait(30) == 0, job.nodes[0].log()
        assert committed(job.run_dir.parent) == dict.fromkeys((0, 1), STEPS)
    finally:
        job.end()


def test_a_node_that_does_not_leave_in_time_is_told_so_again(server, tmp_path):
    """As a batch system does that takes it away. The job goes on."""
    job = Apart(server, tmp_path, "--odyssey-on-sigterm", "leave")
    try:
        os.kill(job.nodes[1].pid, signal.SIGTERM)
        wait_for(lambda: events(job.run_dir, "asked"), 10, "the agent to take note")
        time.sleep(0.5)  # sooner they would count as one; the toy's ranks do not leave
        os.kill(job.nodes[1].pid, signal.SIGTERM)
        assert job.nodes[1].wait(20) == 128 + signal.SIGTERM, job.nodes[1].log()
        assert "this node leaves the job at once, as SIGTERM has come again" in job.nodes[1].log()

        def causes() -> list[str]:  # one event or two: the ranks do not end in the same instant
            return [cause for lost in events(job.run_dir, "failure_detected") for cause in lost["causes"]]

        wait_for(lambda: len(causes()) == 2, 10, "its ranks' deaths")
        assert causes() == ["killed"] * 2, "not as those of a node that has fallen silent: it is sound"
        (tmp_path / "go").touch()
        assert job.nodes[0].wait(30) == job.host.wait(30) == 0, job.nodes[0].log()
        assert committed(job.run_dir.parent) == dict.fromkeys((0, 1), STEPS)
    finally:
        job.end()


@pytest.mark.matrix
def test_the_first_node_leaves_where_it_hosts_nothing(server, tmp_path):
    job = Apart(server, tmp_path, "--odyssey-on-sigterm", "leave")
    try:
        os.kill(job.nodes[0].pid, signal.SIGTERM)
        (tmp_path / "go").touch()
        assert job.nodes[0].wait(30) == EXIT_AS_ASKED, job.nodes[0].log()
        assert job.nodes[1].wait(30) == job.host.wait(30) == 0, job.host.log()
    finally:
        job.end()


def test_a_host_that_nodes_are_not_told_of(server, tmp_path):
    script = [CHECKOUT / "tests/launch/toy.py", "--odyssey-run-dir", tmp_path / "run"]
    job = server.run(["--nnodes", 2, *script], log=tmp_path / "host", command="host")
    assert job.wait(30) == EXIT_BAD_INPUT
    assert "give --odyssey-job-host HOST:PORT, the same here and on their launch lines" in job.log()


@pytest.mark.matrix
def test_nodes_with_different_secrets_that_meet_at_torch_s_own_store(server, tmp_path):
    """Which has no door: whoever comes there ends the job, and both say why."""
    jobs = start(server, tmp_path, ("one", "other"), c10d=True)
    assert [job.wait(60) for job in jobs] == [2, 2], jobs[0].log() + jobs[1].log()
    assert all(job.log().count("the nodes have different secrets") == 1 for job in jobs)
