"""The kernel lets packets of admitted hosts pass, and has room for as many as a large job has."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import struct
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.launch.wire import admission, lost_host
from odyssey_megatron.launch.wire.admission import Admission, Meeting, _Doorkeeper, _Hosts, _only_from, ask
from odyssey_megatron.launch.wire.lost_host import connections_to


def passes(program: bytes, address: str, family: int) -> bool:
    """What the kernel makes of a packet from there (Documentation/networking/filter.rst)."""
    source = socket.inet_pton(family, address)
    offset = 12 if family == socket.AF_INET else 8
    steps, at, held, kept = list(struct.iter_unpack("HBBI", program)), 0, 0, [0] * 16
    while True:
        what, if_so, if_not, value = steps[at]
        at += 1
        match what:
            case 0x20:
                (held,) = struct.unpack_from("!I", source, value - 0xFFF00000 - offset)
            case 0x02:
                kept[value] = held
            case 0x60:
                held = kept[value]
            case 0x15:
                at += if_so if held == value else if_not
            case 0x05:
                at += value
            case 0x06:
                return value > 0
            case _:
                raise AssertionError(f"step {what:#x}")


def drawn(family: int, draw: random.Random) -> str:
    """Of few networks, so that some have words in common."""
    if family == socket.AF_INET:
        return f"10.0.{draw.randrange(3)}.{draw.randrange(250)}"
    return f"fd0{draw.randrange(3)}:{draw.randrange(3):x}::{draw.randrange(3):x}:{draw.randrange(600):x}"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("count", [1, 2, 3, 20, 254, 255, 256, 600])
def test_only_admitted_hosts_pass(family, count):
    draw = random.Random(count)
    admitted = sorted({drawn(family, draw) for _ in range(count)})
    program = _only_from(admitted, family)
    assert all(passes(program, one, family) for one in admitted)
    others = {drawn(family, draw) for _ in range(300)} - {*admitted}
    assert others
    assert not any(passes(program, one, family) for one in others)


def test_an_address_of_one_link_is_admitted_though_it_names_an_interface():
    program = _only_from(["fe80::1%eth0", "fe80::1%eth1", "fe80::2%eth0"], socket.AF_INET6)
    assert passes(program, "fe80::1", socket.AF_INET6)
    assert passes(program, "fe80::2", socket.AF_INET6)
    assert not passes(program, "fe80::3", socket.AF_INET6)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_thousand_nodes_are_let_in(family):
    """Also by kernels before 6.6, which have a sixth of the room for it that later ones have."""
    name = "10.9.{}.{}" if family == socket.AF_INET else "fd00::{:x}:{:x}"
    addresses = [name.format(at // 250, at % 250) for at in range(1000)]
    assert len(_only_from(addresses, family)) / 8 < 1.1 * len(addresses)
    own = "127.0.0.1" if family == socket.AF_INET else "::1"
    if family == socket.AF_INET6 and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server((own, 0), family=family) as listener:
        hosts = _Hosts(listener, family)
        for one in addresses:
            hosts.admit({one})


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def test_a_node_for_which_there_is_no_room_is_named(capfd):
    def full(hosts: set[str]) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    door = socket.create_server(("127.0.0.1", 0))
    keeper = _Doorkeeper(door, "secret", {}, full)
    threading.Thread(target=keeper.run, daemon=True).start()
    for _ in range(3):
        with pytest.raises(OSError):
            ask("127.0.0.1", door.getsockname()[1], "secret")
    said = capfd.readouterr().err
    assert said.count("the node at 127.0.0.1 cannot be let in: the kernel has no room") == 1
    assert "net.core.optmem_max" in said


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("size", "pause_s"), [(2**20, 0.0), (1, 0.05)])
def test_who_answers_without_end_is_not_listened_to_without_end(monkeypatch, size, pause_s):
    """Somebody else has the port, and sends much, or little again and again."""
    monkeypatch.setattr(admission, "_ASKED_FOR_S", 0.5)

    def answer() -> None:
        line, _ = door.accept()
        with line, contextlib.suppress(OSError):
            line.sendall(bytes(admission._NONCE_BYTES))
            while True:
                line.sendall(bytes(size))
                time.sleep(pause_s)

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(OSError, match=r"not this job's door|no whole answer within 0\.5 s|timed out"):
            ask("127.0.0.1", door.getsockname()[1], "secret")


def test_the_door_rests_after_each_look(monkeypatch):
    """Else a crowd there would keep it looking, and the coordinator's thread would wait for it."""
    done, here = list[object](), threading.get_ident()

    def sleep(for_s: float) -> None:
        if threading.get_ident() == here:  # doors of other tests may be open
            done.append(for_s)

    class Crowd:
        def register(self, *one: object) -> None:
            pass

        def select(self, limit_s: float) -> list[object]:
            if len(done) == 4:
                raise KeyboardInterrupt
            done.append("looks")
            return []

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    with socket.create_server(("127.0.0.1", 0)) as door:
        keeper = _Doorkeeper(door, "secret", {}, None)
        keeper._selector = Crowd()
        monkeypatch.setattr(admission, "time", clock)
        with pytest.raises(KeyboardInterrupt):
            keeper.run()
    assert done[:2] == done[2:] == ["looks", admission._BREATH_S]
    assert admission._BREATH_S > 0


def test_where_there_is_no_room_for_one_more_those_who_are_in_may_come_again():
    room = len(_only_from(["10.0.0.1", "10.0.0.2"], socket.AF_INET)) // 8

    class Listener:
        def dup(self) -> Listener:
            return self

        def setsockopt(self, level: int, option: int, program: bytes) -> None:
            if struct.unpack("HL", program)[0] > room:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")

    hosts = _Hosts(Listener(), socket.AF_INET)
    hosts.admit({"10.0.0.1", "10.0.0.2"})
    with pytest.raises(OSError):
        hosts.admit({"10.0.0.3"})
    hosts.admit({"10.0.0.2"})  # 'odyssey join'


@pytest.mark.parametrize(
    ("host", "bind", "told", "reached"),
    [
        ("head", "", True, "127.0.1.1"),
        ("head", "127.0.0.1", False, "127.0.0.1"),
        ("localhost", "", False, "localhost"),
        ("127.0.0.1", "", False, "127.0.0.1"),
    ],
)
def test_a_host_that_knows_itself_by_a_loopback_address_says_so(
    monkeypatch, capfd, host, bind, told, reached
):
    """As Debian's /etc/hosts has it: other nodes would knock in vain, for ten minutes. With --odyssey-bind they would
    not, and this host goes by that, too.
    """
    look_up = socket.getaddrinfo

    def here(name: str, *settings: object, **named: object) -> object:
        return look_up("127.0.1.1" if name == "head" else name, *settings, **named)

    monkeypatch.setattr(socket, "getaddrinfo", here)
    monkeypatch.setattr(dist, "TCPStore", lambda *settings, **named: None)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    found = Admission(
        Meeting(host=host, port=port, node=0, nodes=2, token="", bind=bind, lease_s=3.0, hosts=True)
    ).next_rendezvous()
    assert found.bootstrap_store_info.master_addr == reached
    said = capfd.readouterr().err
    assert ("head, where the job's nodes are to meet, is 127.0.1.1 on this machine" in said) == told
    assert ("--master-addr" in said) == told


@pytest.mark.parametrize(("errno", "asks"), [(socket.EAI_NONAME, True), (socket.EAI_AGAIN, False)])
def test_who_waits_for_a_host_says_so_and_where_nobody_can_host(monkeypatch, capsys, errno, asks):
    def unknown(*settings: object, **named: object) -> object:
        raise socket.gaierror(errno, "no address")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    meeting = Meeting(
        host="no.such.host.invalid", port=1, node=1, nodes=2, token="x", bind="", lease_s=3.0, hosts=False
    )
    monkeypatch.setattr(admission, "_SAYS_AFTER_S", 0.0)
    monkeypatch.setattr(admission, "_MEET_S", 0.3)
    with pytest.raises(ConfigError, match="nobody who hosts this job answered at no.such.host.invalid:1"):
        Admission(meeting).next_rendezvous()
    told = capsys.readouterr().err
    assert told.count("nobody who hosts this job answers at no.such.host.invalid:1 yet (") == 1
    assert ("Is that name spelled right (--master-addr)?" in told) == asks
    with pytest.raises(ConfigError, match="cannot listen at no.such.host.invalid:1"):
        Admission(replace(meeting, node=0, hosts=True)).next_rendezvous()


def test_what_an_editor_leaves_beside_sources_is_none_of_them(tmp_path, monkeypatch):
    """Such as a link to nowhere, which marks an open file."""
    package = tmp_path / "package"
    here = package / "launch" / "wire" / "admission.py"
    here.parent.mkdir(parents=True)
    here.write_text("x = 1")
    monkeypatch.setattr(admission, "__file__", str(here))
    version = admission.version_here.__wrapped__
    before = version()
    (package / ".#cli.py").symlink_to("somebody@host.1234")
    (package / "gone.py").symlink_to("nowhere.py")
    (package / ".saved.py").write_text("y = 2")
    assert version() == before
    (package / "cli.py").write_text("y = 2")
    assert version() != before


@pytest.mark.parametrize(
    ("unlike", "said"),
    [
        ({"nodes": 3}, "--nnodes is 3 here, and 2"),
        ({"lease_s": 60.0}, "--odyssey-node-lease-s is 60 here, and 3"),
        ({"observes": True}, "--odyssey is observe here, and recover"),
        (
            {"version": "0.0.9 (sources 12ab)"},
            r"odyssey-megatron is 0\.0\.9 \(sources 12ab\) here, and \d+\.\d+",
        ),
    ],
)
def test_a_node_with_other_flags_than_the_first_is_refused(unlike, said):
    """It would renew its lease too seldom, say, and be lost though nothing ails it, or wait for ranks that only look
    on.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    first = Meeting(host="127.0.0.1", port=port, node=0, nodes=2, token="x", bind="", lease_s=3.0, hosts=True)
    host = Admission(first)
    host.next_rendezvous()
    other = replace(first, node=1, hosts=False)
    assert Admission(other).next_rendezvous().world_size == 2
    with pytest.raises(ConfigError, match=said):
        Admission(replace(other, **unlike)).next_rendezvous()


def test_a_node_that_waits_for_others_does_not_wait_for_a_host_that_has_vanished(monkeypatch):
    """No packet says so. The kernel would wait for 15 minutes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    meeting = Meeting(
        host="127.0.0.1", port=port, node=0, nodes=2, token="one", bind="", lease_s=3.0, hosts=True
    )
    host = Admission(meeting)
    host.next_rendezvous()
    monkeypatch.setattr(lost_host, "stays_here", lambda connection: False)
    found = Admission(replace(meeting, node=1, hosts=False)).next_rendezvous().bootstrap_store_info
    limits_s = [
        one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1e3
        for one in connections_to(found.master_port)
    ]
    assert limits_s
    assert all(0 < limit_s < 3.0 + 5.0 for limit_s in limits_s)
