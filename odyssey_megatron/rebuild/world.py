"""Process groups for foreign code that keeps a group for good: they always stand for the ranks that live.

Megatron's own loop calls barriers and reductions on the default group, between steps and inside checkpoints. They
reach the world of the current generation. Ranks are dense in it: the lowest living rank is 0, and the last one prints.
The groups within a cell that Megatron's modules keep also stand for those of the current generation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from odyssey_megatron.rebuild.abort import OPERATIONS
from odyssey_megatron.rebuild.registry import register

Together = Callable[[Callable[[Any], Any]], Any]
"""Type of ``recover.Recovery.together``, which does a piece of common work."""


class FollowingGroup(dist.ProcessGroup):
    """A process group for ``torch.distributed`` that passes every operation on to a group of the current generation."""

    def __init__(self, rank: int, size: int, device: str):
        super().__init__(rank, size)  # type: ignore[call-arg] # its stub lacks this one
        self._rank, self._size, self._device = rank, size, torch.device(device)
        self._current: dist.ProcessGroup | Unreachable | None = None

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices on which collectives of objects put their bytes. Torch takes the backends', and here is none."""
        return [self._device]

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # torch's name
        return "odyssey"

    def follow(self, group: dist.ProcessGroup | Unreachable) -> None:
        """Pass operations on to ``group`` from now on."""
        self._current, self._rank, self._size = group, group.rank(), group.size()

    def run(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``operation`` on the current group."""
        return getattr(self._current, operation)(*args, **kwargs)


class LivingWorld(FollowingGroup):
    """The default group, which consists of the living ranks.

    Outside of common work (see :meth:`inside`) each operation is itself a piece of common work: it is complete when it
    returns, and if a failure cuts it short it is repeated with the survivors.
    """

    def __init__(self, rank: int, size: int, device: str):
        super().__init__(rank, size, device)
        self.before: dist.ProcessGroup | None = None
        """The default group that this one has replaced, which spans this process or its cell alone."""
        self._together: Together | None = None
        self._inside = False

    @property
    def _device_types(self) -> list[torch.device]:
        """This group connects hosts, whatever device its tensors are on (``rebuild/hosts.py``)."""
        return [torch.device("cpu")]

    def follow(self, group: dist.ProcessGroup | Unreachable) -> None:
        super().follow(group)
        c10d._world.pg_group_ranks[self] = {one: one for one in range(self._size)}

    def repeat_with(self, together: Together | None) -> None:
        """Set how an operation becomes common work. None: it is only passed on, and a failure ends it."""
        self._together = together

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """In the body, only pass operations on: they are part of a piece of common work in progress."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def run(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        if self._together is None or self._inside:
            return super().run(operation, *args, **kwargs)
        before = [(one, one.clone()) for one in _tensors([args, kwargs])]

        def work(world: dist.ProcessGroup) -> Any:
            for tensor, value in before:  # an earlier attempt may have begun to overwrite it
                tensor.copy_(value)
            done = getattr(world, operation)(*_for_size(operation, args, world.size()), **kwargs)
            done.wait()
            return done

        with torch.no_grad():
            return self._together(work)


class Unreachable:
    """Followed where code that is not ours cannot do anything together with all ranks. Otherwise an operation would
    seem to be done, and a sum would be this rank's share.
    """

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def __getattr__(self, operation: str) -> Any:
        raise RuntimeError(
            f"torch.distributed: {operation} over the default group. Ranks do nothing together in a script's forward "
            "step, on_step and the like: others may be elsewhere in the step, or dead. In on_end they can."
        )


def _for_size(operation: str, args: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """Return ``args`` cut to a world of ``size`` ranks: an output allocated before ranks died is larger than what is
    gathered now. The rest of it stays as it is.
    """
    if operation == "allgather" and len(args[0][0]) > size:
        return ([args[0][0][:size]], *args[1:])
    if operation in ("_allgather_base", "all_gather_single") and args[0].numel() > size * args[1].numel():
        return (args[0].reshape(-1)[: size * args[1].numel()], args[1].reshape(-1), *args[2:])
    return args


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _operation(name: str) -> Callable[..., Any]:
    def operation(self: FollowingGroup, *args: Any, **kwargs: Any) -> Any:
        return self.run(name, *args, **kwargs)

    operation.__name__ = name
    return operation


for _name in OPERATIONS:
    setattr(FollowingGroup, _name, _operation(_name))


def stand_alone(rank: int = 0, size: int = 1) -> None:
    """Initialize ``torch.distributed`` with this cell as the whole world, so that groups within it can be made."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In the body, the default group is again the one that :class:`LivingWorld` has replaced.

    For library code that would agree with all ranks on something that each rank decides for itself.
    """
    world = c10d._get_default_group()
    if not isinstance(world, LivingWorld):
        yield
        return
    c10d._update_default_pg(world.before)
    try:
        yield
    finally:
        c10d._update_default_pg(world)


class _WithinCell(dict[int, int]):
    """Global rank -> rank in a group within a cell.

    Cells are consecutive ranks. If all have one size, a rank's place in its cell follows from its current number. In a
    context-parallel group the ranks are ``step`` apart. This rank's own current number, which also depends on the sizes
    of other cells, always maps to ``place``.
    """

    def __init__(self, size: int, step: int = 1, place: int = 0):
        super().__init__({one * step: one for one in range(size)})
        self._size, self._step, self._place = size, step, place

    def __contains__(self, rank: object) -> bool:
        return True

    def __getitem__(self, rank: int) -> int:
        if rank == c10d._get_default_group().rank():
            return self._place
        return rank // self._step % self._size


def become_default(rank: int, size: int, device: str) -> LivingWorld:
    """Replace the default group by a :class:`LivingWorld`. Groups made after :func:`stand_alone` stay in the cell."""
    world = LivingWorld(rank, size, device)
    _register(world, "odyssey-world", device, {one: one for one in range(size)})
    world.before = c10d._get_default_group()
    for group, ranks in list(c10d._world.pg_group_ranks.items()):
        if group is world or isinstance(ranks, _WithinCell):
            continue
        if isinstance(group, dist.ProcessGroup):  # groups without this rank are numbers in torch's table
            c10d._world.pg_group_ranks[group] = _WithinCell(group.size())
    c10d._update_default_pg(world)
    return world


def group_of_cell(name: str, ranks: tuple[int, ...], rank: int, device: str) -> FollowingGroup:
    """Return a group of ``ranks``, which are in the cell of ``rank``, for Megatron's modules to keep."""
    place = ranks.index(rank)
    group = FollowingGroup(place, len(ranks), device)
    _register(group, f"odyssey-{name}", device, _WithinCell(len(ranks), ranks[1] - ranks[0], place))
    return group


def _register(group: dist.ProcessGroup, name: str, device: str, ranks: dict[int, int]) -> None:
    backend = "gloo" if device == "cpu" else "nccl"
    register(group, name, backend=backend, device=device, store=c10d._get_default_store(), ranks=ranks)
