"""Groups of hosts, as gloo has them: whoever waits, waits, and hears at once that the generation is over."""

from __future__ import annotations

import contextlib
from collections import defaultdict
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
    """What the members of one group have brought to each of its operations."""

    def __init__(self, size: int):
        self.size = size
        self.brought: dict[int, dict[int, tuple[str, torch.Tensor]]] = defaultdict(dict)


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

        def end(rows: list[torch.Tensor]) -> None:
            stacked = torch.stack(rows)
            total = stacked.amax(0) if maximum else stacked.sum(0)
            tensor.copy_(total.to(tensor.dtype))

        return self._bring("allreduce", tensor, end)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist._Work:
        return self._bring("broadcast", tensors[0], lambda rows: tensors[0].copy_(rows[opts.rootRank]))

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist._Work:
        def end(rows: list[torch.Tensor]) -> None:
            for room, row in zip(outputs[0], rows, strict=True):
                room.copy_(row)

        return self._bring("allgather", inputs[0], end)

    def barrier(self, opts: Any = None) -> dist._Work:
        return self._bring("barrier", torch.zeros(1), lambda rows: None)

    def _bring(self, kind: str, tensor: torch.Tensor, end: Callable[[list[torch.Tensor]], Any]) -> dist._Work:
        here = self._table.brought[self._count]
        self._count += 1
        here[self.rank()] = kind, tensor.detach().clone()
        assert len({(name, one.shape, one.dtype) for name, one in here.values()}) == 1, here
        self._machine.may_stop()
        return _Meeting(self, here, end)

    def meet(self, here: dict[int, Any], end: Callable[[list[torch.Tensor]], Any]) -> None:
        this_host().wait(lambda: self._abort.fired or len(here) == self._table.size)
        if len(here) < self._table.size or (self._abort.fired and self._machine.draw.random() < 0.5):
            raise Superseded("a newer generation exists")  # it may come to some, though all were there
        end([here[rank][1] for rank in range(self._table.size)])


class _Meeting(dist._Work):
    def __init__(self, group: HostEnd, here: dict[int, Any], end: Callable[[list[torch.Tensor]], Any]):
        super().__init__()
        self._group, self._here, self._end = group, here, end

    def wait(self, timeout: Any = None) -> bool:
        self._group.meet(self._here, self._end)
        return True


class Hosts:
    """``rebuild.library.Library`` for the group of all."""

    device, kind, type = "cpu", "hosts", dist.ProcessGroup.BackendType.CUSTOM
    rendezvous = Rendezvous
    spare = None

    def __init__(self, machine: Machine, tables: dict[str, Table]):
        self._machine, self._tables = machine, tables

    def new_abort(self) -> HostAbort:
        return HostAbort()

    def build_all(self, builders: Mapping[str, Callable[[], T]], abort: Any) -> dict[str, T]:
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
