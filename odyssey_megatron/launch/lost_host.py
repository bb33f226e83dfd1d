"""Noticing that the host at the other end of a connection is gone: its power, its network, or ours.

Nothing arrives then that would end a wait. The kernel can be told to ask (TCP keepalive) and to give up; it answers for
a process that is only stopped, so that a frozen peer is no lost one.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_ASK_EVERY_S = 1  # the smallest that the kernel takes


def give_up_after(connection: socket.socket, limit_s: float) -> None:
    """Waits on ``connection`` fail once its other end's kernel has not answered for ``limit_s`` (whole seconds, up).

    Sockets accepted by a listening one inherit this.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _ASK_EVERY_S),
        (socket.TCP_KEEPINTVL, _ASK_EVERY_S),
        (socket.TCP_USER_TIMEOUT, int(limit_s * 1e3)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def connections_to(port: int) -> Iterator[socket.socket]:
    """This process's connections to a server's ``port``: duplicates of their descriptors, to be used at once."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port:
                    yield one
