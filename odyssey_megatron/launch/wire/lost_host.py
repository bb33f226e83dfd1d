"""Notices that the host at the other end of a connection is gone: it has lost power, or the network fails.

Nothing arrives then that would end a wait. The kernel can be told to ask the other host (TCP keepalive) and to give up.
A kernel also answers for a process that is only stopped, until what is sent to that one fills its buffer. A buffer that
stays full for the time limit ends a connection like a host that is gone. So connections within a host have no limit:
the end of a process closes them. Those to another host may have it, as an agent there waits for no longer for a job's
host that is stopped (``leases.HostOfJob``).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address

COMES_BACK_S = 2.5
"""Seconds beyond a lease that the others wait for the job's host, without which the job is over: a suspended host may
come back, and so may its network. All have ended within 5 s beyond the lease.
"""
_ASK_EVERY_S = 1  # the smallest value that the kernel accepts
_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44  # <linux/tcp.h>; the second one from Linux 6.15 on


def give_up_after(connection: socket.socket, lease_s: float) -> None:
    """Have waits on ``connection`` fail once the kernel at its other end has not answered for a lease and
    :data:`COMES_BACK_S`.

    Within the lease alone, two lost packets would be enough on an idle connection, and jobs have thousands of these.
    What was sent is repeated every 0.2 s at first, and every second later. With pauses that double from the start, as
    is TCP's default, a lease of 3 s would run out though the network is back after half of it.

    The kernel rounds the time up to whole seconds. Sockets that a listening one accepts inherit this.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _ASK_EVERY_S),
        (socket.TCP_KEEPINTVL, _ASK_EVERY_S),
        (socket.TCP_USER_TIMEOUT, int((lease_s + COMES_BACK_S) * 1e3)),
        (_TCP_THIN_LINEAR_TIMEOUTS, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)


def give_up_on_host(port: int, lease_s: float) -> None:
    """:func:`give_up_after` for all connections of this process to a server's ``port`` on another host."""
    for connection in connections_to(port):
        if not stays_here(connection):
            give_up_after(connection, lease_s)


def stays_here(connection: socket.socket) -> bool:
    """Whether both ends of ``connection`` are on this host."""
    here, there = (
        ip_address(one()[0].split("%")[0]) for one in (connection.getsockname, connection.getpeername)
    )
    plain = there.ipv4_mapped or there if isinstance(there, IPv6Address) else there
    return here == there or plain.is_loopback


def connections_to(port: int) -> Iterator[socket.socket]:
    """Yield this process's connections to a server's ``port``, as duplicates that are closed after each is used."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port:
                    yield one
