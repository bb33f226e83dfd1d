"""Communicators as NCCL has them, between the devices of one process.

A communicator has one stream on each device, which it may share with others. Its operations run in the order in which
they were given, messages and collectives alike, and each begins only once all ranks that it needs have come to it:
nothing is buffered, no tag sorts anything. An operation waits for what the main stream was given before it; ``wait()``
on its work makes the main stream wait, and not the host. Abort ends this rank's side: what waits then, and what comes
after it, writes garbage. It runs through, and says so: whoever is to receive it, now or later, and is not aborted
himself, takes what lies there for it.

Connecting is collective, takes its time, and cannot be ended by an abort: who connects with the dead does so for ever.
What a pair needs for its messages, and all for a collective, may be connected when it is first used: then the hosts
wait for one another in that call. That a peer has died may be noticed: its communicators' operations are said to be
completed then, while their kernels go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from odyssey_megatron.errors import Superseded
from odyssey_megatron.plan.placing.groups import Channel
from odyssey_megatron.rebuild.abort import Abort, NcclAbort, Use
from odyssey_megatron.rebuild.kept import Spare
from odyssey_megatron.rebuild.library import Connect, comes_first
from odyssey_megatron.rebuild.rendezvous import Rendezvous
from tests.strict.device import DEVICE, DeviceMemory, poison
from tests.strict.machine import Event, Machine, Stream, this_host

T = TypeVar("T")


class OrdersDiffer(Exception):
    """Two ranks of a communicator do not mean the same operation next: NCCL would hang, or mix up their data."""


@dataclass(slots=True, eq=False)
class _Step:
    """What one rank has given a communicator."""

    kind: str
    peer: int
    """Of a message the other rank in the communicator; of a broadcast its root."""
    tensors: list[torch.Tensor]
    """Bare ones: what is sent or summed in place, or written."""
    result: list[torch.Tensor]
    sizes: tuple[list[int], list[int]] = ([], [])
    """Where each rank is sent something else: how much comes from each, and goes to each."""
    began: bool = False
    done: bool = False

    @property
    def is_message(self) -> bool:
        return self.kind in ("send", "recv")

    @property
    def meant(self) -> tuple[Any, ...]:
        """The same on all ranks of a collective."""
        peer = self.peer if self.kind == "broadcast" else -1
        shapes = [one.shape for one in self.tensors] if self.kind != "alltoall" else []
        return self.kind, peer, shapes, [one.dtype for one in self.tensors]


class Work(dist._Work):
    """An operation under way."""

    def __init__(self, end: End, event: Event, *, host_waits: bool = False):
        super().__init__()
        self._end, self._event, self._host_waits = end, event, host_waits
        self._error: Exception | None = None

    def wait(self, timeout: Any = None) -> bool:
        device = self._end.memory.device
        device.main.wait(self._event)
        if self._host_waits:
            device.synchronize("barrier")
        return True

    def is_completed(self) -> bool:
        if not self._event.query() and self._end.notices_a_death:
            self._error = RuntimeError("ncclRemoteError")
        return self._error is not None or self._event.query()

    def exception(self) -> Exception | None:
        return self._error


@dataclass(slots=True, eq=False)
class Wire:
    """What the ends of one communicator share. ``lazy``: part of it is connected when it is first used."""

    name: str
    size: int
    lazy: bool
    ends: dict[int, End] = field(default_factory=dict)
    met: dict[tuple[int, ...], set[int]] = field(default_factory=dict)
    """By who is connected when it is first used who has come to that."""
    run_through: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Of how many messages (sender, receiver) an aborted end has said that they are there."""
    last: dict[int, torch.Tensor] = field(default_factory=dict)
    """What each rank was sent last, which lies there still."""
    left: dict[int, tuple[bool, int]] = field(default_factory=dict)
    """Of each rank, whether its side was clean, and how much it had been given, at the first failure that it heard of.
    """

    @property
    def connected(self) -> bool:
        return len(self.ends) == self.size


class End(dist.ProcessGroup):
    """One rank's side of a communicator."""

    def __init__(self, wire: Wire, rank: int, memory: DeviceMemory, way: Channel | None = None):
        super().__init__(rank, wire.size)
        self.wire, self.memory, self.aborted = wire, memory, False
        self.stream: Stream = memory.device.draw_stream(first=comes_first(way))
        self.steps: list[_Step] = []

    def getBackendName(self) -> str:  # torch's name
        return "strict"

    def abort(self) -> None:
        """Any thread. Before it is connected there is nothing to end."""
        self.aborted = self.aborted or self.wire.connected

    @property
    def notices_a_death(self) -> bool:
        """By now: of a peer."""
        dead = any(end.memory.device.dead for end in self.wire.ends.values())
        return dead and self.memory.device.machine.draw.random() < 0.5

    def first_message(self, way: Channel) -> None:
        source, target = way
        self._connect(*(("send", target) if self.rank() == source else ("recv", source)))

    def _connect(self, kind: str, peer: int) -> None:
        """Where an operation is the first of its kind. Raises RuntimeError if this end is aborted meanwhile."""
        if not self.wire.lazy:
            return
        own = self.rank()
        ways = {"send": (own, peer), "recv": (peer, own)}
        way = ways.get(kind, tuple(range(-1, self.size())))
        here, needed = self.wire.met.setdefault(way, set()), {*way} - {-1}
        here.add(own)
        this_host().wait(lambda: here >= needed or self.aborted)
        if not here >= needed:
            raise RuntimeError("ncclCommAbort")

    # -- torch.distributed's operations ---------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work | None:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        return self._collective(opts, "allreduce MAX" if op == dist.ReduceOp.MAX else _named(op), tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        return self._collective(opts, "broadcast", tensors, peer=opts.rootRank)

    def allgather(
        self, lists: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None
    ) -> Work | None:
        return self._collective(opts, "allgather", tensors, result=lists[0])

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work | None:
        return self._collective(opts, "gather", [tensor], result=[output])

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work | None:
        return self._collective(opts, "scatter SUM", [tensor], result=[output])

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, come: list[int], sent: list[int], opts: Any = None
    ) -> Work | None:
        return self._collective(opts, "alltoall", [tensor], result=[output], sizes=(come, sent))

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single  # torch's names before 2.13

    def _collective(self, opts: Any, kind: str, tensors: list[torch.Tensor], **others: Any) -> Work | None:
        """Nothing is returned of one that is not asynchronous: it has been waited for."""
        work = self._give(kind, tensors, **others)
        if getattr(opts, "asyncOp", True):
            return work
        work.wait()
        return None

    def barrier(self, opts: Any = None) -> Work:
        nothing = torch.ones(1, device=DEVICE)
        return self._give("allreduce SUM", [nothing], host_waits=True)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        return self._give("send", tensors, peer=peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        return self._give("recv", tensors, peer=peer)

    def _give(
        self,
        kind: str,
        tensors: list[torch.Tensor],
        *,
        peer: int = -1,
        result: list[torch.Tensor] | None = None,
        host_waits: bool = False,
        **others: Any,
    ) -> Work:
        writes = result if result is not None else [] if kind == "send" else tensors
        if kind == "broadcast" and peer == self.rank():
            writes = []
        sizes = others.get("sizes", ([], []))
        self._connect(kind, peer)
        step = _Step(kind, peer, [one.data for one in tensors], [one.data for one in writes], sizes)
        self.steps.append(step)
        device = self.memory.device
        event = self.memory.give(
            self.stream,
            f"{kind} of {self.wire.name}",
            lambda: self._done(step),
            reads=list(tensors) if kind != "recv" else [],
            writes=list(writes),
            after=others.get("after", device.main.last),
        )
        device.machine.may_stop()
        return Work(self, event, host_waits=host_waits)

    # -- when they run --------------------------------------------------------------------------------------------

    def _done(self, step: _Step) -> bool:
        """Its turn has come on this rank. All ranks that it needs do it together; the others find it done."""
        if step.done:
            return True
        step.began = True
        if self.aborted:
            for one in step.result:
                poison(one)
            step.done = True
            if step.kind == "send":
                self.wire.run_through[self.rank(), step.peer] += 1
        elif step.is_message:
            self._meet(step)
        else:
            self._together(step)
        if step.done:
            self.steps.remove(step)
        return step.done

    def _next(self) -> _Step | None:
        """What this end is in, if it is in anything."""
        first = next((one for one in self.steps if not one.done), None)
        reachable = not self.aborted and not self.memory.device.dead
        return first if first is not None and first.began and reachable else None

    def _meet(self, step: _Step) -> None:
        other = self.wire.ends[step.peer]._next()
        if other is None:
            if step.kind == "recv" and self._runs_through(step.peer, self.rank()):
                self._take_garbage(step)
            return
        mirrored = {"send": "recv", "recv": "send"}[step.kind]
        if (other.kind, other.peer) != (mirrored, self.rank()):
            if self.size() == 2:
                raise OrdersDiffer(
                    f"{self.wire.name}: rank {self.rank()} {step.kind}s, its peer {other.kind}s"
                )
            return
        source, target = (step, other) if step.kind == "send" else (other, step)
        if source.tensors[0].shape != target.tensors[0].shape:
            raise OrdersDiffer(f"{self.wire.name}: a message of {source.tensors[0].shape} for another's room")
        target.tensors[0].copy_(source.tensors[0])
        self.wire.last[source.peer] = source.tensors[0].clone()
        step.done = other.done = True

    def _runs_through(self, rank: int, peer: int) -> bool:
        """The end of ``rank`` has said that something is there which is not."""
        found = self.wire.run_through[rank, peer] > 0
        self.wire.run_through[rank, peer] -= found
        return found

    def _take_garbage(self, step: _Step) -> None:
        lies_there = self.wire.last.get(self.rank())
        for one in step.result:
            if lies_there is not None and lies_there.shape == one.shape:
                one.copy_(lies_there)
            else:
                poison(one)
        step.done = True

    def _together(self, step: _Step) -> None:
        steps = [self.wire.ends[rank]._next() for rank in range(self.size())]
        collective = [one for one in steps if one is not None and not one.is_message]
        if any(one.meant != step.meant for one in collective):
            raise OrdersDiffer(f"{self.wire.name}: {step.meant}, others {[one.meant for one in collective]}")
        if len(collective) == self.size():
            _COLLECTIVES[step.kind.partition(" ")[0]](collective)
            for one in collective:
                one.done = True


def _named(op: Any) -> str:
    for name in ("SUM", "MIN"):
        if op == getattr(dist.ReduceOp, name):
            return f"allreduce {name}"
    raise NotImplementedError(str(op))


def _sum(steps: Sequence[_Step]) -> None:
    name = steps[0].kind.partition(" ")[2]
    stacked = torch.stack([one.tensors[0] for one in steps])
    total = {"SUM": stacked.sum(0), "MAX": stacked.amax(0), "MIN": stacked.amin(0)}[name]
    for one in steps:
        one.tensors[0].copy_(total.to(one.tensors[0].dtype))


def _spread(steps: Sequence[_Step]) -> None:
    for one in steps:
        one.tensors[0].copy_(steps[one.peer].tensors[0])


def _gather(steps: Sequence[_Step]) -> None:
    for one in steps:
        for room, other in zip(one.result, steps, strict=True):
            room.copy_(other.tensors[0])


def _gather_flat(steps: Sequence[_Step]) -> None:
    for one in steps:
        for room, other in zip(one.result[0].chunk(len(steps)), steps, strict=True):
            room.copy_(other.tensors[0])


def _scatter(steps: Sequence[_Step]) -> None:
    total = torch.stack([one.tensors[0] for one in steps]).sum(0)
    for one, own in zip(steps, total.chunk(len(steps)), strict=True):
        one.result[0].copy_(own)


def _exchange(steps: Sequence[_Step]) -> None:
    sent = [one.tensors[0].split(one.sizes[1]) for one in steps]
    for rank, one in enumerate(steps):
        rooms = one.result[0].split(one.sizes[0])
        for room, other in zip(rooms, sent, strict=True):
            if room.shape != other[rank].shape:
                raise OrdersDiffer(f"{other[rank].shape} for room of {room.shape}")
            room.copy_(other[rank])


_COLLECTIVES: dict[str, Callable[[Sequence[_Step]], None]] = {
    "allreduce": _sum,
    "broadcast": _spread,
    "allgather": _gather,
    "gather": _gather_flat,
    "scatter": _scatter,
    "alltoall": _exchange,
}


class _Abort(NcclAbort):
    """Waits for the strict device in place of CUDA."""

    def __init__(self, memory: DeviceMemory):
        super().__init__(memory.pin(torch.ones(())))
        self._device = memory.device

    def fire(self) -> None:
        for end, use in self.uses.items():
            end.wire.left.setdefault(end.rank(), (use.is_clean, use.given))
        super().fire()

    def drain(self) -> None:
        self._device.synchronize("drain")


class Library:
    """Makes communicators: ``rebuild.library.Library``, as NCCL's is."""

    staged = False
    device, kind, type = "cpu", "strict", dist.ProcessGroup.BackendType.CUSTOM
    rendezvous = Rendezvous

    def __init__(self, machine: Machine, memory: DeviceMemory, wires: dict[str, Wire]):
        self._machine, self._memory, self._wires = machine, memory, wires
        self.spare = Spare()
        self.before: Callable[[], None] = lambda: None
        """Is called before anything is connected."""

    def new_abort(self) -> Abort:
        return _Abort(self._memory)

    def build_all(self, builders: Mapping[str, Callable[[], T]], abort: Abort) -> dict[str, T]:
        """Side by side: each in a thread of this rank's, which is left behind if the generation ends."""
        self.before()
        found: dict[str, T] = {}
        errors: list[Exception] = []

        def run(name: str) -> None:
            try:
                found[name] = builders[name]()
            except Exception as error:  # noqa: BLE001 - the rank's own thread raises it
                errors.append(error)

        threads = [self._machine.thread(f"connects {name}", partial(run, name)) for name in builders]
        this_host().wait(lambda: abort.fired or bool(errors) or all(one.over for one in threads))
        if abort.fired:
            raise Superseded("a newer generation exists")
        for error in errors:
            raise error
        return found

    def connector(self, abort: Any) -> Connect:
        def connect(store: Any, rank: int, size: int, way: Channel | None) -> End:
            wire = self._wires.setdefault(store.prefix, Wire(store.prefix, size, self._machine.lazy))
            end = End(wire, rank, self._memory, way)
            abort.adopt(end, Use())
            for _ in range(self._machine.draw.choice((0, 1, 5))):
                this_host().wait()  # it takes its time
            wire.ends[rank] = end
            this_host().wait(lambda: wire.connected)
            abort.connected(end, may_be_given=False)
            if way is not None:
                end.first_message(way)
            abort.connected(end)
            return end

        return connect
