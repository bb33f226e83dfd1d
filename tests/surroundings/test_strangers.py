"""What a stranger can do who reaches the job's addresses, or has recorded what was said."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, c10d_rendezvous_backend

from odyssey_megatron.cluster.events import RankDied, RankJoined
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.admission import Admission, Meeting, ask, bind_c10d
from odyssey_megatron.launch.wire.control import Control, EventReader
from odyssey_megatron.launch.wire.leases import Leases, beats
from odyssey_megatron.launch.wire.local_rendezvous import LocalRendezvous
from tests.launch.jobserver import free_port, wait_for
from tests.surroundings.recorder import Recorder


def meeting(port: int, node: int = 0, token: str = "secret") -> Meeting:
    return Meeting(
        host="127.0.0.1", port=port, node=node, nodes=2, token=token, bind="", lease_s=3.0, hosts=node == 0
    )


@pytest.fixture
def admission():
    found = Admission(meeting(free_port()))
    found.next_rendezvous()
    return found


def test_nodes_meet_and_know_the_same_session(admission):
    other = Admission(meeting(admission._meeting.port, node=1))
    store, address = other.next_rendezvous().store, other.next_rendezvous().bootstrap_store_info
    store.set("key", "value")
    assert admission.next_rendezvous().store.get("key") == b"value"
    assert other.token == admission.token != "secret"
    assert address.master_port == admission.next_rendezvous().bootstrap_store_info.master_port


def test_two_jobs_with_one_token_have_two_sessions(admission):
    other = Admission(meeting(free_port()))
    other.next_rendezvous()
    assert admission.token != other.token


def test_another_token_is_told_so_and_nothing_else(admission):
    with pytest.raises(ConfigError, match="different secrets"):
        ask("127.0.0.1", admission._meeting.port, "guess")


def test_a_knock_that_is_played_back_opens_nothing(admission):
    tap = Recorder(("127.0.0.1", admission._meeting.port))
    assert ask("127.0.0.1", tap.port, "secret")["session"]
    (record,) = tap.sent
    with socket.create_connection(("127.0.0.1", admission._meeting.port), timeout=5) as again:
        again.recv(16)
        again.sendall(bytes(record))
        assert again.recv(100) == b"no"


def test_a_door_that_is_played_back_is_not_believed(admission):
    """Somebody in the first node's place, with what the door once answered."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port = impostor.getsockname()[1]

        def answer() -> None:
            with contextlib.suppress(OSError), impostor.accept()[0] as line:
                line.sendall(bytes(16))
                line.recv(100)
                line.sendall(bytes(32) + b'{"session":"old","port":1}')

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConnectionError, match="not this job's door"):
            ask("127.0.0.1", port, "secret")


def test_the_store_hears_admitted_hosts_only(admission):
    """A packet of another one is dropped by the kernel: there is no connection, and nothing that it costs."""
    port = admission.next_rendezvous().bootstrap_store_info.master_port
    for source, heard in (("127.0.0.1", True), ("127.0.0.77", False)):
        with socket.socket() as line:
            line.settimeout(0.5)
            line.bind((source, 0))
            if heard:
                line.connect(("127.0.0.1", port))
            else:
                with pytest.raises(TimeoutError):
                    line.connect(("127.0.0.1", port))


def usage() -> tuple[int, int]:
    """(resident KiB, descriptors) of this process, which hosts the door and the store."""
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(status["VmRSS"].split()[0]), len(os.listdir("/proc/self/fd"))


FLOOD = """
import socket, sys
lines = []
for index in range(900):
    line = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10)
    line.setblocking(False)
    if index % 2:
        try:
            line.send(bytes(1 << 20))
        except OSError:
            pass
    lines.append(line)
print("there", flush=True)
sys.stdin.read()
"""


def test_a_flood_at_the_door(admission):
    """Connections that say nothing, and ones that say a lot: bounded, and a node still gets in."""
    port, before = admission._meeting.port, usage()
    flood = subprocess.Popen(
        [sys.executable, "-c", FLOOD, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert flood.stdout
    assert flood.stdin
    assert flood.stdout.readline() == b"there\n"
    found, ends_s = None, time.monotonic() + 10
    while not found and time.monotonic() < ends_s:
        with contextlib.suppress(OSError):
            found = ask("127.0.0.1", port, "secret")
    crowded = usage()
    assert found
    assert crowded[1] - before[1] <= 260, "256 at a time"
    assert crowded[0] - before[0] < 16 * 1024
    wait_for(lambda: usage()[1] <= before[1] + 4, 10, "all strangers are sent away, though they stay")
    flood.stdin.close()
    assert flood.wait(10) == 0


# -- what was recorded ------------------------------------------------------------------------------------


@pytest.fixture
def wire():
    """A store, a tap in front of it, and how to connect through and past it."""
    rendezvous = LocalRendezvous("test")
    address = rendezvous.next_rendezvous().bootstrap_store_info
    tap = Recorder((address.master_addr, address.master_port))

    def connect(*, tapped: bool = False, **who) -> Control:
        port = tap.port if tapped else address.master_port
        return Control.connect(address.master_addr, port, "secret", timeout_s=5, **who)

    yield tap, connect
    tap.close()
    del rendezvous


def heard(reader: EventReader, count: int) -> list[object]:
    found: list[object] = []
    ends_s = time.monotonic() + 5
    while len(found) < count and time.monotonic() < ends_s:
        found += reader.take(0.2)
    return found


def test_events_that_are_played_back_are_dropped(wire):
    """Today's attack: the death of a rank's first process, once more after it has come back."""
    tap, connect = wire
    reader = EventReader(connect())
    agent, rank = connect(tapped=True, writer="agent0"), connect(writer="rank3", incarnation=1)
    died = RankDied(rank=3, code=-9, cause="killed")
    agent.send(died, acknowledged=True)
    back = RankJoined(rank=3, node=0, incarnation=1)
    rank.send(back, acknowledged=True)
    assert heard(reader, 2) == [died, back]
    tap.play_back()
    (again,) = heard(reader, 1)
    assert isinstance(again, str)
    assert "agent0 has said that before" in again
    agent.send(died, acknowledged=True)
    assert heard(reader, 1) == [died], "what the agent says now counts"


def test_a_new_process_of_a_rank_counts_from_the_start_and_its_last_one_is_over(wire):
    _, connect = wire
    reader = EventReader(connect())
    first, second = (connect(writer="rank3", incarnation=number) for number in (0, 1))
    late = RankJoined(rank=3, node=0, incarnation=0)
    sealed = first.seal(keys.EVENTS, "{}")
    second.send(late, acknowledged=True)
    first.store.queue_push(keys.EVENTS, sealed)
    new, old = heard(reader, 2)
    assert new == late
    assert isinstance(old, str)
    assert "or something later" in old


def test_a_lease_that_is_played_back_renews_nothing(wire):
    tap, connect = wire
    agent = connect(tapped=True, writer="agent1")
    for _ in range(5):
        agent.put(keys.lease_key(1), "")
    agent.store.check(["answered"])
    leases, control = Leases(connect(), [1], 0.5, here=0), connect()
    lost, ends_s = [], time.monotonic() + 5
    while not lost and time.monotonic() < ends_s:
        tap.play_back()  # five beats after one another
        lost = leases.expired(time.monotonic())
        time.sleep(0.02)
    assert [one.node for one in lost] == [1]
    assert not beats(control, 1, 0.3)


def test_what_is_overwritten_keeps_its_newest_value(wire):
    tap, connect = wire
    rank, reader = connect(tapped=True, writer="rank0"), connect()
    key = keys.observations_key(0)
    rank.put(key, "old")
    rank.store.check(["answered"])
    tap_old = [bytes(one) for one in tap.sent]
    rank.put(key, "new")
    rank.store.check(["answered"])
    assert [text for _, text in reader.latest([key])] == ["new"]
    tap.sent = [bytearray(one) for one in tap_old]
    tap.play_back()
    assert reader.peek(key) == "old", "the store has no memory"
    assert [text for _, text in reader.latest([key])] == ["new"]
    reader.store.set(key, "not sealed at all")
    assert [text for _, text in reader.latest([key])] == ["new"]


def test_the_store_of_several_nodes_listens_on_one_address(admission):
    ports = {admission._meeting.port, admission.next_rendezvous().bootstrap_store_info.master_port}
    assert listening(ports) == {("0100007F", port) for port in ports}
    assert isinstance(admission.next_rendezvous().store, dist.Store)


@pytest.mark.parametrize("bind", ["", "127.0.0.2"])
def test_a_rendezvous_of_torch_s_own_listens_on_one_address(bind, monkeypatch):
    port = free_port()
    monkeypatch.setattr(c10d_rendezvous_backend, "TCPStore", dist.TCPStore)
    bind_c10d(bind)
    where = {"endpoint": f"{bind or '127.0.0.1'}:{port}", "run_id": "test", "is_host": "true"}
    parameters = RendezvousParameters(backend="c10d", min_nodes=1, max_nodes=1, **where)
    store = c10d_rendezvous_backend._create_tcp_store(parameters)
    assert listening({port}) == {("0200007F" if bind else "0100007F", port)}
    parameters.config["is_host"] = "false"
    c10d_rendezvous_backend._create_tcp_store(parameters).set("key", "value")
    assert store.get("key") == b"value"


def listening(ports: set[int]) -> set[tuple[str, int]]:
    """Of this machine, (address, port) in the words of the kernel."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in open(table).readlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, port = local.rpartition(":")
            if state == "0A" and int(port, 16) in ports:
                found.add((address, int(port, 16)))
    return found
