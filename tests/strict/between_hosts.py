"""Groups of hosts, as gloo has them: whoever waits, waits, and hears at once that the generation is over."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from odyssey_megatron.errors import Superseded
from odyssey_megatron.rebuild import hosts
from odyssey_megatron.rebuild.library import Connect
from odyssey_megatron.rebuild.rendezvous import Rendezvous
from tests.strict.machine import Machine, this_host

T = TypeVar("T")


class HostAbort:
    """Implements ``rebuild.abort.Abort``."""

    holds = patience = None

    def __init__(self) -> None:
        self.fired = False

    def fall(self) -> None: ...

    def fire(self) -> None:
        self.fired = True

    close = fire

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        yield
        self._check()

    def meet(self, published: Iterable[bytes]) -> None: ...

    def call(self, function: Callable[[], T]) -> T:
        self._check()
        return function()

    def drain(self) -> None: ...

    settle = drain

    def adopt(self, backend: Any, use: Any) -> None: ...

    def use_of(self, backend: Any) -> None:
        return None

    def hand_over(self) -> dict[Any, Any]:
        return {}

    def _check(self) -> None:
        if self.fired:
            raise Superseded("a newer generation exists")


class Table:
    """What the members of one group have brought to each of its operations, and sent each other."""

    def __init__(self, size: int):
        self.size = size
        self.brought: dict[int, dict[int, tuple[str, list[torch.Tensor]]]] = defaultdict(dict)
        self.sent: dict[tuple[int, int, int], list[torch.Tensor]] = defaultdict(list)
        """By (source, target, tag)."""
        self.wanted: Counter[tuple[int, int, int]] = Counter()


class HostEnd(dist.ProcessGroup):
    """One rank's side of a group."""

    def __init__(self, table: Table, rank: int, machine: Machine, abort: HostAbort):
        super().__init__(rank, table.size)
        self._table, self._machine, self._abort, self._count = table, machine, abort, 0

    def getBackendName(self) -> str:  # torch's name
        return "hosts"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist._Work:
        (tensor,) = tensors
        maximum = getattr(opts, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.MAX
        return self._bring("allreduce", [tensor], lambda rows: tensor.copy_(_total(rows, 0, maximum)))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist._Work:
        return self._bring("broadcast", tensors, lambda rows: tensors[0].copy_(rows[opts.rootRank][0]))

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist._Work:
        return self._bring("allgather", inputs, lambda rows: _fill(outputs[0], [row[0] for row in rows]))

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist._Work:
        rooms = output.view(self._table.size, *own.shape)
        return self._bring("all_gather", [own], lambda rows: _fill(rooms, [row[0] for row in rows]))

    def reduce_scatter_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist._Work:
        parts = [*own.view(self._table.size, *output.shape)]
        return self._bring("reduce_scatter", parts, lambda rows: output.copy_(_total(rows, self.rank())))

    def all_to_all_single(
        self, output: torch.Tensor, own: torch.Tensor, come: Any, sent: Any, opts: Any = None
    ) -> dist._Work:
        parts, rooms = own.split(sent), output.split(come)
        return self._bring(
            "all_to_all", [*parts], lambda rows: _fill(rooms, [row[self.rank()] for row in rows])
        )

    def barrier(self, opts: Any = None) -> dist._Work:
        return self._bring("barrier", [torch.zeros(1)], lambda rows: None)

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> dist._Work:
        """Rendezvous."""
        key = self.rank(), target, tag
        self._table.sent[key].append(tensors[0].detach().clone())
        number = len(self._table.sent[key])
        self._machine.may_stop()
        return _Meeting(self, lambda: self._table.wanted[key] >= number, lambda: None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist._Work:
        key = source, self.rank(), tag
        number, sent = self._table.wanted[key], self._table.sent[key]
        self._table.wanted[key] += 1
        self._machine.may_stop()
        return _Meeting(self, lambda: len(sent) > number, lambda: tensors[0].copy_(sent[number]))

    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )  # torch's older names

    def _bring(
        self, kind: str, own: list[torch.Tensor], end: Callable[[list[list[torch.Tensor]]], Any]
    ) -> dist._Work:
        here = self._table.brought[self._count]
        self._count += 1
        here[self.rank()] = kind, [one.detach().clone() for one in own]
        assert len({(name, _shapes(name, parts)) for name, parts in here.values()}) == 1, here
        self._machine.may_stop()
        size = self._table.size
        return _Meeting(self, lambda: len(here) == size, lambda: end([here[rank][1] for rank in range(size)]))

    def meet(self, ready: Callable[[], bool], end: Callable[[], Any]) -> None:
        this_host().wait(lambda: self._abort.fired or ready())
        if not ready() or (self._abort.fired and self._machine.draw.random() < 0.5):
            raise Superseded("a newer generation exists")  # it may come to some, though all were there
        end()


def _shapes(kind: str, parts: list[torch.Tensor]) -> Any:
    """What must be the same on all members; of an all-to-all, what each two of them exchange is checked by its end."""
    return len(parts) if kind == "all_to_all" else tuple((one.shape, one.dtype) for one in parts)


def _total(rows: list[list[torch.Tensor]], part: int, maximum: bool = False) -> torch.Tensor:
    stacked = torch.stack([row[part] for row in rows])
    return stacked.amax(0) if maximum else stacked.sum(0).to(stacked.dtype)


def _fill(rooms: Iterable[torch.Tensor], rows: list[torch.Tensor]) -> None:
    for room, row in zip(rooms, rows, strict=True):
        assert room.shape == row.shape
        room.copy_(row)


class _Meeting(dist._Work):
    def __init__(self, group: HostEnd, ready: Callable[[], bool], end: Callable[[], Any]):
        super().__init__()
        self._group, self._ready, self._end = group, ready, end

    def wait(self, timeout: Any = None) -> bool:
        self._group.meet(self._ready, self._end)
        return True


class Hosts:
    """``rebuild.library.Library`` for the group of all, or, where ranks share GPUs, for all groups."""

    staged = True
    device, kind, type = "cpu", "hosts", dist.ProcessGroup.BackendType.CUSTOM
    rendezvous = Rendezvous
    spare = None

    def __init__(self, machine: Machine, tables: dict[str, Table]):
        self._machine, self._tables = machine, tables
        self.before: Callable[[], None] = lambda: None
        """Is called before anything is connected."""

    def new_abort(self) -> HostAbort:
        return HostAbort()

    def build_all(self, builders: Mapping[str, Callable[[], T]], abort: Any) -> dict[str, T]:
        self.before()
        return {name: builders[name]() for name in sorted(builders)}

    def connector(self, abort: Any) -> Connect:
        def connect(store: Any, rank: int, size: int, way: Any) -> Any:
            groups = hosts.groups_of(rank, size)
            if size <= hosts.FAN:
                return self._end(store.prefix, rank, size, abort)
            parts = [
                self._end(f"{store.prefix}/{one.step}.{one.start}", one.index(rank), len(one), abort)
                for one in groups
            ]
            return hosts.Tree(rank, size, parts)

        return connect

    def _end(self, name: str, rank: int, size: int, abort: HostAbort) -> HostEnd:
        this_host().wait()
        return HostEnd(self._tables.setdefault(name, Table(size)), rank, self._machine, abort)
