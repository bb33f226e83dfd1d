"""The wire: sealed values, one queue, and nothing believed that does not carry the job's token."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch.distributed as dist

from odyssey_megatron.cluster.events import RankDied, Retry, event_to_jsonable
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import ControlPlaneLost
from odyssey_megatron.launch.rank.member import Member
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import EVENTS, Control, EventReader
from odyssey_megatron.launch.wire.local_rendezvous import LocalRendezvous

EVENT = Retry(rank=1, generation=2, reason="why")


def test_values(connect):
    one, other = connect(), connect()
    assert one.peek("key") is None
    one.put("key", "text")
    assert other.get("key") == "text"
    assert other.read(["key", "key"]) == ["text", "text"]
    assert not other.has(["key", "none"])
    assert other.put_first("first", "a")
    assert not one.put_first("first", "b")
    assert one.get("first") == "a"
    with pytest.raises(TimeoutError):
        one.get("never", timeout_s=0.01)


def test_who_waits_is_not_woken_by_others_who_look(connect):
    one, other, found = connect(), connect(), list[str]()
    waiting = threading.Thread(target=lambda: found.append(one.get("key", timeout_s=5)), daemon=True)
    waiting.start()
    for _ in range(20):
        assert not other.said("key")
        time.sleep(0.01)
    other.put("key", "text")
    waiting.join(5)
    assert found == ["text"]
    assert other.said("key")


def test_who_joins_leaves_no_answer_behind(connect):
    """The store would grow with each process that comes back."""
    coordinator = connect()
    coordinator.put(keys.welcome_key(2, 1), "4")
    member = Member(
        rank=2, world_size=4, control=connect(), watch=connect(), config=OdysseyConfig(), incarnation=1
    )  # fmt: skip
    member.join()
    assert not coordinator.has([keys.welcome_key(2, 1)])
    coordinator.forget("never")


def test_a_value_that_is_deleted_is_not_waited_for(connect, monkeypatch):
    """Between two looks of a process that stood still."""
    one, other, wait = connect(), connect(), Control.wait

    def deleted(control: Control, names: list[str], timeout_s: float | None = None) -> None:
        wait(control, names, timeout_s)
        other.forget(names[0])

    one.put("key", "text")
    monkeypatch.setattr(Control, "wait", deleted)
    with pytest.raises(KeyError, match="key"):
        one.get("key", timeout_s=5.0)


def test_many_values_come_in_several_messages(connect):
    """More than the store's server reads in a reasonable time from one, and one that is longer than the usual."""
    one, other = connect(), connect()
    texts = {f"key/{at}": f"{at}" * (100_000 if at == 7 else 300) for at in range(1000)}
    one.put_all(texts)
    assert other.read([*texts]) == [*texts.values()]
    one.put_all({})


def test_another_token_sees_nothing(connect):
    connect().put("key", "text")
    assert connect("guess").peek("key") is None


def test_a_value_works_under_its_own_key_only(connect):
    one = connect()
    one.put("key", "text")
    one.store.set("copy", one.store.get("key"))
    with pytest.raises(ValueError, match="copy: not sealed"):
        one.get("copy")
    one.store.set("key", "forged")
    with pytest.raises(ValueError, match="key: not sealed"):
        one.get("key")


def test_malformed_events_are_told_apart(connect):
    one = connect()
    reader = EventReader(connect())
    one.store.queue_push(EVENTS, "no seal at all")
    one.store.queue_push(EVENTS, b"\xff\xfe")
    one.store.queue_push(EVENTS, one.seal(EVENTS, "not JSON"))
    one.store.queue_push(EVENTS, one.seal(EVENTS, json.dumps({"kind": "RankDied", "rank": "x"})))
    forged = connect("guess").seal(EVENTS, to_json(event_to_jsonable(EVENT)))
    one.store.queue_push(EVENTS, forged)
    one.send(EVENT, acknowledged=True)
    found = []
    while EVENT not in found:
        found += reader.take(5)
    assert len(found) == 6
    assert all(isinstance(one, str) for one in found[:-1])


def test_events_keep_their_order(connect):
    one, other, reader = connect(), connect(), EventReader(connect())
    died = RankDied(rank=0, code=-9, cause="killed", t_s=1.0)
    for _ in range(20):
        one.send(EVENT, acknowledged=True)
        other.send(died, acknowledged=True)
    found = []
    while len(found) < 40:
        found += reader.take(5)
    assert found == [EVENT, died] * 20


def test_a_store_that_is_gone():
    listener_gone = LocalRendezvous("short-lived")
    address = listener_gone.next_rendezvous().bootstrap_store_info
    control = Control.connect(address.master_addr, address.master_port, "t", timeout_s=5)
    reader = EventReader(Control.connect(address.master_addr, address.master_port, "t", timeout_s=5))
    del listener_gone
    with pytest.raises(ControlPlaneLost):
        reader.take(5)
    with pytest.raises(ControlPlaneLost):
        control.get("key", timeout_s=5)


def test_the_store_listens_on_loopback_only(rendezvous):
    port = rendezvous.next_rendezvous().bootstrap_store_info.master_port
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in open(table).readlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                listening.append(local.rpartition(":")[0])
    assert listening == ["0100007F"]
    assert isinstance(rendezvous.next_rendezvous().store, dist.Store)
