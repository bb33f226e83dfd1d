"""What people on an agent's machine ask it for while the job runs (``odyssey readmit``).

They reach it by a datagram socket that has a name and no file: the name ends with the agent, and nothing is left
behind. A job on one node draws its secret itself, so people cannot show it; but the kernel says of each message which
user has sent it. The agent hears those who could signal its processes anyway: its own user, and root. Any user can take
the name once the agent is gone, so that who asks looks at the user of the answer, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from odyssey_megatron.codec import from_json, to_json
from odyssey_megatron.errors import ConfigError

_ANSWERS_WITHIN_S = 10.0
_AT_ONCE = 8
"""The most requests that are read in one go, so that nobody keeps an agent from its ranks by asking."""
_MOST_BYTES = 4096
_CREDENTIALS = struct.Struct("iII")
"""``struct ucred`` of unix(7): pid, uid, gid."""
_FOREIGN = "the job is another user's. Do it as the user who has started the job."


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """To start a rank again that was given up, since its GPU works again."""

    rank: int
    gpu: int | None
    """The number of the GPU on the node, where that is not clear from the rank."""
    until_s: float
    """When nobody waits for an answer any more, by this machine's monotonic clock: it then counts for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    done: bool
    says: str


class Requests:
    """The agent's side. All methods are to be called by one thread; none waits."""

    def __init__(self, job: str, node: int):
        """``job``: the name that is on each line of the job's journal."""
        self._name = _name(job, node)
        self._socket = self._listening()

    def answer(self, do: Callable[[Request], str]) -> None:
        """Answer what has been asked since the last call.

        Args:
            do: Does what a request asks for, and returns what to tell who has asked. It raises ConfigError for what
                cannot be.
        """
        self._socket = self._socket or self._listening()
        if self._socket is None:
            return
        for _ in range(_AT_ONCE):
            try:
                text, uid, who = _receive(self._socket, socket.MSG_DONTWAIT)
            except OSError:
                return
            if (found := _answered(text, uid, do)) is not None:
                with contextlib.suppress(OSError):  # who has asked has gone, or does not read
                    self._socket.sendto(to_json(found).encode(), socket.MSG_DONTWAIT, who)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _listening(self) -> socket.socket | None:
        """Return the socket; None while a stopped agent of the same node, which this one has replaced, has its name."""
        with contextlib.suppress(OSError):
            return _socket(self._name)
        return None


def _answered(text: bytes, uid: int, do: Callable[[Request], str]) -> _Answer | None:
    if uid not in (0, os.getuid()):
        return _Answer(done=False, says=_FOREIGN)
    try:
        request = from_json(Request, text)
    except ValueError as error:
        return _Answer(done=False, says=f"this job's agent is of another version: {error}")
    if time.monotonic() > request.until_s:
        return None
    try:
        return _Answer(done=True, says=do(request))
    except ConfigError as error:
        return _Answer(done=False, says=str(error))


def ask(
    job: str,
    node: int,
    rank: int,
    gpu: int | None,
    *,
    owner: int | None = None,
    within_s: float = _ANSWERS_WITHIN_S,
) -> str:
    """Ask the agent of ``node`` of ``job``, on this machine, to start ``rank`` again; return what it says.

    Args:
        owner: The user that has written the agent's journal, who is believed, as are root and the user of this process:
            root may ask for a job of anybody.

    Raises:
        ConfigError: It cannot be, another user has answered, or nobody within ``within_s`` seconds.
        ConnectionRefusedError: There is no such agent here.
    """
    ends_s = time.monotonic() + within_s
    request = Request(rank=rank, gpu=gpu, until_s=ends_s)
    with contextlib.closing(_socket("")) as own:
        own.settimeout(within_s)
        try:
            own.connect(_name(job, node))  # only its messages are taken from now on
            own.send(to_json(request).encode())
            text, uid, _ = _receive(own)
        except TimeoutError:
            raise ConfigError(
                f"the agent of node {node} has not answered for {within_s:g} s, so nothing is done. It may be stopped, "
                "or its machine very busy: try again."
            ) from None
    if uid not in (0, os.getuid(), owner):
        raise ConfigError(
            f"user {uid} has answered in the place of the agent of node {node}, and is not believed: that is neither "
            f"root, nor you (user {os.getuid()}), nor whose file the agent's journal is. The agent has probably ended; "
            "look whether the job still runs. If it is that user's, do it as the user who has started it."
        )
    try:
        found = from_json(_Answer, text)
    except ValueError as error:
        raise ConfigError(f"the agent of node {node} is of another version: {error}.") from None
    if not found.done:
        raise ConfigError(found.says)
    return found.says


def _name(job: str, node: int) -> str:
    return f"\0odyssey/{job}/agent{node}"


def _socket(name: str) -> socket.socket:
    """Return a socket with this name; "": the kernel makes one up."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        found.bind(name)
    except BaseException:
        found.close()
        raise
    return found


def _receive(own: socket.socket, flags: int = 0) -> tuple[bytes, int, str]:
    """Return the next message, the user id of the process that has sent it, and the name of its socket."""
    text, more, _, who = own.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size), flags)
    for level, kind, data in more:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            _, uid, _ = _CREDENTIALS.unpack(data)
            return text, uid, who
    raise ConnectionError("a message that does not say who has sent it")
