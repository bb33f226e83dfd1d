"""Signals to ``odyssey run``, to one rank, to all: what is asked for, and exit codes that say what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from odyssey_megatron.errors import EXIT_AS_ASKED
from tests.launch.jobserver import CHECKOUT, Job, events, free_port, pid_of, wait_for
from tests.launch.test_survival import is_running


class Training:
    """The example, on its way, told to end behind a step."""

    def __init__(self, jobs, name, *flags, ranks=4, stages=2):
        from tests.e2e.jobs import SCRIPT

        self.run, self.ranks = jobs.folder / name, ranks
        argv = ["--nproc-per-node", str(ranks), str(SCRIPT), *jobs.flags(name, stages=stages)]
        argv += ["--train-iters", "100000", "--odyssey-on-sigterm", "save", *flags]
        self.job: Job = jobs.server.run(argv, log=jobs.folder / f"{name}.log")
        self.outcome = lambda: jobs.outcome(name, exit_code=self.job.wait(60), log=self.job.log())

    def after(self, steps):
        wait_for(lambda: len(events(self.run, "step_committed")) > steps, 40, f"{steps} steps")
        return self

    @property
    def pids(self):
        return [pid_of(self.run, rank) for rank in range(self.ranks)]


@pytest.fixture
def training(jobs, request):
    started = []

    def start(*flags, **how):
        name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")
        started.append(Training(jobs, name, *flags, **how))
        return started[-1]

    yield start
    for one in started:
        if one.job.process.poll() is None:
            one.job.kill()


def assert_ended_alike(outcome, survivors):
    """Behind the same step, with its weights."""
    assert outcome.exit_code == EXIT_AS_ASKED, outcome.log[-3000:]
    ends = {event["rank"]: event["step"] for event in outcome.named("weights")}
    last = outcome.named("step_committed")[-1]["step"] + 1
    assert ends == dict.fromkeys(survivors, last)
    assert f"ended after iteration {last}, as a signal asked it to" in outcome.log
    assert "Traceback" not in outcome.log
    assert outcome.weights()


@pytest.mark.parametrize(
    "to", ["the launcher", "all processes at once", "the launcher, and one rank is killed"]
)
def test_sigterm_ends_the_job_behind_a_step(training, to):
    job = training().after(3)
    if to == "all processes at once":  # as a batch system does
        for pid in job.pids:
            os.kill(pid, signal.SIGTERM)
    os.kill(job.job.pid, signal.SIGTERM)
    if "killed" in to:
        os.kill(job.pids[1], signal.SIGKILL)
    outcome = job.outcome()
    assert_ended_alike(outcome, survivors={0, 2, 3} if outcome.named("failure_detected") else {0, 1, 2, 3})
    assert ("killed" in to) >= bool(outcome.named("failure_detected"))


def test_a_second_signal_ends_the_job_at_once(training):
    job = training().after(3)
    os.kill(job.pids[2], signal.SIGSTOP)
    os.kill(job.job.pid, signal.SIGTERM)
    time.sleep(0.5)
    began_s = time.monotonic()
    os.kill(job.job.pid, signal.SIGTERM)
    assert job.outcome().exit_code == 128 + signal.SIGTERM
    assert time.monotonic() - began_s < 3
    assert not any(map(is_running, job.pids))


def test_a_signal_to_one_rank_is_its_death_and_nothing_else(training):
    job = training("--train-iters", "25").after(3)
    os.kill(job.pids[1], signal.SIGTERM)
    outcome = job.outcome()
    assert outcome.exit_code == 0, outcome.log[-3000:]
    (detected,) = outcome.named("failure_detected")
    assert (detected["dead"], detected["code"]) == ([1], [-signal.SIGTERM])


def in_groups(tmp_path, ranks=4):
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == ranks, 20, "all ranks in their groups")
    return [pid_of(tmp_path / "run", rank) for rank in range(ranks)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_without_a_place_to_save_to_the_first_signal_ends_the_job(toy, tmp_path, number):
    job = toy(4, "--steps", 1000)
    pids = in_groups(tmp_path)
    os.kill(pids[3], signal.SIGSTOP)  # which does not hear SIGTERM
    began_s = time.monotonic()
    os.kill(job.pid, number)
    assert job.wait(10) == 128 + number, job.log()
    assert time.monotonic() - began_s < 8
    assert f"ended by {signal.Signals(number).name}" in job.log()
    assert "Traceback" not in job.log()
    assert not any(map(is_running, pids))


def test_a_signal_to_all_ranks_is_no_lost_hardware(toy, tmp_path):
    job = toy(4, "--steps", 1000)
    for pid in in_groups(tmp_path):
        os.kill(pid, signal.SIGTERM)
    assert job.wait(10) == 128 + signal.SIGTERM, job.log()
    assert "were ended by SIGTERM" in job.log()


def test_a_script_that_has_not_joined_is_ended(server, tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('up').touch()\ntime.sleep(60)\n"
    )
    job = server.run(["--nproc-per-node", 2, script, "--save", tmp_path, "--odyssey-device", "cpu",
                      "--odyssey-run-dir", tmp_path / "run"], log=tmp_path / "log")  # fmt: skip
    wait_for((tmp_path / "up").exists, 20, "the script runs")
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(10) == 128 + signal.SIGTERM, job.log()


@pytest.mark.parametrize("after_s", [0.2, 0.25, 1.0])
def test_ctrl_c_while_the_launcher_starts(tmp_path, after_s):
    script = tmp_path / "train.py"  # where all is quick, ranks begin by then
    script.write_text("import time; time.sleep(60)")
    command = [sys.executable, "-m", "odyssey_megatron", "run", "--nproc-per-node", "2", str(script)]
    job = subprocess.Popen(
        [*command, "--odyssey-run-dir", tmp_path / "run"], stderr=subprocess.PIPE, text=True, cwd=CHECKOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )  # fmt: skip
    time.sleep(after_s)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=20)  # also of ranks, if any are left
    if (
        job.returncode != -signal.SIGINT or "odyssey_megatron" in said
    ):  # else Python itself had not started yet
        assert job.returncode == 128 + signal.SIGINT, said
    assert "odyssey_megatron/cli.py" not in said, "a traceback, and none of a rank's that has begun"


def test_a_rank_that_hangs_behind_its_last_step_is_named_and_ended(toy, tmp_path):
    """Stopped when it has finished, and before it has ended."""
    job = toy(4, "--steps", 10, "--stop-at-end", 2, "--odyssey-hang-s", 1.0)
    began_s = time.monotonic()
    assert job.wait(30) == 1, job.log()
    assert "rank 2 has been silent for 1.0 s: it is killed" in job.log()
    assert "rank(s) [2] were killed behind the job's last step" in job.log()
    assert time.monotonic() - began_s < 20
    assert {e["rank"] for e in events(tmp_path / "run", "step_committed")} == {0, 1, 3}


def two_nodes(jobs, name: str, *flags: object, stages: int = 1) -> tuple[list[Job], Path]:
    """Of two ranks each; and its run folder."""
    from tests.e2e.jobs import SCRIPT

    address = ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    script = [SCRIPT, *jobs.flags(name, stages=stages), *flags]
    nodes = [
        jobs.server.run(
            ["--nnodes", 2, "--nproc-per-node", 2, *address, "--node-rank", node, *script],
            log=jobs.folder / f"{name}-{node}.log",
            env={"ODYSSEY_TOKEN": name},
        )
        for node in range(2)
    ]
    return nodes, jobs.folder / name


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["leave", "save"])
def test_a_node_whose_ranks_stand_by_is_asked(jobs, how):
    """Rank 3 is lost for good, and rank 2 waits for another one of its cell."""
    cells = ("--tensor-model-parallel-size", 2, "--odyssey-respawn", 1, "--odyssey-shrink", "off")
    nodes, run = two_nodes(
        jobs, f"stands-by-{how}", *cells, "--train-iters", 100_000, "--odyssey-on-sigterm", how
    )
    wait_for(lambda: len(events(run, "step_committed")) > 3, 60, "some steps")

    def started(rank: int) -> list[int]:
        return [one["pid"] for one in events(run, "rank_started") if one["target"] == rank]

    for life in range(2):
        wait_for(lambda: len(started(3)) > life, 30, "rank 3 to be started")  # noqa: B023
        os.kill(started(3)[life], signal.SIGKILL)
    wait_for(lambda: len(started(2)) == 2, 30, "rank 2 to be started again")
    time.sleep(8.0)  # it builds its model, and waits
    assert nodes[1].process.poll() is None
    began_s = time.monotonic()
    os.kill(nodes[1].pid, signal.SIGTERM)
    assert nodes[1].wait(10) == EXIT_AS_ASKED, nodes[1].log()
    assert time.monotonic() - began_s < 5
    if how == "save":
        assert nodes[0].wait(10) == EXIT_AS_ASKED, nodes[0].log()
        return
    done = len(events(run, "step_committed"))
    wait_for(lambda: len(events(run, "step_committed")) > done + 10, 30, "the other node to go on")
    nodes[0].kill()


def test_a_node_that_is_drained_leaves_behind_a_step(jobs):
    """The others go on; its agent ends with the exit code that says so."""
    nodes, run = two_nodes(jobs, "drained", "--train-iters", 25, "--odyssey-on-sigterm", "leave")
    wait_for(lambda: len(events(run, "step_committed")) > 3, 60, "some steps")
    os.kill(nodes[1].pid, signal.SIGTERM)
    assert nodes[1].wait(30) == EXIT_AS_ASKED, nodes[1].log()
    assert nodes[0].wait(60) == 0, nodes[0].log()
    lost = [event for event in events(run, "failure_detected")]
    assert sorted(rank for event in lost for rank in event["dead"]) == [2, 3]
    assert {e["step"] for e in events(run, "step_committed")} == set(range(25))


def test_a_node_that_alone_has_layers_ends_the_job_with_them(jobs):
    """The second of two stages is on that node only."""
    flags = ("--train-iters", 100_000, "--odyssey-on-sigterm", "leave")
    nodes, run = two_nodes(jobs, "needed", *flags, stages=2)
    wait_for(lambda: len(events(run, "step_committed")) > 3, 60, "some steps")
    os.kill(nodes[1].pid, signal.SIGTERM)
    assert [one.wait(30) for one in nodes] == [EXIT_AS_ASKED] * 2, nodes[0].log() + nodes[1].log()
    assert_ended_alike(jobs.outcome("needed", exit_code=EXIT_AS_ASKED, log=nodes[0].log()), range(4))
    assert "this node cannot leave, as no other node has layers 4 to 6 and the head" in nodes[1].log()
    assert "node 1 was asked to leave, but no other node has layers 4 to 6 and the head" in nodes[0].log()


def test_the_last_node_that_is_asked_to_leave_ends_the_job(jobs):
    flags = ("--train-iters", 100_000, "--odyssey-on-sigterm", "leave")
    nodes, run = two_nodes(jobs, "last", *flags)
    wait_for(lambda: len(events(run, "step_committed")) > 3, 60, "some steps")
    os.kill(nodes[1].pid, signal.SIGTERM)
    assert nodes[1].wait(30) == EXIT_AS_ASKED, nodes[1].log()
    os.kill(nodes[0].pid, signal.SIGTERM)
    assert nodes[0].wait(30) == EXIT_AS_ASKED, nodes[0].log()
    assert_ended_alike(jobs.outcome("last", exit_code=EXIT_AS_ASKED, log=nodes[0].log()), {0, 1})
    assert "this node cannot leave, as no rank would be left" in nodes[0].log()


def test_nodes_that_are_all_asked_to_leave_at_once_end_together(jobs):
    """The first one of them may leave, but has not when the other one may not: the step at hand waits for a rank."""
    flags = ("--train-iters", 100_000, "--odyssey-on-sigterm", "leave", "--odyssey-hang-s", 30)
    nodes, run = two_nodes(jobs, "all-asked", *flags)
    wait_for(lambda: len(events(run, "step_committed")) > 3, 60, "some steps")
    stopped = pid_of(run, 3)
    os.kill(stopped, signal.SIGSTOP)
    for one in nodes:
        os.kill(one.pid, signal.SIGTERM)
    wait_for(lambda: any("no rank would be left: the" in one.log() for one in nodes), 10, "the second answer")
    time.sleep(1.5)  # until the first one's agent has heard of the end
    os.kill(stopped, signal.SIGCONT)
    assert [one.wait(30) for one in nodes] == [EXIT_AS_ASKED] * 2, nodes[0].log() + nodes[1].log()
    assert_ended_alike(jobs.outcome("all-asked", exit_code=EXIT_AS_ASKED, log=nodes[0].log()), range(4))
