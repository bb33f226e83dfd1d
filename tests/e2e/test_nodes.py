"""Two agents on loopback play two nodes; one is killed with all its ranks while Megatron trains."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from odyssey_megatron.errors import EXIT_BAD_INPUT
from tests.e2e.jobs import LONG, SCRIPT, TOLERANCE, assert_equal_numbers, assert_equal_weights
from tests.launch.jobserver import events, free_port, pid_of, wait_for


def start_nodes(jobs, name, *flags, stages=1, apart=False):
    """Two agents, and how to start one more like the second: (agents, again).

    ``apart``: a third one of the agents is ``odyssey host``, and one more is like the first.
    """
    port = free_port()
    where = ["--odyssey-job-host", f"127.0.0.1:{port}"] if apart else []

    def start(node, command="run", log="log", more=()):
        return jobs.server.run(
            ["--nnodes", 2, "--node-rank", node, "--nproc-per-node", 2, "--master-addr", "127.0.0.1", "--master-port",
             port, SCRIPT, *jobs.flags(name, stages=stages), "--odyssey-node-lease-s", 0.8, *where, *flags, *more],
            log=jobs.folder / f"{name}-{node}.{log}", env={"ODYSSEY_TOKEN": "both nodes know it"}, command=command,
        )  # fmt: skip

    agents = [start(node) for node in range(2)] + ([start(2, "host")] if apart else [])
    return agents, lambda *more: start(0 if apart else 1, "join", "-".join(["again", *more]), more)


def assert_filled(outcome, reference, ranks) -> int:
    """``ranks`` have come back, and the job has trained as ever, at last by its first plan. The last generation."""
    assert_equal_numbers(outcome.run.steps, reference.run.steps, rel=TOLERANCE)
    assert sorted(event["target"] for event in outcome.named("rank_joined")) == ranks
    begun = {
        e["generation"]: (e["plan_hash"], len(e["members"])) for e in outcome.named("generation_started")
    }
    assert begun[max(begun)] == begun[1] == (begun[1][0], 4)
    assert_equal_weights(outcome.weights(), reference.weights())
    return max(begun)


def test_a_lost_node(jobs, undisturbed, name):
    """One stage, four replicas: Megatron puts a stage's replicas side by side, so each node has two of them."""
    reference = undisturbed()
    agents, _ = start_nodes(jobs, name)
    run_dir = jobs.folder / name
    wait_for(lambda: events(run_dir, "step_committed"), 60, "the first step")
    agents[1].kill()
    assert agents[0].wait(60) == 0, agents[0].log()
    (lost,) = events(run_dir, "failure_detected")
    assert lost["dead"] == [2, 3]
    assert "nothing has been heard of node(s) 1 for a while" in agents[0].log()
    outcome = jobs.outcome(name, exit_code=0, log=agents[0].log())
    assert_equal_numbers(outcome.run.steps, reference.run.steps, rel=TOLERANCE)
    assert_equal_weights(outcome.weights(), reference.weights())


def test_a_lost_node_that_had_all_replicas_of_a_stage_but_for_their_places(jobs, undisturbed, name):
    """Two stages of two replicas: Megatron would have each stage on a node."""
    reference = undisturbed()
    agents, _ = start_nodes(jobs, name, "--odyssey-layout", "spread", stages=2)
    run_dir = jobs.folder / name
    wait_for(lambda: events(run_dir, "step_committed"), 60, "the first step")
    agents[1].kill()
    assert agents[0].wait(60) == 0, agents[0].log()
    outcome = jobs.outcome(name, exit_code=0, log=agents[0].log())
    assert_equal_numbers(outcome.run.steps, reference.run.steps, rel=TOLERANCE)
    assert_equal_weights(outcome.weights(), reference.weights())


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_a_lost_node_is_replaced(jobs, reference, name):
    """``odyssey join`` with the arguments of the run: the new node's ranks are filled, and train to the end."""
    agents, again = start_nodes(jobs, name, *LONG.split())
    run_dir = jobs.folder / name
    wait_for(lambda: events(run_dir, "step_committed"), 60, "the first step")
    agents[1].kill()
    wait_for(lambda: events(run_dir, "failure_detected"), 60, "the loss of the node")
    replaced = again()
    assert agents[0].wait(100) == 0, agents[0].log()
    assert replaced.wait(20) == 0, replaced.log()
    outcome = jobs.outcome(name, exit_code=0, log=agents[0].log())
    assert_filled(outcome, reference, [2, 3])


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_a_lost_node_is_replaced_after_a_try_with_other_settings(jobs, name):
    agents, again = start_nodes(jobs, name, *LONG.split(), "--train-iters", 200)
    run_dir = jobs.folder / name
    wait_for(lambda: events(run_dir, "step_committed"), 60, "the first step")
    agents[1].kill()
    wait_for(lambda: events(run_dir, "failure_detected"), 60, "the loss of the node")
    other = again("--lr", "2e-3")
    assert other.wait(60) == EXIT_BAD_INPUT, other.log()
    assert "Use the arguments that the job was started with." in other.log()
    assert not events(run_dir, "job_finished")
    replaced = again()
    assert agents[0].wait(120) == 0, agents[0].log()
    assert replaced.wait(20) == 0, replaced.log()
    assert sorted(event["target"] for event in events(run_dir, "rank_joined")) == [2, 3]


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_the_first_node_is_lost_and_replaced(jobs, reference, name):
    """``odyssey host`` hosts the job."""
    agents, again = start_nodes(jobs, name, *LONG.split(), apart=True)
    run_dir = jobs.folder / name
    wait_for(lambda: events(run_dir, "step_committed"), 60, "the first step")
    agents[0].kill()
    wait_for(lambda: events(run_dir, "failure_detected"), 60, "the loss of the node")
    replaced = again()
    assert agents[2].wait(100) == 0, agents[2].log()
    assert [agents[1].wait(20), replaced.wait(20)] == [0, 0], replaced.log()
    outcome = jobs.outcome(name, exit_code=0, log=agents[1].log())
    last = assert_filled(outcome, reference, [0, 1])
    # By what the host has heard alone its clock is joined to theirs, as on a machine without ranks it has to be.
    for noted in outcome.named("generation_agreed"):
        assert noted["source"] == "host"
        theirs_s = [
            event["agreed_s"]
            for event in outcome.named("generation_started")
            if event["generation"] == noted["generation"]
        ]
        assert abs(noted["agreed_s"] - min(theirs_s)) < 0.5
    assert {one["generation"] for one in outcome.named("generation_agreed")} >= {1, last}


@pytest.mark.matrix
def test_a_node_that_is_not_lost_is_not_replaced(jobs, name):
    agents, again = start_nodes(jobs, name, "--train-iters", 40)
    run_dir = jobs.folder / name
    wait_for(lambda: events(run_dir, "step_committed"), 60, "the first step")
    intruder = again()
    assert intruder.wait(60) == EXIT_BAD_INPUT
    assert "node 1 is alive: its agent renews its lease" in intruder.log()
    assert [agent.wait(60) for agent in agents] == [0, 0], agents[0].log()


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_a_node_that_stood_still_until_it_was_replaced_stays_out(jobs, reference, name):
    """As a virtual machine that is suspended: when it goes on another one has its ranks."""
    agents, again = start_nodes(jobs, name, *LONG.split(), "--odyssey-respawn", 3)
    run_dir = jobs.folder / name
    wait_for(lambda: events(run_dir, "step_committed"), 60, "the first step")
    first = [agents[1].pid, *(pid_of(run_dir, rank) for rank in (2, 3))]
    for pid in first:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: events(run_dir, "failure_detected"), 60, "the loss of the node")
        replaced = again()
        wait_for(lambda: len(events(run_dir, "rank_started")) >= 6, 60, "its ranks")
    finally:
        for pid in first:
            with contextlib.suppress(ProcessLookupError):  # the agent, woken first, has ended its ranks
                os.kill(pid, signal.SIGCONT)
    assert agents[1].wait(60) == 1, agents[1].log()
    assert "another agent has taken the place of node 1" in agents[1].log()
    assert agents[0].wait(100) == 0, agents[0].log()
    assert replaced.wait(20) == 0, replaced.log()
    outcome = jobs.outcome(name, exit_code=0, log=agents[0].log())
    assert_filled(outcome, reference, [2, 3])
