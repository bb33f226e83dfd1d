"""Notices that the host at the other end of a connection is gone: it has lost power, or the network fails.

Nothing arrives then that would end a wait. The kernel can be told to ask the other host (TCP keepalive) and to give up.
A kernel also answers for a process that is only stopped, so that a frozen peer does not count as lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_ASK_EVERY_S = 1  # the smallest value that the kernel accepts


def give_up_after(connection: socket.socket, limit_s: float) -> None:
    """Have waits on ``connection`` fail once the kernel at its other end has not answered for ``limit_s``.

    The kernel rounds the time up to whole seconds. Sockets that a listening one accepts inherit this.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _ASK_EVERY_S),
        (socket.TCP_KEEPINTVL, _ASK_EVERY_S),
        (socket.TCP_USER_TIMEOUT, int(limit_s * 1e3)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def connections_to(port: int) -> Iterator[socket.socket]:
    """Yield this process's connections to a server's ``port``, as duplicates that are closed after each is used."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port:
                    yield one
