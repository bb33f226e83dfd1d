"""Two agents on loopback play two nodes; one is killed with all its ranks while Megatron trains."""

from __future__ import annotations

import socket

from tests.e2e.jobs import SCRIPT, assert_equal_weights
from tests.launch.jobserver import events, wait_for


def test_a_lost_node(jobs, undisturbed, name):
    """One stage, four replicas: Megatron puts a stage's replicas side by side, so each node has two of them."""
    reference = undisturbed(4, 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = [
        jobs.server.run(
            ["--nnodes", 2, "--node-rank", node, "--nproc-per-node", 2, "--master-addr", "127.0.0.1", "--master-port",
             port, SCRIPT, *jobs.flags(name, stages=1), "--odyssey-node-lease-s", 0.8],
            log=jobs.folder / f"{name}-{node}.log", env={"ODYSSEY_TOKEN": "both nodes know it"},
        )
        for node in range(2)
    ]  # fmt: skip
    run_dir = jobs.folder / name
    wait_for(lambda: events(run_dir, "step_committed"), 60, "the first step")
    agents[1].kill()
    assert agents[0].wait(60) == 0, agents[0].log()
    (lost,) = events(run_dir, "failure_detected")
    assert lost["dead"] == [2, 3]
    outcome = jobs.outcome(name, exit_code=0, log=agents[0].log())
    assert [one.step for one in outcome.run.steps] == list(range(6))
    assert_equal_weights(outcome.weights(), reference.weights())
