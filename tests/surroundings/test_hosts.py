"""Two hosts: power lost, a network that is gone, clocks that differ."""

from __future__ import annotations

import os
import time

import pytest

from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.run import read_run
from tests.launch.jobserver import CHECKOUT, events, wait_for
from tests.launch.test_survival import committed, is_running
from tests.surroundings.hosts import ADDRESSES, PORT, Hosts, needs_namespaces

LEASE_S = 2.0
pytestmark = [needs_namespaces(), pytest.mark.timeout(180)]


@pytest.fixture
def hosts():
    with Hosts() as found:
        yield found


def start(hosts, tmp_path, host, *flags, before=(), script="tests/launch/toy.py", **env):
    argv = [
        *("-m", "odyssey_megatron", "run", "--preload", "tests.launch.preload"),
        *("--nnodes", 2, "--node-rank", host, "--nproc-per-node", 2),
        *("--master-addr", ADDRESSES[0], "--master-port", PORT, CHECKOUT / script),
        *("--odyssey-device", "cpu", "--odyssey-run-dir", tmp_path / "run"),
        *("--odyssey-node-lease-s", LEASE_S, *flags),
    ]
    env["ODYSSEY_TOKEN"] = "both know it"
    return hosts.start(host, argv, log=tmp_path / f"host{host}", before=before, **env)


def both(hosts, tmp_path, *flags):
    agents = [start(hosts, tmp_path, host, "--pipeline", 1, *flags) for host in range(2)]
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 100, "all ranks in their groups")
    return agents


def logs(tmp_path):
    return "".join((tmp_path / f"host{host}").read_text() for host in range(2))


def test_the_first_host_loses_power(hosts, tmp_path):
    """Nothing tells the other one: no packet comes any more. Its ranks are in the middle of a collective."""
    both(hosts, tmp_path, "--steps", 100_000)
    time.sleep(0.5)
    left = hosts.pids(1)
    hosts.lose_power(0)
    began_s = time.monotonic()
    wait_for(lambda: not any(map(is_running, left)), 30, "the other host's agent and ranks end")
    assert time.monotonic() - began_s < LEASE_S + 5.0
    assert "the first agent, which hosts the coordinator, is gone" in logs(tmp_path)


@pytest.mark.matrix
def test_the_other_host_loses_power(hosts, tmp_path):
    agents = both(hosts, tmp_path, "--steps", 500, "--hold", tmp_path / "go")
    hosts.lose_power(1)
    (tmp_path / "go").touch()
    assert agents[0].wait(60) == 0, logs(tmp_path)
    assert committed(tmp_path) == dict.fromkeys((0, 1), 500)


@pytest.mark.matrix
def test_the_network_between_two_living_hosts_is_gone(hosts, tmp_path):
    """The first one goes on alone; the other one ends by itself, so that no rank is there twice when it returns."""
    agents = both(hosts, tmp_path, "--steps", 500, "--hold", tmp_path / "go")
    hosts.forward(False)
    began_s = time.monotonic()
    assert agents[1].wait(30) == 1, logs(tmp_path)
    assert time.monotonic() - began_s < LEASE_S + 5.0
    (tmp_path / "go").touch()
    assert agents[0].wait(60) == 0, logs(tmp_path)
    assert committed(tmp_path) == dict.fromkeys((0, 1), 500)


@pytest.mark.matrix
def test_the_network_is_gone_for_less_than_a_lease(hosts, tmp_path):
    """Nobody is lost: what was sent meanwhile is soon sent again, and idle connections are not given up."""
    agents = both(hosts, tmp_path, "--steps", 500, "--hold", tmp_path / "go", "--odyssey-node-lease-s", 3)
    hosts.forward(False)
    time.sleep(2.0)
    hosts.forward(True)
    (tmp_path / "go").touch()
    assert [agent.wait(60) for agent in agents] == [0, 0], logs(tmp_path)
    assert not events(tmp_path / "run", "failure_detected")


CLOCK = """
import os, time
true = time.time
time.time = lambda: true() + (-7200 if os.path.exists({jumped!r}) else 3600)
"""


def test_hosts_whose_clocks_differ(hosts, tmp_path):
    """Days apart since boot, and hours by their wall clocks, one of which jumps. What the report says of it is true."""
    apart_s, jumped = 1_000_000, tmp_path / "jumped"
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock/sitecustomize.py").write_text(CLOCK.format(jumped=str(jumped)))
    path = os.pathsep.join([str(tmp_path / "clock"), str(CHECKOUT)])
    later = ("unshare", "--time", f"--monotonic={apart_s}", f"--boottime={apart_s}", "--fork", "--kill-child")
    flags = ("--stages", 1, "--out", tmp_path / "weights", "--odyssey-inject", "rank=3,step=2,at=backward")
    there = {"before": later, "PYTHONPATH": path}
    agents = [
        start(hosts, tmp_path, host, *flags, script="tests/execute/stack.py", **(there if host else {}))
        for host in range(2)
    ]
    wait_for(lambda: events(tmp_path / "run", "generation_started"), 100, "training")
    jumped.touch()
    assert [agent.wait(60) for agent in agents] == [0, 0], logs(tmp_path)
    run = read_run(tmp_path / "run")
    assert run.samples.ok
    (recovery,) = run.recoveries
    journal = list(read_journal(tmp_path / "run"))
    (fault,) = (event["t_s"] - apart_s for event in journal if event["event"] == "injected")
    (notice,) = (event["t_s"] for event in journal if event["event"] == "failure_detected")
    ends = [
        event["resumed_s"] - apart_s * (event["rank"] == 2)
        for event in journal
        if event["event"] == "recovered" and event["generation"] == recovery.generation
    ]
    assert len(ends) == 3
    assert recovery.detect_s == pytest.approx(notice - fault, abs=0.1)
    assert recovery.stall_s == pytest.approx(max(ends) - fault, abs=0.1)
    assert all(0 < step.interval_s < 60 for step in run.steps[1:])
