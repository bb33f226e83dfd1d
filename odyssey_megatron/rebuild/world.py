"""``torch.distributed``'s default group for code that is not ours: it always means the ranks that live.

Megatron's own loop calls barriers and reductions on the default group, between steps and inside checkpoints. Here
they reach the world of the current generation. Ranks are dense in it: the lowest living rank is 0, and the last one is
``size - 1``, so whoever prints or writes "on rank 0" or "on the last rank" goes on after those have died.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from odyssey_megatron.rebuild.abort import OPERATIONS

Together = Callable[[Callable[[Any], Any]], Any]
"""``recover.Recovery.together``."""


class LivingWorld(dist.ProcessGroup):
    """Passes every operation on to the current world.

    Outside of common work (see :meth:`inside`) an operation is a piece of common work itself: complete when it returns,
    and repeated with the survivors if a failure cuts it short.
    """

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self.before: dist.ProcessGroup | None = None
        """The default group that this one has replaced: of this process alone."""
        self._current: dist.ProcessGroup | None = None
        self._together: Together | None = None
        self._inside = False

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # torch's name
        return "odyssey"

    def follow(self, world: dist.ProcessGroup) -> None:
        """From now on ``world`` is meant."""
        self._current, self._rank, self._size = world, world.rank(), world.size()
        c10d._world.pg_group_ranks[self] = {one: one for one in range(self._size)}

    def repeat_with(self, together: Together | None) -> None:
        """How an operation becomes common work. None: it is passed on, and a failure ends it."""
        self._together = together

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """In the body operations are only passed on: they are part of a piece of common work that is being done."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def run(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """``operation`` of the current world."""
        if self._together is None or self._inside:
            return getattr(self._current, operation)(*args, **kwargs)
        before = [(one, one.clone()) for one in _tensors([args, kwargs])]

        def work(world: dist.ProcessGroup) -> Any:
            for tensor, value in before:  # an earlier attempt may have begun to overwrite it
                tensor.copy_(value)
            done = getattr(world, operation)(*_for_size(operation, args, world.size()), **kwargs)
            done.wait()
            return done

        with torch.no_grad():
            return self._together(work)


def _for_size(operation: str, args: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """Room made before ranks died is larger than what is gathered now; the rest of it stays as it is."""
    if operation == "allgather" and len(args[0][0]) > size:
        return ([args[0][0][:size]], *args[1:])
    if operation == "_allgather_base" and args[0].numel() > size * args[1].numel():
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
    def operation(self: LivingWorld, *args: Any, **kwargs: Any) -> Any:
        return self.run(name, *args, **kwargs)

    operation.__name__ = name
    return operation


for _name in OPERATIONS:
    setattr(LivingWorld, _name, _operation(_name))


def stand_alone() -> None:
    """Initialises ``torch.distributed`` with this process as the whole world, for groups of one to be made in it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In the body the default group is this process alone again: for library code that would agree with all ranks on
    something that is each rank's own affair."""
    world = c10d._get_default_group()
    if not isinstance(world, LivingWorld):
        yield
        return
    c10d._update_default_pg(world.before)
    try:
        yield
    finally:
        c10d._update_default_pg(world)


class _Alone(dict[int, int]):
    """Global rank -> rank in a group of this process alone, whatever number the process has in the world."""

    def __contains__(self, rank: object) -> bool:
        return True

    def __getitem__(self, rank: int) -> int:
        return 0


def become_default(rank: int, size: int, device: str) -> LivingWorld:
    """Puts a :class:`LivingWorld` in the place of the default group; groups of :func:`stand_alone` stay alone."""
    world, backend = LivingWorld(rank, size), "gloo" if device == "cpu" else "nccl"
    c10d._register_pg_in_world(
        world,
        backend_name=backend,
        store=c10d._get_default_store(),
        group_name="odyssey-world",
        backend_config=f"{device}:{backend}",
        rank_mapping={one: one for one in range(size)},
    )
    world.before = c10d._get_default_group()
    for group in list(c10d._world.pg_group_ranks):
        if group is not world:
            c10d._world.pg_group_ranks[group] = _Alone({0: 0})
    c10d._update_default_pg(world)
    return world
