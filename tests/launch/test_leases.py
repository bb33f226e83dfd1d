"""Who has the place of a node, and since when."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from odyssey_megatron.cluster.events import NodeLost, RankJoined
from odyssey_megatron.config import LEASE_S
from odyssey_megatron.launch.agent.agent import OdysseyAgent
from odyssey_megatron.launch.coordinator.coordinator import _TICK_S
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.leases import HostOfJob, Leases, beats
from tests.launch.jobserver import events, wait_for
from tests.launch.played import Job

pytestmark = pytest.mark.usefixtures("rendezvous")


def agent(connect, incarnation: int):
    return connect(writer="agent1", incarnation=incarnation)


@pytest.mark.timeout(20)
def test_an_agent_that_has_ended_before_it_had_a_lease_is_silent(connect):
    """'odyssey join' would wait for that lease for ever."""
    assert not beats(connect(), 1, 0.5)


def test_a_node_is_lost_when_another_agent_takes_its_place(connect):
    """Though nobody has noticed that it was silent."""
    leases = Leases(connect(), [1], 60.0, here=0)
    first, next_one = agent(connect, 0), agent(connect, 1)
    for now_s in (0.0, 1.0):
        first.put(keys.lease_key(1), "")
        assert leases.expired(now_s) == []
    next_one.put(keys.lease_key(1), "")
    assert leases.expired(2.0) == [NodeLost(node=1, t_s=2.0)]
    assert leases.nodes == [1], "the new one is watched"
    first.put(keys.lease_key(1), "")  # it stood still
    assert leases.expired(3.0) == []
    next_one.put(keys.lease_key(1), "")
    assert leases.expired(4.0) == []


def test_a_node_is_lost_by_the_shortest_lease(connect):
    """Though the coordinator looks once in two ticks only, as on a busy machine."""
    leases = Leases(connect(), [1], LEASE_S.low, here=0)
    agent(connect, 0).put(keys.lease_key(1), "")
    lost = [one for look in range(20) for one in leases.expired(2 * _TICK_S * look)]
    assert [one.node for one in lost] == [1]


def test_an_agent_whose_place_is_taken_hears_of_it(connect):
    control, ended = agent(connect, 0), threading.Event()

    def renew() -> None:
        HostOfJob(60.0).renew(control, 1, 0.01, 0)
        ended.set()

    threading.Thread(target=renew, daemon=True).start()
    other = connect()
    wait_for(lambda: other.has([keys.lease_key(1)]), 10, "its lease")
    assert not ended.wait(0.2)
    assert other.count(keys.replaced_key(1)) == 1
    assert ended.wait(10)


def test_ranks_that_join_before_their_agent_renews_its_lease_are_not_lost(connect, monkeypatch):
    """An agent that is slow behind the start of its ranks: its first sign of life is no other agent's."""
    leases, first = Leases(connect(), [1], 60.0, here=0), agent(connect, 0)
    for key, text in ((keys.JOB_NAME, "job"), (keys.node_key(1), "[2, 3]"), (keys.lease_key(1), "")):
        first.put(key, text)
    assert [leases.expired(now_s) for now_s in (0.0, 20.0, 40.0)] == [[]] * 3
    assert leases.expired(61.0) == [NodeLost(node=1, t_s=61.0)]

    for name in ("ODYSSEY_TOKEN", "ODYSSEY_JOB", "ODYSSEY_INCARNATION"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", lambda self, group: None)
    new = OdysseyAgent.__new__(OdysseyAgent)
    config = SimpleNamespace(job_host="", node_lease_s=0.2)
    new._launch, new._hosting, new._incarnation = (
        SimpleNamespace(config=config, token="", joins=True),
        None,
        0,
    )
    monkeypatch.setattr(new, "_connect", lambda: agent(connect, new._incarnation))
    workers = [SimpleNamespace(global_rank=rank) for rank in (2, 3)]
    spec = SimpleNamespace(rdzv_handler=None)
    new._rendezvous(SimpleNamespace(group_rank=1, spec=spec, workers=workers))
    leases.watch(1)  # they have joined
    assert leases.expired(62.0) == []
    agent(connect, 1).put(keys.lease_key(1), "")
    assert leases.expired(63.0) == []


def test_ranks_of_a_new_agent_are_welcome_before_the_old_one_s_silence_is_noticed(tmp_path):
    """As where the coordinator was busy with another node's loss meanwhile."""
    job = Job(tmp_path)
    try:
        job.post()
        job.live(1, 0, 1, 2, 3)
        job.beating.set()  # node 1 is silent
        control = job.connect()
        control._writer, control._incarnation = "agent1", 1
        time.sleep(0.1)  # it has beaten for the last time
        control.put(keys.lease_key(1), "")
        job.send(*(RankJoined(rank=rank, node=1, incarnation=10_000) for rank in (2, 3)))
        for rank in (2, 3):
            answer = job.control.get(keys.welcome_key(rank, 10_000), timeout_s=10)
            assert answer != keys.NOT_WELCOME
        (lost,) = wait_for(lambda: events(tmp_path, "failure_detected"), 10, "the loss of the node")
        assert lost["dead"] == [2, 3]
        assert job.generation(2).members == (0, 1)
    finally:
        job.close()
