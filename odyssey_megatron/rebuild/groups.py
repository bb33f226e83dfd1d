"""The process groups of one generation: built directly, in one go, and buried when the next one comes.

Groups are not made by ``init_process_group``/``new_group`` (whose names come from a counter per process, and
whose teardown needs everybody), but from their store, ranks and name. The default group is a placeholder of
fixed world size, so ``torch.distributed``'s global rank space never changes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import PeerFailed, Superseded
from odyssey_megatron.rebuild.abort import Abort, AbortableGroup
from odyssey_megatron.rebuild.library import Gloo, Library, Nccl

_POLL_S = (0.0003, 0.004)
"""First and longest pause between two looks at the store."""


class MemberLike(Protocol):
    """What building groups needs of ``launch.member.Member``."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def store(self) -> dist.Store: ...

    def newer_than(self, number: int) -> bool: ...

    def on_newer(self, number: int, callback: Any) -> None: ...

    def forget(self, number: int) -> None: ...


class GroupSet(Mapping[str, dist.ProcessGroup]):
    """The groups of generation ``number`` that this rank is in, by name.

    Each is registered with ``torch.distributed``: ``dist.all_reduce(tensor, group=groups["world"])``. Once a
    newer generation exists every operation raises Superseded; if a peer is lost before that, PeerFailed.
    """

    def __init__(self, number: int, library: Library, abort: Abort, bury_s: float, forget: Any):
        self.number = number
        self._library, self._abort, self._bury_s, self._forget = library, abort, bury_s, forget
        self._groups: dict[str, dist.ProcessGroup] = {}

    def __getitem__(self, name: str) -> dist.ProcessGroup:
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def abort(self) -> None:
        """Ends every operation, as a newer generation would. Any thread."""
        self._abort.fire()

    @property
    def holds(self) -> torch.Tensor | None:
        """See ``rebuild.abort.Abort``, also for the methods."""
        return self._abort.holds

    def drain(self) -> None:
        self._abort.drain()

    def settle(self) -> None:
        self._abort.settle()

    def close(self) -> None:
        """Takes the groups out of ``torch.distributed`` and ends their connections. Returns at once."""
        self._forget(self.number)
        self._abort.close()
        remains = []
        for group in self._groups.values():
            c10d._cleanup_process_group_global_state(group)
            if isinstance(group, AbortableGroup):
                remains.append(group.detach())
        self._groups = {}
        _GRAVEYARD.bury(remains, self._bury_s)

    def _register(
        self, name: str, backend: Any, ranks: tuple[int, ...], rank: int, store: dist.Store
    ) -> None:
        device, kind, type_ = self._library.device, self._library.kind, self._library.type
        if len(ranks) == 1:
            type_, kind = dist.ProcessGroup.BackendType.CUSTOM, "fake"
        group = _plain_group(store, ranks.index(rank), len(ranks), type_, device, backend)
        if len(ranks) > 1:
            group = AbortableGroup(group, self._abort)
        torch_name: Any = f"{name}@{self.number}"  # a NewType of torch's, from 2.13 on
        group._set_group_name(torch_name)
        group._set_group_desc(torch_name)
        c10d._register_pg_in_world(
            group,
            backend_name=kind,
            store=store,
            group_name=torch_name,
            backend_config=f"{device}:{kind}",
            rank_mapping=_Ranks(ranks, rank),
        )
        self._groups[name] = group


class _Ranks(dict[int, int]):
    """Global rank -> rank in a group. Any other number is this process: ``torch.distributed`` looks its rank in the
    default group up, also for its log, and that may be renumbered (``world.py``).
    """

    def __init__(self, ranks: tuple[int, ...], own: int):
        super().__init__({one: index for index, one in enumerate(ranks)})
        self._own = ranks.index(own)

    def __contains__(self, rank: object) -> bool:
        return True

    def __missing__(self, rank: int) -> int:
        return self._own


def init_default_group(member: MemberLike) -> None:
    """``torch.distributed``'s world: ranks dense, size fixed, no connections. Never rebuilt, never used."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=member.rank, world_size=member.world_size)


NEVER_OVER = sys.maxsize
"""A number for groups that no generation ends; the death of a peer does."""


def build_groups(
    member: MemberLike,
    number: int,
    named: Mapping[str, tuple[int, ...]],
    config: OdysseyConfig,
    library: Library | None = None,
) -> GroupSet:
    """Builds those of ``named`` groups that this rank is in. Every rank of a group must do so.

    Args:
        number: of the generation.
        named: name -> global ranks, ascending; equal on all members.
        library: what connects them; by default the one for the device of ``config``.

    Raises:
        Superseded: a newer generation exists; nothing of this one is left.
        PeerFailed: a peer did not connect within ``build_timeout_s``.
    """
    library = library or (Nccl(config) if config.device == "cuda" else Gloo(config))
    abort = library.new_abort()
    groups = GroupSet(number, library, abort, config.op_timeout_s + 2.0, member.forget)
    member.on_newer(number, abort.fire)
    if member.newer_than(number):
        abort.fire()  # it came before the callback was in place
    mine = {name: ranks for name, ranks in named.items() if member.rank in ranks}
    try:
        with abort.connecting():
            built = abort.call(lambda: _build_all(member, number, mine, library, abort))
        for name, (backend, store) in built.items():
            groups._register(name, backend, mine[name], member.rank, store)
        if abort.fired:
            raise Superseded("a newer generation exists")
    except BaseException:
        groups.close()
        raise
    return groups


def _build_all(
    member: MemberLike,
    number: int,
    named: Mapping[str, tuple[int, ...]],
    library: Library,
    abort: Abort,
) -> dict[str, tuple[Any, dist.Store]]:
    """Connects group after group (side by side is no faster). Runs in a thread that can be left."""
    connect = library.connector(abort)

    def build(name: str) -> tuple[Any, dist.Store]:
        ranks = named[name]
        index, size = ranks.index(member.rank), len(ranks)
        store = Rendezvous(member.store, f"groups/{number}/{name}", index, size, abort)
        if size == 1:
            # It copies inputs to outputs, which for one rank is exact.
            return FakeProcessGroup._create_internal(0, 1), store
        return connect(store, index, size), store

    # The same order everywhere, or ranks would wait for one another in different groups.
    return {name: build(name) for name in sorted(named)}


def _plain_group(
    store: dist.Store, rank: int, size: int, kind: dist.ProcessGroup.BackendType, device: str, backend: Any
) -> dist.ProcessGroup:
    if isinstance(backend, dist.ProcessGroup):  # one written in Python
        return backend
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group


class Rendezvous(dist.Store):
    """The store that a group's constructor meets its peers through.

    It asks for its peers' values one by one and waits in C++ for each. Here, a wait ends as soon as the
    generation is superseded, and all peers' values come in one round trip: each rank publishes what it
    sets under its index in the group.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, size: int, abort: Abort):
        super().__init__()
        self._store, self._abort = store, abort
        self.prefix = prefix
        self._mine, self._all = f"{prefix}/{rank}", [f"{prefix}/{index}" for index in range(size)]
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._mine, f"{key}\0{bytes(value).hex()}")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if not all(key in self._values for key in keys):
            self._fetch(timeout.total_seconds() if timeout else 60.0)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _fetch(self, timeout_s: float) -> None:
        ends_s, (pause_s, longest_s) = time.monotonic() + timeout_s, _POLL_S
        while not self._store.check(self._all):
            if self._abort.fired:
                raise Superseded("a newer generation exists")
            if time.monotonic() > ends_s:
                missing = [key for key in self._all if not self._store.check([key])]
                raise PeerFailed(f"no address of {missing} within {timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, longest_s)
        for entry in self._store.multi_get(self._all):
            key, _, value = entry.decode().partition("\0")
            self._values[key] = bytes.fromhex(value)
        self._abort.meet(self._values.values())


class _Graveyard:
    """Keeps groups of past generations until no operation can be left in them.

    Whoever drops the last reference runs a destructor that joins the group's threads, and so waits for
    whatever was left behind in it: this thread, later, and not a training rank now.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._graves: list[tuple[float, list[Any]]] = []
        self._thread: threading.Thread | None = None

    def bury(self, groups: list[Any], for_s: float) -> None:
        with self._changed:
            self._graves.append((time.monotonic() + for_s, groups))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="odyssey-reaper", daemon=True)
                self._thread.start()
            self._changed.notify()

    def __len__(self) -> int:
        return len(self._graves)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._graves)
                due_s, groups = self._graves[0]
                if due_s > time.monotonic():
                    self._changed.wait(due_s - time.monotonic())
                    continue
                self._graves.pop(0)
            del groups  # outside the lock: this may take long


_GRAVEYARD = _Graveyard()


def graveyard_size() -> int:
    """Generations whose groups are not reclaimed yet."""
    return len(_GRAVEYARD)
