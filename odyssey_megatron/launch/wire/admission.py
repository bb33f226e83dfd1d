"""How the agents of several nodes meet: a door that asks for the job's secret, and a store behind it.

torch's store has no authentication: whoever reaches it can fill it, empty it, or play back what he has recorded. So it
listens on one address, and the kernel drops all packets from hosts that are not admitted, before there is a connection.
A host is admitted when its agent proves at the door that it knows the secret, without sending it. There the agent
learns the port of the store, and the session: a random number for each job, with which everything is sealed, so that
what was recorded in one job is worth nothing in another.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import hmac
import json
import math
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from itertools import groupby
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    c10d_rendezvous_backend,
    rendezvous_handler_registry,
)

from odyssey_megatron import __version__
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.launch.wire.local_rendezvous import FixedRendezvous
from odyssey_megatron.launch.wire.lost_host import give_up_after, give_up_on_host
from odyssey_megatron.metrics.outlet import say

BACKEND = "odyssey-nodes"
OTHER_TOKEN = (
    "the nodes have different secrets, so they cannot work together. Set the variable ODYSSEY_TOKEN to the same "
    "value on all nodes."
)
_NOBODY_CAME = (
    "nobody who hosts this job answered at {host}:{port} within {limit_s:.0f} s. Start {who}, and look whether that "
    "address is its own."
)
_WAITS = (
    "[odyssey] nobody who hosts this job answers at {host}:{port} yet ({error}); waiting for {who}, {limit_s:.0f} s "
    "at most."
)
_NO_SUCH_NAME = " Is that name spelled right ({option})?"
_NOT_OURS = (
    "this host, where the job's nodes are to meet, cannot listen at {host}:{port}: {error}. Give another port "
    "(--master-port, or that of --odyssey-job-host), or with --odyssey-bind the address of the interface of this host "
    "that the others reach."
)
_UNLIKE = (
    "{flag} is {ours} here, and {theirs} where the job is hosted ({host}:{port}). Start all of its nodes with the "
    "same."
)
_VERSION = "the version of odyssey-megatron"
_ONLY_HERE = (
    "[odyssey] {host}, where the job's nodes are to meet, is {address} on this machine (/etc/hosts), which no other "
    "one reaches. Name it by the address that all reach it at ({option})."
)
_MEET_S = 600.0
"""How long nodes wait for the first one; torchrun's own limit."""
_SAYS_AFTER_S = 5.0
"""After this time of waiting for the host it is said: it may start a little later than this node."""
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_ANSWER_BYTES = 2**16
"""How much is read of a door's answer. Its own is much shorter; whoever sends more is somebody else."""
_ASKED_AT_ONCE, _ASKED_FOR_S = 256, 2.0
"""The largest number of strangers at the door (the one there longest makes room), and how long each may stay, and
waits there for the answer.
"""
_BREATH_S = 0.005
"""The pause between two looks at the door, so that a crowd there does not take a processor from the coordinator."""
_NO, _TOLD = b"no", 16
"""The answer to another token, and the largest number of refused hosts that the user is told of."""
_NO_ROOM = (
    "[odyssey] the node at {host} cannot be let in: the kernel has no room for a longer list of hosts ({error}). Here, "
    "where the job's nodes meet, 'sysctl -w net.core.optmem_max=1048576' makes some."
)
_SO_ATTACH_FILTER = 26  # <asm-generic/socket.h>


@functools.cache
def version_here() -> str:
    """Return this package's version, with a digest of its sources: two commits of one version may not understand each
    other.
    """
    root, found = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.is_file() and not path.name.startswith("."):  # such names are of open files, by their editors
            source = path.read_bytes()
            found.update(f"{path.relative_to(root).as_posix()}\0{len(source)}\0".encode() + source)
    return f"{__version__} (sources {found.hexdigest()[:12]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and how nodes meet, as the command line says it."""

    host: str
    port: int
    node: int
    nodes: int
    token: str
    bind: str
    """The address to listen on. "": that of ``host``."""
    lease_s: float
    hosts: bool
    """Whether door and store are in this process: the first node's agent, or ``odyssey host``."""
    is_apart: bool = False
    """Whether the job has an ``odyssey host``, so that all nodes knock at its door."""
    observes: bool = False
    """Whether Odyssey only looks on: then ranks do not wait for one another where others do."""
    version: str = field(default_factory=version_here)

    @property
    def option(self) -> str:
        """The option that says where the nodes meet."""
        return "--odyssey-job-host" if self.is_apart else "--master-addr"

    @property
    def common(self) -> dict[str, str]:
        """What must be the same on all machines, since agents understand, judge or await each other by it."""
        return {
            _VERSION: self.version,
            "--nnodes": f"{self.nodes}",
            "--odyssey-node-lease-s": f"{self.lease_s:g}",
            "--odyssey": "observe" if self.observes else "recover",
        }


class Admission(FixedRendezvous):
    """torch elastic's rendezvous. The process that hosts the job has the door and the store; the others knock."""

    def __init__(self, meeting: Meeting):
        super().__init__(BACKEND, run_id="odyssey")
        self._meeting = meeting
        self._store: Any = None
        self._address: RendezvousStoreInfo | None = None
        self.token = ""
        """The secret of the session, once there is one."""

    def next_rendezvous(self) -> RendezvousInfo:
        meeting = self._meeting
        if self._store is None:
            host, port = self._open() if meeting.hosts else (meeting.host, self._knock())
            self._address = RendezvousStoreInfo(master_addr=host, master_port=port)
        assert self._address is not None
        return RendezvousInfo(self._store, meeting.node, meeting.nodes, self._address)

    def _open(self) -> tuple[str, int]:
        """Open door and store, and return where this host itself reaches the store."""
        meeting, session = self._meeting, secrets.token_hex(_NONCE_BYTES)
        self.token = session_token(meeting.token, session)
        where = {"host": meeting.bind or meeting.host, "port": meeting.port}
        try:
            family, own = _resolve(meeting.bind or meeting.host)
            _, named = _resolve(meeting.host)
        except OSError as error:
            raise ConfigError(_NOT_OURS.format(**where, error=error)) from None
        only_here = ip_address(named).is_loopback and meeting.host not in (named, "localhost")
        if only_here and not meeting.bind:
            say(_ONLY_HERE.format(host=meeting.host, address=named, option=meeting.option))
        try:
            door = _listen(family, own, meeting.port)
            inside = _listen(family, own, 0)
        except OSError as error:
            raise ConfigError(_NOT_OURS.format(**where, error=error)) from None
        give_up_after(inside, meeting.lease_s)
        hosts = _Hosts(inside, family)
        hosts.admit({own, named, "127.0.0.1" if family == socket.AF_INET else "::1"})
        port, reached = int(inside.getsockname()[1]), own if only_here else meeting.host
        self._store = dist.TCPStore(
            reached, port, None, True, timedelta(seconds=_MEET_S), wait_for_workers=False,
            master_listen_fd=inside.detach(),
        )  # fmt: skip
        secret = {"session": session, "port": port, **meeting.common}
        keeper = _Doorkeeper(door, meeting.token, secret, hosts.admit)
        threading.Thread(target=keeper.run, name="odyssey-door", daemon=True).start()
        return reached, port

    def _knock(self) -> int:
        meeting, ends_s = self._meeting, time.monotonic() + _MEET_S
        who = "odyssey host there" if meeting.is_apart else "the first node with --node-rank 0"
        where = {"host": meeting.host, "port": meeting.port, "limit_s": _MEET_S, "who": who}
        says_s = ends_s - _MEET_S + _SAYS_AFTER_S
        while True:
            try:
                found = ask(meeting.host, meeting.port, meeting.token)
                break
            except OSError as error:
                if time.monotonic() > ends_s:
                    raise ConfigError(_NOBODY_CAME.format(**where)) from None
                if time.monotonic() > says_s:
                    says_s = math.inf
                    hint = _NO_SUCH_NAME if error.errno == socket.EAI_NONAME else ""
                    say(_WAITS.format(**where, error=error) + hint.format(option=meeting.option))
                time.sleep(0.1)
        for flag, ours in meeting.common.items():
            if (theirs := found.get(flag, "an older one")) != ours:
                raise ConfigError(
                    _UNLIKE.format(flag=flag, ours=ours, theirs=theirs, host=meeting.host, port=meeting.port)
                )
        self.token = session_token(meeting.token, found["session"])
        self._store = dist.TCPStore(
            meeting.host, found["port"], None, False, timedelta(seconds=_MEET_S), wait_for_workers=False
        )
        give_up_on_host(found["port"], meeting.lease_s)  # it may vanish before all nodes have come
        return int(found["port"])


def register(meeting: Meeting) -> None:
    """Make ``--rdzv-backend odyssey-nodes`` known to torch."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        return Admission(meeting)

    rendezvous_handler_registry.register(BACKEND, create)


def hosted_store(host: str, port: int, bind: str = "", **options: Any) -> dist.TCPStore:
    """Return a store of torch's, hosted here, that listens on one address only: ``bind``, or else that of ``host``.

    Raises:
        DistNetworkError: The address or port is not available.
    """
    try:
        listener = _listen(*_resolve(bind or host), port)
    except OSError as error:
        raise dist.DistNetworkError(_NOT_OURS.format(host=bind or host, port=port, error=error)) from error
    return dist.TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), **options)


def bind_c10d(bind: str) -> None:
    """Make the store of torch's own rendezvous, ``--rdzv-backend c10d``, listen on one address only, too."""

    def store(host: str, port: int, *, is_master: bool, **options: Any) -> dist.TCPStore:
        if is_master:
            return hosted_store(host, port, bind, **options)
        return dist.TCPStore(host, port, is_master=False, **options)

    c10d_rendezvous_backend.TCPStore = store  # type: ignore[misc, assignment]


def session_token(token: str, session: str) -> str:
    """Return the secret of one job, the one with ``session``, among the jobs with ``token``."""
    return hmac.new(token.encode(), f"odyssey session {session}".encode(), hashlib.sha256).hexdigest()


def ask(host: str, port: int, token: str) -> dict[str, Any]:
    """Return what the door tells those who know the token.

    Each side draws a random number that the other side's proof must cover, so that no recording convinces either.

    Raises:
        ConfigError: The tokens differ.
        OSError: Nobody answers, or the answer is not that of this job's door.
    """
    with socket.create_connection((host, port), timeout=_ASKED_FOR_S) as line:
        ends_s = time.monotonic() + _ASKED_FOR_S
        theirs, ours = _receive(line, _NONCE_BYTES, ends_s), secrets.token_bytes(_NONCE_BYTES)
        if len(theirs) < _NONCE_BYTES:
            raise ConnectionError("sent away")
        line.sendall(ours + _proof(token, b"knock", theirs, ours))
        answer = _receive(line, _ANSWER_BYTES, ends_s)
    if answer == _NO:
        raise ConfigError(OTHER_TOKEN)
    proof, text = answer[:_PROOF_BYTES], answer[_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"open", theirs, ours, text)):
        raise ConnectionError("not this job's door")
    opened: dict[str, Any] = json.loads(text)
    return opened


class _Doorkeeper:
    """Asks everybody at the door for a proof. Whoever gives it is told ``secret``, and his host is admitted."""

    def __init__(self, door: socket.socket, token: str, secret: dict[str, Any], admit: Any):
        self._door, self._token, self._admit = door, token, admit
        self._secret = json.dumps(secret).encode()
        self._asked: dict[socket.socket, tuple[float, bytes, bytes]] = {}  # since when, our number, what came
        self._told: set[str] = set()
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        self._door.setblocking(False)
        self._selector.register(self._door, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(_ASKED_FOR_S):
                one = key.fileobj
                try:
                    self._welcome() if one is self._door else self._hear(one)  # type: ignore[arg-type]
                except OSError:
                    if one is not self._door:
                        self._send_away(one)  # type: ignore[arg-type]
            now_s = time.monotonic()
            for one in [one for one, (since_s, *_) in self._asked.items() if now_s - since_s > _ASKED_FOR_S]:
                self._send_away(one)
            time.sleep(_BREATH_S)

    def _welcome(self) -> None:
        for _ in range(_ASKED_AT_ONCE // 4):
            try:
                line, _ = self._door.accept()
            except BlockingIOError:
                return
            if len(self._asked) >= _ASKED_AT_ONCE:
                self._send_away(next(iter(self._asked)))
            line.setblocking(False)
            ours = secrets.token_bytes(_NONCE_BYTES)
            self._asked[line] = (time.monotonic(), ours, b"")
            self._selector.register(line, selectors.EVENT_READ)
            with contextlib.suppress(OSError):
                line.send(ours)

    def _hear(self, line: socket.socket) -> None:
        if line not in self._asked:
            return  # it was sent away a moment ago to make room
        since_s, ours, heard = self._asked[line]
        part = line.recv(_NONCE_BYTES + _PROOF_BYTES - len(heard))
        heard += part
        self._asked[line] = (since_s, ours, heard)
        if part and len(heard) < _NONCE_BYTES + _PROOF_BYTES:
            return
        theirs, proof = heard[:_NONCE_BYTES], heard[_NONCE_BYTES:]
        if hmac.compare_digest(proof, _proof(self._token, b"knock", ours, theirs)):
            host = line.getpeername()[0]
            try:
                self._admit({host})
            except OSError as error:
                self._tell(host, _NO_ROOM.format(host=host, error=error))
                raise
            line.send(_proof(self._token, b"open", ours, theirs, self._secret) + self._secret)
        elif len(heard) == _NONCE_BYTES + _PROOF_BYTES:
            line.send(_NO)
            host = line.getpeername()[0]
            self._tell(
                host, f"[odyssey] a node at {host} has another secret (ODYSSEY_TOKEN), and is not let in."
            )
        self._send_away(line)

    def _tell(self, host: str, why: str) -> None:
        if host not in self._told and len(self._told) < _TOLD:
            self._told.add(host)
            say(why)

    def _send_away(self, line: socket.socket) -> None:
        if self._asked.pop(line, None) is not None:
            self._selector.unregister(line)
        line.close()


class _Hosts:
    """The hosts whose packets reach a listening socket. The kernel drops packets from all others."""

    def __init__(self, listener: socket.socket, family: int):
        self._listener, self._family = listener.dup(), family
        self._admitted: set[str] = set()

    def admit(self, addresses: Iterable[str]) -> None:
        """Let packets from ``addresses`` pass, too. Raises OSError if the kernel has no room for the longer list."""
        admitted = self._admitted | set(addresses)
        program = _only_from(sorted(admitted), self._family)
        code = ctypes.create_string_buffer(program)
        address = struct.pack("HL", len(program) // 8, ctypes.addressof(code))
        self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, address)
        # Only now: a host for which there was no room must not stay in the list, or no other could be admitted.
        self._admitted = admitted


_LOAD, _KEEP, _TAKE, _IS, _SKIP, _RETURN = 0x20, 0x02, 0x60, 0x15, 0x05, 0x06
"""BPF_LD|W|ABS, BPF_ST, BPF_LD|MEM, BPF_JMP|JEQ|K, BPF_JMP|JA, BPF_RET|K."""
_PACKET = 0xFFF00000
"""SKF_NET_OFF: the offset at which a packet's network header begins."""
_FAR = 255
"""The largest number of steps that a comparison can skip."""


def _only_from(addresses: list[str], family: int) -> bytes:
    """Return a classic BPF program that lets packets from these source addresses pass.

    The kernel limits its length (net.core.optmem_max): until Linux 6.6 to about 1200 of these steps.
    """
    # The number of 32-bit words in an address, and the offset of the source address in the header.
    count, offset = (1, 12) if family == socket.AF_INET else (4, 8)
    # A link-local address of IPv6 has the name of an interface behind a "%". Packets do not.
    plain = {socket.inet_pton(family, address.partition("%")[0]) for address in addresses}
    words = [struct.unpack(f"!{count}I", one) for one in plain]
    steps = list[_Step]()
    for index in range(count):
        steps += [(_LOAD, 0, 0, _PACKET + offset + 4 * index), (_KEEP, 0, 0, index)]
    steps += [*_passes(sorted(words), 0), (_RETURN, 0, 0, 0)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


_Step = tuple[int, int, int, int]
"""(operation, steps to skip if a comparison holds, steps to skip if not, value)."""


def _passes(addresses: list[tuple[int, ...]], index: int) -> list[_Step]:
    """Return steps that let a packet pass if the words from ``index`` on are one of ``addresses``, which are sorted.

    Addresses that differ only in the last word take one step each.
    """
    steps: list[_Step] = [(_TAKE, 0, 0, index)]
    if len(addresses[0]) == 1:
        for at in range(0, len(addresses), _FAR):
            some = addresses[at : at + _FAR]
            steps += [(_IS, len(some) - place, 0, word) for place, (word,) in enumerate(some)]
            steps += [(_SKIP, 0, 0, 1), (_RETURN, 0, 0, 0xFFFFFFFF)]
        return steps
    for word, group in groupby(addresses, key=lambda one: one[0]):
        rest = _passes([one[1:] for one in group], index + 1)
        steps += [(_IS, 1, 0, word), (_SKIP, 0, 0, len(rest) + 1), *rest, (_TAKE, 0, 0, index)]
    return steps


def _proof(token: str, *parts: bytes) -> bytes:
    return hmac.new(token.encode(), b"odyssey door\0" + b"\0".join(parts), hashlib.sha256).digest()


def _receive(line: socket.socket, size: int, ends_s: float) -> bytes:
    """Return the next ``size`` bytes, or fewer if the other side sends no more. Raises TimeoutError at ``ends_s``."""
    found = bytearray()
    while len(found) < size:
        if (left_s := ends_s - time.monotonic()) <= 0:
            raise TimeoutError(f"no whole answer within {_ASKED_FOR_S:g} s")
        line.settimeout(left_s)  # it begins again with each part
        if not (part := line.recv(size - len(found))):
            break
        found += part
    return bytes(found)


def _resolve(host: str) -> tuple[int, str]:
    """Return (address family, address) of a host's name."""
    family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return family, str(address[0])


def _listen(family: int, host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=family, backlog=4096)
