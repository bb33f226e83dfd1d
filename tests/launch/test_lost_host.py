"""Which connections end when nothing more is heard from their other end."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from odyssey_megatron.launch.wire.lost_host import give_up_on_host, stays_here


@contextlib.contextmanager
def connected(address: str, family: int = socket.AF_INET):
    """Both ends of a connection, with small buffers."""
    with socket.socket(family) as listener, socket.socket(family) as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.bind((address, 0))
        listener.listen()
        client.connect(listener.getsockname())
        with listener.accept()[0] as server:
            yield client, server


@pytest.mark.timeout(30)
def test_a_process_of_this_host_that_reads_nothing_is_not_lost():
    """For longer than the limit, which is 2.5 s here."""
    with connected("127.0.0.1") as (client, server):
        give_up_on_host(client.getpeername()[1], 0.0)
        client.setblocking(False)
        sent_bytes = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent_bytes += client.send(bytes(1024))
        time.sleep(7.0)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        client.close()
        assert sum(len(part) for part in iter(lambda: server.recv(4096), b"")) == sent_bytes


@pytest.mark.parametrize(
    ("family", "address"),
    [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "127.0.0.2"),
        (socket.AF_INET6, "::1"),
        (socket.AF_INET6, "::ffff:127.0.0.2"),
    ],
)
def test_both_ends_are_here(family, address):
    with connected(address, family) as (client, server):
        assert stays_here(client)
        assert stays_here(server)


@pytest.mark.parametrize(
    ("here", "there", "stays"),
    [
        ("10.0.0.5", "10.0.0.5", True),
        ("10.0.0.5", "10.0.0.6", False),
        ("::ffff:10.0.0.5", "::ffff:10.0.0.6", False),
        ("fe80::1%eth0", "fe80::1%eth0", True),
        ("fe80::1%eth0", "fe80::2%eth0", False),
    ],
)
def test_an_end_on_another_host(here, there, stays):
    class Connection:
        def getsockname(self):
            return here, 1

        def getpeername(self):
            return there, 2

    assert stays_here(Connection()) == stays
