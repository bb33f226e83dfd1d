"""Who has the place of a node, and since when."""

from __future__ import annotations

import signal
import subprocess
import sys
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
from odyssey_megatron.launch.wire.awake import Pauses
from odyssey_megatron.launch.wire.leases import HostOfJob, Leases, beats
from odyssey_megatron.launch.wire.lost_host import COMES_BACK_S
from tests.launch.jobserver import CHECKOUT, events, wait_for
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


@pytest.mark.parametrize(
    ("stood_still_s", "others", "alone"),
    [
        ((0.0, 20.0), "gone", True),
        ((0.0, 20.0), "one is there", False),
        ((0.0, 3.0), "gone", False),  # they wait for longer
        ((-60.0, -30.0), "gone", False),  # they went on with this host
    ],
)
def test_a_host_that_others_do_not_wait_for_is_alone(connect, stood_still_s, others, alone):
    pauses = Pauses(0.9 * 3.0 + COMES_BACK_S)
    leases = Leases(connect(), [1, 2], 3.0, here=0, pauses=pauses)
    first, second = agent(connect, 0), connect(writer="agent2", incarnation=0)
    for one, key in ((first, keys.lease_key(1)), (second, keys.lease_key(2))):
        one.put(key, "")
    assert leases.expired(-0.1) == []
    pauses.note(*stood_still_s)
    lost, now_s = [], 20.0
    first.put(keys.lease_key(1), "")  # was on its way when the other node left
    second.put(keys.lease_key(2), "")
    while not lost:
        assert leases.left_alone([]) == ""
        if others == "one is there":
            second.put(keys.lease_key(2), "")
        lost = leases.expired(now_s)
        now_s += 0.3
    why = leases.left_alone([one.node for one in lost])
    assert why.startswith("this host of the job stood still for 20.0 s.") == bool(why) == alone
    assert ("The other nodes wait 5.5 s for it (--odyssey-node-lease-s + 2.5 s)" in why) == alone


@pytest.mark.parametrize(
    ("looks_from_s", "renews_until_s", "alone"),
    [
        (20.0, 20.0, True),
        (20.0, 22.8, False),  # it stayed, and died for another reason
        (27.5, 27.5, True),  # a decision took long after the pause
    ],
)
def test_another_node_has_stayed_if_it_renews_its_lease_after_the_pause(
    connect, looks_from_s, renews_until_s, alone
):
    pauses = Pauses(0.9 * 3.0 + COMES_BACK_S)
    leases, node = Leases(connect(), [1], 3.0, here=0, pauses=pauses), agent(connect, 0)
    node.put(keys.lease_key(1), "")
    assert leases.expired(-0.1) == []
    pauses.note(0.0, 20.0)
    lost, now_s = [], looks_from_s
    while not lost:
        if now_s <= renews_until_s:
            node.put(keys.lease_key(1), "")
        lost = leases.expired(now_s)
        now_s += 0.3
    assert bool(leases.left_alone([one.node for one in lost])) == alone


def test_an_agent_that_comes_in_place_of_one_that_left_is_there(connect):
    pauses = Pauses(0.9 * 3.0 + COMES_BACK_S)
    leases = Leases(connect(), [1], 3.0, here=0, pauses=pauses)
    agent(connect, 0).put(keys.lease_key(1), "")
    assert leases.expired(-0.1) == []
    pauses.note(0.0, 20.0)
    agent(connect, 1).put(keys.lease_key(1), "")
    assert leases.expired(20.0) == [NodeLost(node=1, t_s=20.0)]
    assert leases.left_alone([1]) == ""


def test_a_job_goes_on_without_a_node_whose_ranks_were_dead_before_the_pause(tmp_path):
    """All that it needs is on its host."""
    job = Job(tmp_path)
    try:
        job.post()
        job.live(1, 0, 1, 2, 3)
        job.died(2, 3)
        assert job.generation(2).members == (0, 1)
        leases = job.coordinator._leases
        leases._pauses = Pauses(1.0)
        job.beating.set()
        leases._pauses.note(time.monotonic() - 20.0, time.monotonic())
        wait_for(lambda: not leases.nodes, 10, "the loss of the node")
        job.live(2, 0, 1)
        job.died(1)
        assert job.generation(3).members == (0,)
    finally:
        job.close()


def test_a_pause_that_others_wait_for_is_told_too():
    told = []
    pauses = Pauses(5.2, told.append)
    for began_s, ended_s in ((0.0, 0.1), (0.1, 1.6), (1.6, 4.6), (4.6, 14.6)):
        pauses.note(began_s, ended_s)
    assert told == pytest.approx([3.0, 10.0])
    assert (pauses.lasted_s, pauses.ended_s) == pytest.approx((10.0, 14.6))


@pytest.mark.timeout(20)
def test_a_process_knows_how_long_it_was_stopped():
    """And not that another one of its threads had long work."""
    says = (
        "import threading, time; from odyssey_megatron.launch.wire.awake import Pauses\n"
        "pauses = Pauses(0.5); pauses.start(); print(flush=True)\n"
        "time.sleep(0.8); ends = time.monotonic() + 1.0\n"
        "while time.monotonic() < ends: pass\n"
        "print(pauses.lasted_s, flush=True); input(); time.sleep(0.3); print(pauses.lasted_s)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", says], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=CHECKOUT, text=True
    ) as process:
        assert process.stdout.readline() == "\n"
        assert float(process.stdout.readline()) == 0.0
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate("\n")
    assert 1.3 < float(out) < 2.5


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
