"""The libraries that groups are connected with: gloo between hosts, NCCL between GPUs.

On GPUs both: the group of all members lies between hosts (``rebuild/hosts.py``); with ``--odyssey-backend
gloo`` all do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.groups import Channel
from odyssey_megatron.rebuild import hosts
from odyssey_megatron.rebuild.abort import Abort, NcclAbort, Use
from odyssey_megatron.rebuild.abort_gloo import GlooAbort
from odyssey_megatron.rebuild.kept import Spare
from odyssey_megatron.rebuild.rendezvous import ByKey, Rendezvous

T = TypeVar("T")

Connect = Callable[[Any, int, int, Channel | None], Any]
"""(store, index in the group, size, see ``plan.groups.way_of``) -> torch's backend. Every rank of the group must call
it; returns connected.
"""

_TYPES = dist.ProcessGroup.BackendType
_LOOK_S = 0.001


class Library(Protocol):
    """One of them. ``device``, ``kind`` and ``type`` are what torch calls it. ``staged``: it connects hosts, and is
    given tensors of devices all the same (``hosts.StagedGroup``).
    """

    staged: bool
    lingers: bool
    """Some operation may be left in a group for a while after its end."""
    device: str
    kind: str
    type: Any

    @property
    def rendezvous(self) -> Callable[[dist.Store, str, int, int, Abort], dist.Store]:
        """Of a group, for its connector: the job's store, what the group's keys begin with, index, size."""

    @property
    def spare(self) -> Spare | None:
        """What has outlived the generations so far; None where nothing does."""

    def new_abort(self) -> Abort:
        """For the groups of one generation."""

    def connector(self, abort: Abort) -> Connect:
        """Makes backends that end with ``abort``."""

    def build_all(self, builders: Mapping[str, Callable[[], T]], abort: Abort) -> dict[str, T]:
        """What each builder returns, of groups by name. Raises what ``abort`` raises once fired."""


class Gloo:
    """Implements Library."""

    device, kind, type = "cpu", "gloo", _TYPES.GLOO
    rendezvous = Rendezvous
    spare, lingers = None, True

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
        # Side by side is no faster. The same order everywhere, or ranks would wait for one another in different groups.
        return {name: builders[name]() for name in sorted(builders)}


class Hosts(Gloo):
    """gloo beside another library, for groups of any size."""

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
    """Implements Library. Not run in this project's tests, which have no GPU; ``tests/strict`` has its rules."""

    device, kind, type = "cuda", "nccl", _TYPES.NCCL
    staged = lingers = False
    rendezvous = ByKey

    def __init__(self, config: OdysseyConfig):
        self._config = config
        # Of the thread that trains: others, such as those that build an offered generation, begin with device 0.
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
            # Connect now, while the peers do, and not inside the first message of a step.
            backend.eager_connect_single_device(self._device)
            abort.connected(backend, may_be_given=False)
            if way is not None:
                self._first_message(backend, rank, way)
            abort.connected(backend)
            return backend

        return connect

    def _first_message(self, backend: Any, rank: int, way: Channel) -> None:
        """What messages need NCCL connects with the first one, in whose call the hosts wait for each other: programs,
        which post receives ahead of what they send, would wait for ever. What collectives need comes with the first of
        each kind, where all are taken to wait for one another anyway (``plan/queue.py``).
        """
        # On a stream that waits for none of them: threads send others there meanwhile, in an order of their own.
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
        # Side by side: none waits for another, and together they take as long as the longest.
        assert isinstance(abort, NcclAbort)
        return abort.side_by_side(builders)


def comes_first(way: Channel | None) -> bool:
    """Whether a communicator is of those whose kernels come before others: the messages of lower ranks to higher ones.

    What counts is that the two ways between neighbours never share a stream. torch has 32 of each priority and gives
    them to communicators in turn (2.13, ``c10/cuda/CUDAStream.h``), while some of these outlive failures. Were each way
    in one stream with the other on both sides, both would wait to receive, and nobody could send.
    """
    return way == (0, 1)


def _gloo_device() -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not interface and os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost", "::1"):
        interface = "lo"  # by the host's name, as is gloo's default, it might listen on an outside address
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()
