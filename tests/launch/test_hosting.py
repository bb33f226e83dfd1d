"""Who hosts a job keeps its store until all agents that are there have heard of the end."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from odyssey_megatron.codec import to_json
from odyssey_megatron.config import LEASE_S, OdysseyConfig
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.launch.agent import hosting as module
from odyssey_megatron.launch.agent.agent import OdysseyAgent
from odyssey_megatron.launch.agent.hosting import Hosting
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.verdict import JobVerdict


@pytest.fixture
def hosting(tmp_path):
    (tmp_path / "run").mkdir()
    found = Hosting(OdysseyConfig(run_dir=str(tmp_path / "run"), node_lease_s=1.0), None, "", here=0)
    found._nodes = 3
    return found


def parts(hosting: Hosting, control, nodes: tuple[int, ...]) -> float:
    """In so many seconds."""
    began_s = time.monotonic()
    hosting.part(control, JobVerdict(code=0, nodes=nodes), began_s)
    return time.monotonic() - began_s


def test_an_agent_whose_ranks_are_about_to_join_hears_of_the_end(hosting, connect):
    """The coordinator knows of no node that has not got ranks in the job."""
    control, heard = connect(), threading.Event()
    for node in (1, 2):
        control.put(keys.lease_key(node), "")
    control.put(keys.bye_key(1), "")

    def beat() -> None:
        agent, ends_s = connect(writer="agent2"), time.monotonic() + 1.5
        while time.monotonic() < ends_s:
            agent.put(keys.lease_key(2), "")
            time.sleep(0.05)
        heard.set()
        agent.put(keys.bye_key(2), "")

    threading.Thread(target=beat, daemon=True).start()
    parts(hosting, control, nodes=(1,))
    assert heard.is_set()


@pytest.mark.parametrize("lease_s", [1.0, 600.0])
def test_nobody_is_waited_for_who_is_lost(hosting, connect, monkeypatch, lease_s):
    monkeypatch.setattr(module, "_FAREWELL_S", 0.5)
    hosting._config = replace(hosting._config, node_lease_s=lease_s)
    control = connect()
    for node in (1, 2):
        control.put(keys.lease_key(node), "")
    control.put(keys.bye_key(1), "")
    assert parts(hosting, control, nodes=(1,)) < 2.0


def test_nodes_that_never_came_are_not_waited_for(hosting, connect):
    assert parts(hosting, connect(), nodes=()) < 2.0


def test_who_comes_meanwhile_starts_no_ranks(connect):
    """In the place of a lost node."""
    control, agent = connect(), OdysseyAgent.__new__(OdysseyAgent)
    agent._launch = SimpleNamespace(config=OdysseyConfig(node_lease_s=LEASE_S.low))
    control.put(keys.lease_key(1), "")
    control.put(keys.node_key(1), "[2, 3]")
    control.put(keys.VERDICT, to_json(JobVerdict(code=0)))
    with pytest.raises(ConfigError, match="has just ended, so node 1 has nothing to join"):
        agent._take_over(control, 1, [2, 3])
    assert control.counted(keys.replaced_key(1)) == 0
