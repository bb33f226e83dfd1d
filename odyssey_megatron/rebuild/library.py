"""The libraries that connect groups: gloo between hosts, NCCL between GPUs.

A job on GPUs uses both: the group of all members connects hosts (``rebuild/hosts.py``), the others connect GPUs. With
``--odyssey-backend gloo`` all groups connect hosts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.placing.groups import Channel
from odyssey_megatron.rebuild import hosts
from odyssey_megatron.rebuild.abort import Abort, NcclAbort, Use
from odyssey_megatron.rebuild.abort_gloo import GlooAbort
from odyssey_megatron.rebuild.kept import Spare
from odyssey_megatron.rebuild.rendezvous import ByKey, Rendezvous

T = TypeVar("T")

Connect = Callable[[Any, int, int, Channel | None], Any]
"""A function (store, index in the group, size, way) -> torch's backend, connected. Every rank of a group must call it.

The way is the direction of a channel's messages (``plan.placing.groups.way_of``).
"""

_TYPES = dist.ProcessGroup.BackendType
_LOOK_S = 0.001


class Library(Protocol):
    """A library that connects groups. ``device``, ``kind`` and ``type`` are torch's names for it."""

    staged: bool
    """Whether it connects hosts, but is given tensors on devices (``hosts.StagedGroup``)."""
    device: str
    kind: str
    type: Any

    @property
    def rendezvous(self) -> Callable[[dist.Store, str, int, int, Abort], dist.Store]:
        """A function that makes the store of a group, for its connector.

        It takes the job's store, the prefix of the group's keys, this rank's index in the group, the group's size, and
        the abort that ends waits.
        """

    @property
    def spare(self) -> Spare | None:
        """The communicators that have outlived a generation. None if this library keeps none."""

    def new_abort(self) -> Abort:
        """Return a new abort for the groups of one generation."""

    def connector(self, abort: Abort) -> Connect:
        """Return a function that makes backends, which end with ``abort``."""

    def build_all(self, builders: Mapping[str, Callable[[], T]], abort: Abort) -> dict[str, T]:
        """Return the result of each builder, by the name of its group. Raises what ``abort`` raises once fired."""


class Gloo:
    """gloo, between hosts. Implements Library."""

    device, kind, type = "cpu", "gloo", _TYPES.GLOO
    rendezvous = Rendezvous
    spare = None

    def __init__(self, config: OdysseyConfig):
        self._config, self.staged = config, config.device != "cpu"

    def new_abort(self) -> Abort:
        return GlooAbort(timedelta(seconds=self._config.op_timeout_s))

    def connector(self, abort: Abort) -> Connect:
        # One device (a listening socket and a loop thread) for all groups of the generation.
        device = _gloo_device()

        def connect(store: dist.Store, rank: int, size: int, way: Channel | None) -> Any:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # its stub lacks this one
            options._devices = [device]
            options._threads = 2
            # The constructor waits five times this long for a peer that dies while it connects.
            options._timeout = timedelta(seconds=self._config.build_timeout_s)
            backend = dist.ProcessGroupGloo(store, rank, size, options)
            backend._set_default_timeout(timedelta(seconds=self._config.op_timeout_s))
            backend._set_sequence_number_for_group()
            return backend

        return connect

    def build_all(self, builders: Mapping[str, Callable[[], T]], abort: Abort) -> dict[str, T]:
        # Building side by side is no faster. The order is the same on all ranks, or they would wait for one another in
        # different groups.
        return {name: builders[name]() for name in sorted(builders)}


class Hosts(Gloo):
    """gloo beside another library, for groups of any size: those of more than ``hosts.FAN`` ranks become trees."""

    def connector(self, abort: Abort) -> Connect:
        connect = super().connector(abort)

        def grow(store: Rendezvous, rank: int, size: int, way: Channel | None) -> Any:
            if size <= hosts.FAN:
                return connect(store, rank, size, way)
            parts = []
            for members in hosts.groups_of(rank, size):
                index, name = members.index(rank), f"{members.step}.{members.start}"
                parts.append(connect(store.part(name, index, len(members)), index, len(members), None))
            return hosts.Tree(rank, size, parts)

        return grow


class Nccl:
    """NCCL, between GPUs. Implements Library.

    Not run in this project's tests, which have no GPU; ``tests/strict`` has its rules.
    """

    device, kind, type = "cuda", "nccl", _TYPES.NCCL
    staged = False
    rendezvous = ByKey

    def __init__(self, config: OdysseyConfig):
        self._config = config
        # The device of the training thread. Other threads, such as those that build an offered generation, begin with
        # device 0.
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._beside: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.spare = Spare()

    def new_abort(self) -> Abort:
        return NcclAbort(torch.ones((), pin_memory=True))

    def connector(self, abort: Abort) -> Connect:
        assert isinstance(abort, NcclAbort)

        def connect(store: dist.Store, rank: int, size: int, way: Channel | None) -> Any:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self._config.op_timeout_s)
            options.is_high_priority_stream = comes_first(way)
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
            abort.adopt(backend, Use())
            # Connect now, while the peers do, rather than in the first message of a step.
            backend.eager_connect_single_device(self._device)
            abort.connected(backend, may_be_given=False)
            if way is not None:
                self._first_message(backend, rank, way)
            abort.connected(backend)
            return backend

        return connect

    def _first_message(self, backend: Any, rank: int, way: Channel) -> None:
        """Send or receive one number, so that NCCL connects what messages need.

        NCCL does that in the call of the first message, in which the hosts wait for each other. Programs post receives
        ahead of their sends, so they would wait for ever there. What collectives need is connected in the first one of
        each kind, and all ranks are taken to wait for one another there anyway (``plan/checking/queue.py``).
        """
        # These messages have a stream of their own. Other threads send such messages at the same time, each in its own
        # order, so the host waits for the work and not for the stream.
        with torch.cuda.device(self._device), torch.cuda.stream(self._beside):
            nothing = torch.zeros(1, device=self._device)
            source, target = way
            work = (
                backend.send([nothing], target, 0) if rank == source else backend.recv([nothing], source, 0)
            )
            while not work.is_completed():
                time.sleep(_LOOK_S)
            if error := work.exception():
                raise RuntimeError(str(error))

    def build_all(self, builders: Mapping[str, Callable[[], T]], abort: Abort) -> dict[str, T]:
        # Side by side no builder waits for another, and all together take as long as the longest.
        assert isinstance(abort, NcclAbort)
        return abort.side_by_side(builders)


def comes_first(way: Channel | None) -> bool:
    """Return whether a communicator gets a stream of high priority: those for messages from lower to higher ranks do.

    The purpose is that the two ways between neighbours never share a stream. torch has 32 streams of each priority and
    gives them to communicators in turn (2.13, ``c10/cuda/CUDAStream.h``), while some communicators outlive failures. If
    the two ways shared a stream on both sides, both ranks could wait to receive, and neither could send.
    """
    return way == (0, 1)


def _gloo_device() -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not interface and os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost", "::1"):
        interface = "lo"  # gloo's default, the host's name, might make it listen on an outside address
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    if (address := _address_for_others()) is not None:
        return dist.ProcessGroupGloo.create_device(hostname=address)
    return dist.ProcessGroupGloo.create_default_device()


def _address_for_others() -> str | None:
    """Return the address from which this host reaches the job's, if its own name leads to none that others reach.

    gloo listens where the host's name leads, or on loopback if that is nowhere. Debian's /etc/hosts says 127.0.1.1.
    None if the name will do, or if the job's host is reached by loopback, too.
    """
    if (named := _named()) is not None and not ip_address(named).is_loopback:
        return None
    with contextlib.suppress(OSError, KeyError):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # sends nothing
            own = str(probe.getsockname()[0])
        return None if ip_address(own).is_loopback else own
    return None


def _named() -> str | None:
    """Return the address of this host to which its name leads, as gloo finds it: the first one that is its own."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return str(where[0])
    return None
