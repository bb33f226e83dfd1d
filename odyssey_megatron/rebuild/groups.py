"""The process groups of one generation: built together, and torn down in the background when the next one comes.

Groups are made directly from their store, ranks and name, and not by ``init_process_group``/``new_group``, whose names
come from a counter per process, and whose teardown needs all ranks. The default group is a placeholder of fixed world
size, so ``torch.distributed``'s global rank space never changes.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import Superseded
from odyssey_megatron.plan.placing.groups import WORLD, passes, way_of
from odyssey_megatron.rebuild.abort import Abort, AbortableGroup, NcclAbort, abort_all
from odyssey_megatron.rebuild.alone import Alone
from odyssey_megatron.rebuild.hosts import StagedGroup
from odyssey_megatron.rebuild.kept import Communicator, fitting
from odyssey_megatron.rebuild.library import Gloo, Hosts, Library, Nccl
from odyssey_megatron.rebuild.registry import register


class MemberLike(Protocol):
    """The part of ``launch/rank/member.py`` that building groups needs."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def store(self) -> dist.Store: ...

    def newer_than(self, number: int) -> bool: ...

    def on_newer(self, number: int, end: Any, fall: Any) -> None: ...

    def forget(self, number: int) -> None: ...


class GroupSet(Mapping[str, dist.ProcessGroup]):
    """The groups of generation ``number`` that this rank is in, by name.

    Each is registered with ``torch.distributed``: ``dist.all_reduce(tensor, group=groups["world"])``. Once a
    newer generation exists every operation raises Superseded; if a peer is lost before that, PeerFailed.

    Args:
        devices: the library that connects all groups except the one of all members.
        hosts: the library that connects the group of all members. May be the same as ``devices``.
    """

    def __init__(self, member: MemberLike, number: int, devices: Library, hosts: Library) -> None:
        self.number, self._rank, self._forget = number, member.rank, member.forget
        self._devices, self._hosts = devices, hosts
        self.fell_together = True
        """Whether no rank that goes on can have taken for a message what this rank's abort has left in a buffer."""
        self._aborts = {library: library.new_abort() for library in dict.fromkeys((devices, hosts))}
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._backends: dict[str, Any] = {}
        """Group's name -> backend."""
        self._connected: dict[Any, Communicator] = {}
        """Backend -> communicator, for those that may outlive this generation."""
        self._goes_on: dict[str, Communicator] = {}
        """Group's name -> communicator, for those to be taken over from the generation before."""

    def __getitem__(self, name: str) -> dist.ProcessGroup:
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def fall(self) -> None:
        """Make nothing count from now on of what devices still do. May be called from any thread."""
        for abort in self._aborts.values():
            abort.fall()

    def abort(self, together: bool = True) -> None:
        """End every operation, as a newer generation would. May be called from any thread.

        Args:
            together: whether :meth:`fall` came first on all other ranks of these groups that go on.
        """
        self.fell_together = self.fell_together and together
        for abort in self._aborts.values():
            abort.fire()

    @property
    def holds(self) -> torch.Tensor | None:
        """See ``rebuild.abort.Abort``, also for :meth:`drain` and :meth:`settle`."""
        return self._aborts[self._devices].holds

    def drain(self) -> None:
        self._aborts[self._devices].drain()

    def settle(self) -> None:
        abort = self._aborts[self._devices]
        abort.settle()
        for backend in self._connected:
            if (use := abort.use_of(backend)) is not None:
                use.rest()

    @property
    def communicators(self) -> Collection[Communicator]:
        """The communicators with which the next generation can go on."""
        return self._connected.values()

    def connect(
        self,
        member: MemberLike,
        named: Mapping[str, tuple[int, ...]],
        before: Collection[Communicator] | None,
    ) -> None:
        """Add the groups ``named``, of all of which this rank is a member. See :func:`build_groups` for the rest."""
        for library in dict.fromkeys((self._hosts, self._devices)):
            mine = {name: ranks for name, ranks in named.items() if self._library(name) is library}
            abort, kept = self._aborts[library], dict[str, tuple[Any, dist.Store]]()
            if library is self._devices:
                if before is None:
                    kept = self._kept(mine, named)
                else:
                    self._goes_on = fitting(before, mine)
            there = kept.keys() | self._goes_on.keys()
            missing = {name: ranks for name, ranks in mine.items() if name not in there}
            with abort.connecting():
                build = functools.partial(_build_all, member, self.number, missing, library, abort)
                built = kept | abort.call(build)
            for name, (backend, store) in built.items():
                self._register(name, backend, mine[name], store)
        if any(abort.fired for abort in self._aborts.values()):
            raise Superseded("a newer generation exists")

    def _kept(
        self, mine: Mapping[str, tuple[int, ...]], named: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[Any, dist.Store]]:
        """Return those of the groups of devices ``mine`` that need not be connected anew: (backend, store) by name."""
        spare, abort = self._devices.spare, self._aborts[self._devices]
        world = next((name for name in named if self._library(name) is self._hosts), None)
        if spare is None or world is None:
            return {}
        taken = spare.take(mine, self._groups[world], named[world])
        for name, one in taken.items():
            abort.adopt(one.backend, one.use)
            self._keep(name, one)
        return {name: (one.backend, one.store) for name, one in taken.items()}

    def take_over(self, before: GroupSet) -> None:
        """Take the communicators that both generations use from ``before``, when this one begins between two steps.

        Raises Superseded if a newer generation exists; then they stay with ``before``.
        """
        if self._goes_on:
            theirs, ours = before._aborts[before._devices], self._aborts[self._devices]
            assert isinstance(theirs, NcclAbort)
            assert isinstance(ours, NcclAbort)
            theirs.give([one.backend for one in self._goes_on.values()], ours)
        for name, one in self._goes_on.items():
            self._keep(name, one)
            self._register(name, one.backend, one.ranks, one.store)

    def _keep(self, name: str, one: Communicator) -> None:
        """Note that ``one``, the communicator of group ``name``, may outlive this generation, if it may."""
        if not passes(name):
            self._connected[one.backend] = one

    @property
    def can_part(self) -> bool:
        """Whether groups can end before the generation does. Gloo's take no memory of a device, and by their end others
        would see a rank die.
        """
        return self._devices.spare is not None

    def part(self) -> None:
        """End the groups that have had their use (``plan.placing.groups.passes``). All that went through them must be
        complete on all their members. Raises Superseded.
        """
        over, abort = [name for name in self._groups if passes(name)], self._aborts[self._devices]
        assert isinstance(abort, NcclAbort)
        backends = [self._backends[name] for name in over]
        abort.release(backends)
        abort_all(backends)
        backends.clear()
        self._bury(over)

    def _library(self, name: str) -> Library:
        return self._hosts if name.partition(".")[0] == WORLD else self._devices

    def leave(self) -> None:
        """As :meth:`close`, after an abort; keep communicators that may outlive the generation for the next one."""
        if self._devices.spare is not None:
            clean = self._aborts[self._devices].hand_over()
            self._devices.spare.lay_by([self._connected[one] for one in clean if one in self._connected])
            # Backends that were connected too late to become a group, or whose groups are only to begin with.
            abort_all([one for one in clean if one not in self._connected])
        self.close()

    def close(self) -> None:
        """Take the groups out of ``torch.distributed``, and end their connections in the background."""
        self._forget(self.number)
        for abort in self._aborts.values():
            abort.close()
        self._bury([*self._groups])

    def _bury(self, names: Collection[str]) -> None:
        """Let go of groups whose operations have ended."""
        last = []
        for name in names:
            group, backend = self._groups.pop(name), [self._backends.pop(name)]
            c10d._cleanup_process_group_global_state(group)
            if isinstance(group, AbortableGroup):
                last.append([group.detach(), backend.pop()])
        # Dropping the last reference runs a destructor that joins the group's threads. It waits for an operation that
        # was left in the group (abort_gloo.py), and no training thread, nor another group, must wait for that.
        for references in last:
            threading.Thread(target=references.clear, name=BURYING, daemon=True).start()

    def _register(self, name: str, backend: Any, ranks: tuple[int, ...], store: dist.Store) -> None:
        library, rank = self._library(name), self._rank
        device = library.device
        group = _plain_group(store, ranks.index(rank), len(ranks), library.type, device, backend)
        if library.staged:
            group = StagedGroup(group, self._aborts[library])
        elif len(ranks) > 1:
            abort = self._aborts[library]
            group = AbortableGroup(group, abort, use := abort.use_of(backend))
            if use is not None and backend not in self._connected:
                one = Communicator(
                    name=name, number=self.number, ranks=ranks, backend=backend, store=store, use=use
                )
                self._keep(name, one)
        torch_name: Any = f"{name}@{self.number}"  # from torch 2.13 on the type is a NewType
        group._set_group_name(torch_name)
        group._set_group_desc(torch_name)
        kind = library.kind if len(ranks) > 1 else "fake"
        register(group, torch_name, backend=kind, device=device, store=store, ranks=_Ranks(ranks, rank))
        self._groups[name], self._backends[name] = group, backend


class _Ranks(dict[int, int]):
    """Global rank -> rank in a group. Any other number stands for this process: ``torch.distributed`` looks up this
    process's rank in the default group, also for its log, and that rank may be renumbered (``world.py``).
    """

    def __init__(self, ranks: tuple[int, ...], own: int):
        super().__init__({one: index for index, one in enumerate(ranks)})
        self._own = ranks.index(own)

    def __contains__(self, rank: object) -> bool:
        return True

    def __missing__(self, rank: int) -> int:
        return self._own


def init_default_group(member: MemberLike) -> None:
    """Initialise ``torch.distributed`` with a placeholder as its default group.

    It has dense ranks, a fixed size and no connections. It is never rebuilt, and nothing is sent through it.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=member.rank, world_size=member.world_size)


BURYING = "odyssey-bury"
"""Name of the threads that run the destructors of groups, one each."""
NEVER_OVER = sys.maxsize
"""Generation number for groups that end only by the death of a peer, and by no later generation."""


def build_groups(
    member: MemberLike,
    number: int,
    named: Mapping[str, tuple[int, ...]],
    config: OdysseyConfig,
    libraries: tuple[Library, Library] | None = None,
    before: Collection[Communicator] | None = None,
) -> GroupSet:
    """Build the groups in ``named`` that this rank is in. Every rank of a group must do so.

    Args:
        number: the generation's number.
        named: name -> global ranks, ascending; equal on all members.
        libraries: the libraries for devices and for hosts; by default those for the device of ``config``.
        before: the communicators of the generation that this one follows, if nobody has died since; empty on a rank
            that was not in it. Groups that can go on with them exist once :meth:`GroupSet.take_over` is called.
            None: use what has outlived a failure.

    Raises:
        Superseded: A newer generation exists. Nothing of this one is left.
        PeerFailed: A peer did not connect within ``build_timeout_s``.
    """
    devices, hosts = libraries or libraries_for(config)
    groups = GroupSet(member, number, devices, hosts)
    member.on_newer(number, groups.abort, groups.fall if groups.holds is not None else None)
    if member.newer_than(number):
        groups.abort()  # the newer generation came before the callback was in place
    try:
        mine = {name: ranks for name, ranks in named.items() if member.rank in ranks}
        groups.connect(member, mine, before)
    except BaseException:
        groups.abort()
        if before is None:
            groups.leave()
        else:
            groups.close()  # what it would have taken over still belongs to the generation before
        raise
    return groups


def libraries_for(config: OdysseyConfig) -> tuple[Library, Library]:
    """Return the libraries for devices and for hosts. Use the same two in the next generation, so that communicators
    which outlive this one can be used there.
    """
    if config.uses_nccl:
        return Nccl(config), Hosts(config)
    gloo = Gloo(config)
    return gloo, gloo


def _build_all(
    member: MemberLike,
    number: int,
    named: Mapping[str, tuple[int, ...]],
    library: Library,
    abort: Abort,
) -> dict[str, tuple[Any, dist.Store]]:
    """Build the groups ``named`` of generation ``number``: their backends and stores by name."""
    connect = library.connector(abort)

    def build(name: str) -> tuple[Any, dist.Store]:
        ranks = named[name]
        index, size = ranks.index(member.rank), len(ranks)
        store = library.rendezvous(member.store, f"groups/{number}/{name}", index, size, abort)
        if size == 1:
            return Alone(), store
        return connect(store, index, size, way_of(name)), store

    return library.build_all({name: functools.partial(build, name) for name in named}, abort)


def _plain_group(
    store: dist.Store, rank: int, size: int, kind: dist.ProcessGroup.BackendType, device: str, backend: Any
) -> dist.ProcessGroup:
    if isinstance(backend, dist.ProcessGroup):  # it is written in Python
        return backend
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group
