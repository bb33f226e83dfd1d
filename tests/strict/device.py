"""Tensors of a device whose operations run later: what a host asks for is only queued.

Product code runs unchanged within :func:`on_device`: tensors that it makes on :data:`DEVICE`, and all that comes of
them, lie in the memory of the host's own device. Their operations go to its main stream. The host goes on at once,
unless it asks for a value: then it waits, and that is counted. Memory that nothing has been written to is poison; what
two streams do to the same memory must be in order by events, whatever the timing (:class:`Race`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.strict.machine import Device, Event, Stream

DEVICE = torch.device("xpu")
"""What its tensors say where they are: no "cuda", which on CPU ranks is the CPU device's name for the CPU."""


class Race(Exception):
    """Two streams use the same memory, and nothing says in which order."""


class WrongPlace(Exception):
    """A tensor is not where an operation needs it."""


class _Memory:
    """One allocation: which operations have used it last."""

    __slots__ = ("read", "storage", "written")

    def __init__(self, storage: torch.UntypedStorage):
        self.storage = StorageWeakRef(storage)  # its address is not used again as long as this exists
        self.written: tuple[Stream, int, str] | None = None
        self.read: dict[Stream, tuple[int, str]] = {}


class DeviceMemory:
    """What lies on one device."""

    def __init__(self, device: Device):
        self.device = device
        self._of: dict[int, _Memory] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self._swept = 1000

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._of

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of the host's that the device reads by itself."""
        self._pinned = {at: one for at, one in self._pinned.items() if not one.expired()}
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def adopt(self, tensor: torch.Tensor) -> None:
        """``tensor`` lies here from now on, and has its values."""
        storage = tensor.untyped_storage()
        self._of.setdefault(storage._cdata, _Memory(storage))

    def allocate(self, tensor: torch.Tensor) -> None:
        """``tensor`` lies here from now on, and what it holds is poison."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._of:
            self._of[storage._cdata] = _Memory(storage)
            poison(tensor)
        if len(self._of) > self._swept:
            self._of = {at: one for at, one in self._of.items() if not one.storage.expired()}
            self._swept = 2 * len(self._of) + 1000

    def give(
        self,
        stream: Stream,
        name: str,
        done: Callable[[], bool],
        *,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        after: Event | None = None,
    ) -> Event:
        """Gives ``stream`` an operation on memory that must be its own by then. Raises Race, WrongPlace."""
        event = stream.give(name, done, after)
        mine = event.knows[stream]
        for tensor, writing in (*((one, False) for one in reads), *((one, True) for one in writes)):
            memory = self._of.get(tensor.untyped_storage()._cdata)
            if memory is None:
                raise WrongPlace(f"{name} on rank {self.device.rank}: a tensor of the host")
            before = [memory.written] if memory.written else []
            if writing:
                before += [(other, *last) for other, last in memory.read.items()]
            for other, count, what in before:
                if other is not stream and event.knows.get(other, 0) < count:
                    raise Race(
                        f"rank {self.device.rank}: {name} on {stream.name} {'writes' if writing else 'reads'} memory "
                        f"that {what} on {other.name} may still be using"
                    )
            if writing:
                memory.written, memory.read = (stream, mine, name), {}
            else:
                memory.read[stream] = (mine, name)
        return event


def poison(tensor: torch.Tensor) -> None:
    """What is in memory that nobody has written to, or that an aborted operation has left."""
    if tensor.is_floating_point():
        tensor.data.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.data.fill_(77)


@contextlib.contextmanager
def on_device(memory: DeviceMemory) -> Iterator[None]:
    """In the body this thread's tensors on :data:`DEVICE` lie in ``memory``."""
    asked = _Asked()
    with _Functions(memory, asked), _Operations(memory, asked):
        yield


class _Asked:
    """Set while a function makes a tensor on the device."""

    device = False


def _is_device(one: Any) -> bool:
    return isinstance(one, (str, torch.device)) and torch.device(one).type == DEVICE.type


class _Functions(TorchFunctionMode):
    """Where code names a device."""

    def __init__(self, memory: DeviceMemory, asked: _Asked):
        super().__init__()
        self._memory, self._asked = memory, asked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        own = args[0] if args and isinstance(args[0], torch.Tensor) else None
        here = own is not None and own in self._memory
        if name == "__get__" and func.__self__ is torch.Tensor.device:
            return DEVICE if here else func(*args)
        if name in ("tolist", "numpy", "cpu") and here:
            self._memory.device.synchronize(_where(name))
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs).clone() if name == "cpu" else func(*args, **kwargs)
        if name == "pin_memory" and own is not None:
            return self._memory.pin(own.clone())
        if name == "_parse_to":  # what a module's `to` is told
            return func(*args, **kwargs)
        if name == "to" and own is not None:
            return self._to(func, own, here, args[1:], kwargs)
        asked = name == "new_tensor" and here
        if _is_device(kwargs.get("device")):
            asked, kwargs["device"] = True, "cpu"
        return self._making(func, args, kwargs) if asked else func(*args, **kwargs)

    def _to(self, func: Any, own: torch.Tensor, here: bool, args: Any, kwargs: Any) -> Any:
        places = [one for one in (*args, kwargs.get("device")) if isinstance(one, (str, torch.device))]
        later = kwargs.pop("non_blocking", False) or True in [one for one in args if isinstance(one, bool)]
        args = [one for one in args if isinstance(one, (torch.dtype, torch.Tensor))]
        kwargs = {name: one for name, one in kwargs.items() if name != "device" and one is not None}
        to_device = here if not places else _is_device(places[0])
        if to_device == here:
            return func(own, *args, **kwargs) if args or kwargs else own
        if here:
            self._memory.device.synchronize(_where("to cpu"))
            with torch._C._DisableTorchDispatch():
                return func(own.clone(), *args, **kwargs)
        with torch._C._DisableTorchDispatch():
            value = func(own, *args, **kwargs) if args or kwargs else own  # another dtype is made on the host
            copy = value.clone()
        if later and self._memory.is_pinned(value):
            return copied(self._memory, value.data)
        return self._making(torch.ops.aten.lift_fresh, (copy,), {})

    def _making(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._asked.device = True
        try:
            return func(*args, **kwargs)
        finally:
            self._asked.device = False


class _Operations(TorchDispatchMode):
    """Where an operation would be launched."""

    def __init__(self, memory: DeviceMemory, asked: _Asked):
        super().__init__()
        self._memory, self._asked = memory, asked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, memory, device = kwargs or {}, self._memory, self._memory.device
        given = _tensors((args, tuple(kwargs.values())))
        here = [one for one in given if one in memory]
        if func is torch.ops.aten.lift_fresh.default and self._asked.device:
            return self._copied_in(args[0])
        if not here and not self._asked.device:
            return func(*args, **kwargs)
        if _is_view(func):
            return func(*args, **kwargs)
        strangers = [one for one in given if one not in memory and one.ndim]
        if func is torch.ops.aten.copy_.default and args[0] not in memory:
            device.synchronize(_where("copy to the host"))
            return func(*args, **kwargs)
        if strangers:
            raise WrongPlace(
                f"{func} on rank {device.rank}: {len(strangers)} tensor(s) of the host. {_where('')}"
            )
        if _asks_for_a_value(func, args, memory):
            device.synchronize(_where(str(func)))
            found = func(*args, **kwargs)
            for one in _tensors(found):
                self._memory.adopt(one)
            return found
        return self._later(func, args, kwargs, here)

    def _later(self, func: Any, args: Any, kwargs: Any, here: list[torch.Tensor]) -> Any:
        """Queues it. What it returns has its shape already, and is written then."""
        memory, device = self._memory, self._memory.device
        bare = _bare(args), {name: _bare(one) for name, one in kwargs.items()}
        if changing := _changes(func):
            changed = [args[at] if at < len(args) else kwargs.get(name) for at, name in changing]
            written = _tensors(changed)
            found, made = (changed[0] if func._schema.returns else None), []
        else:
            shapes = _found(func, _shapes(args), tuple(kwargs), tuple(map(_shapes, kwargs.values())))
            found = _rooms(shapes, "cpu")
            made = _tensors(found)
            written = made
        for one in made:
            memory.allocate(one)
        rooms = [one.data for one in made]

        def run() -> bool:
            result = func(*bare[0], **bare[1])
            for room, value in zip(rooms, _tensors(result) if rooms else (), strict=True):
                room.copy_(value)
            return True

        reads = [] if func in _ONLY_LIKE else here
        memory.give(device.main, str(func), run, reads=reads, writes=written)
        device.machine.may_stop()
        return found

    def _copied_in(self, value: torch.Tensor) -> torch.Tensor:
        """From the host's memory, which is not pinned: CUDA returns when it is there, whatever was asked for."""
        self._memory.device.synchronize(_where("copy to the device"))
        return copied(self._memory, value.clone())


def copied(memory: DeviceMemory, source: torch.Tensor) -> torch.Tensor:
    """What the device finds in ``source``, the host's, when it comes to it. Nobody waits."""
    with torch._C._DisableTorchDispatch():
        room = source.clone()
    memory.allocate(room)
    bare = room.data

    def run() -> bool:
        bare.copy_(source)
        return True

    memory.give(memory.device.main, "copy", run, reads=[], writes=[room])
    return room


_ONLY_LIKE = {
    getattr(torch.ops.aten, name).default
    for name in ("new_empty", "new_zeros", "new_ones", "empty_like", "zeros_like", "ones_like")
}
"""What makes a tensor like another one, and does not look at what is in that."""


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    found = []
    if isinstance(tree, (tuple, list)):
        for one in tree:
            found += _tensors(one)
    return found


class _Shape(NamedTuple):
    """What is known of a tensor before it is computed."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def room(self, device: str) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def _shapes(tree: Any) -> Any:
    """Without what is in them, which need not be there yet. Alike only where all types are: True is no 1.0."""
    if isinstance(tree, torch.Tensor):
        return _Shape(tree.shape, tree.stride(), tree.dtype)
    return (type(tree), tuple(map(_shapes, tree))) if isinstance(tree, (tuple, list)) else (type(tree), tree)


def _rooms(tree: Any, device: str) -> Any:
    """Memory for what has such shapes."""
    if isinstance(tree, _Shape):
        return tree.room(device)
    kind, value = tree
    return kind(_rooms(one, device) for one in value) if issubclass(kind, (tuple, list)) else value


@functools.cache
def _found(func: Any, args: Any, names: tuple[str, ...], by_name: Any) -> Any:
    """The shapes of what ``func`` gives for such shapes; torch finds them out in Python, which takes long."""
    given = {name: _rooms(one, "meta") for name, one in zip(names, by_name, strict=True)}
    return _shapes(func(*_rooms(args, "meta"), **given))


def _bare(tree: Any) -> Any:
    """Without autograd, which has been at it already, and knows nothing of what is written later."""
    if isinstance(tree, torch.Tensor):
        return tree.data
    return type(tree)(_bare(one) for one in tree) if isinstance(tree, (tuple, list)) else tree


_INDEXED = torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_


def _asks_for_a_value(func: Any, args: Any, memory: DeviceMemory) -> bool:
    if func.overloadpacket in _INDEXED:  # a mask says how many; where one number goes to it does not matter
        masks = any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
        return masks and (len(args) < 3 or args[2] in memory)
    return _gives_a_value(func)


@functools.cache
def _gives_a_value(func: Any) -> bool:
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    kinds = {str(one.type) for one in func._schema.returns}
    return bool(tags & set(func.tags)) or bool(kinds and not any("Tensor" in kind for kind in kinds))


@functools.cache
def _changes(func: Any) -> list[tuple[int, str]]:
    """The places and names of arguments that it writes to."""
    return [
        (at, spec.name)
        for at, spec in enumerate(func._schema.arguments)
        if spec.alias_info and spec.alias_info.is_write
    ]


@functools.cache
def _is_view(func: Any) -> bool:
    return any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)


def _where(what: str) -> str:
    """With the line of the product's that asked."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "odyssey_megatron" in name or "/tests/execute/" in name:
            return f"{what} at {name.rpartition('/')[2]}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back  # type: ignore[assignment]
    return what
