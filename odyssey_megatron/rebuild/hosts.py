"""The group of all ranks, which connects hosts even where other groups connect devices.

What all ranks agree on is small, so it goes between hosts. Thus no communicator of devices is ever as large as the job.
With more than ``FAN`` ranks no host is connected with all others either. The ranks form groups of at most ``FAN``; the
first ranks of these form groups again, and so on up to a single group (:class:`Tree`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.rebuild.abort import OPERATIONS, AbortableGroup, AbortableWork

FAN = 32
"""The largest number of members in a group of hosts. Each of them is connected with all others of the group."""


class StagedGroup(AbortableGroup):
    """A group of hosts that takes tensors on a device: it works on host copies, and copies the results back.

    The host waits for its device when an operation is posted. gloo itself takes device tensors only for some
    collectives: for a message it would read from the device's address. Source: torch 2.13 ``ProcessGroupGloo::send``.
    """

    def post(self, operation: str, *args: Any, **kwargs: Any) -> AbortableWork:
        written = list[tuple[torch.Tensor, torch.Tensor]]()
        for options in (*args, *kwargs.values()):
            if isinstance(options, dist.BarrierOptions):
                # torch would choose the machine's accelerator where there is one.
                options.device = torch.device("cpu")
        # All operations write to their first argument only, except that a send reads it. A tensor that is only read
        # must not be written, even with the same values: if it was saved for a backward pass, that would fail.
        writes = operation != "send"
        on_host = (*_on_host(args[:1], written if writes else []), *_on_host(args[1:], []))
        work = super().post(operation, *on_host, **kwargs)
        return _StagedWork(work, written) if written else work


def _on_host(tree: Any, staged: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return ``tree`` with host copies in place of device tensors. Each (tensor, copy) is appended to ``staged``."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(_on_host(one, staged) for one in tree)
    if not isinstance(tree, torch.Tensor) or tree.device.type == "cpu":
        return tree
    staged.append((tree, tree.detach().to("cpu")))
    return staged[-1][1]


class _StagedWork(AbortableWork):
    def __init__(self, work: AbortableWork, staged: list[tuple[torch.Tensor, torch.Tensor]]):
        super().__init__(work._abort, work._work)
        self._staged = staged

    def wait(self, timeout: Any = None) -> bool:
        super().wait(timeout)
        with torch.no_grad():  # autograd does not see what a communication library writes, either
            for tensor, copy in self._staged:
                tensor.copy_(copy.to(tensor.device))
        self._staged = []
        return True


def groups_of(rank: int, size: int) -> list[range]:
    """Return the members of each group that ``rank`` is in, in a tree of ``size`` ranks, from the leaves up."""
    found, apart = [], 1
    while apart < size and rank % apart == 0:
        first = rank - rank % (apart * FAN)
        found.append(range(first, min(first + apart * FAN, size), apart))
        apart *= FAN
    return found


class Tree(dist.ProcessGroup):
    """A group of all ranks that is made of small groups.

    ``groups[level]`` connects ``groups_of(rank, size)[level]``. An operation runs while it is waited for.
    """

    def __init__(self, rank: int, size: int, groups: Sequence[Any]):
        super().__init__(rank, size)  # type: ignore[call-arg] # its stub lacks this one
        self._rank, self._size = rank, size
        self._levels = list(zip(groups_of(rank, size), groups, strict=True))

    def getBackendName(self) -> str:  # torch's name
        return "odyssey-tree"

    def _allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist._Work:
        return _Later(lambda: self._sum(tensors, opts or dist.AllreduceOptions()))

    def _barrier(self, opts: Any = None) -> dist._Work:
        return self._allreduce([torch.zeros(1)])

    def _broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist._Work:
        return _Later(lambda: self._spread(tensors, opts.rootRank))

    def _reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist._Work:
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        totals = tensors if self._rank == opts.rootRank else [one.clone() for one in tensors]
        return self._allreduce(totals, options)

    def _allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist._Work:
        return _Later(lambda: self._collect(inputs[0], outputs[0]))

    def _allgather_flat(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist._Work:
        return _Later(lambda: self._collect(own, list(output.view(self._size, -1))))

    def _gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> dist._Work:
        rooms = outputs[0] if self._rank == opts.rootRank else []
        return _Later(lambda: self._collect(inputs[0], rooms))

    def _scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> dist._Work:
        def run() -> None:
            rows = inputs[0] if inputs else [torch.empty_like(outputs[0]) for _ in range(self._size)]
            table = torch.stack(list(rows))
            self._spread([table], opts.rootRank)
            outputs[0].copy_(table[self._rank])

        return _Later(run)

    def _sum(self, tensors: list[torch.Tensor], opts: Any) -> None:
        """Reduce up to the top group, and broadcast down from there, so that all ranks have the same bytes."""
        for _, group in self._levels:
            group.allreduce(tensors, opts).wait()
        for members, group in reversed(self._levels):
            if members.step * FAN < self._size:
                _from(group, 0, tensors)

    def _spread(self, tensors: list[torch.Tensor], root: int) -> None:
        """Broadcast from ``root`` to all.

        First upwards, through the groups that contain ``root`` or the rank that stands for it on that level; then down
        through all other groups. Each group broadcasts once.
        """
        below = []
        for members, group in self._levels:
            stands = root - root % members.step
            if stands in members:
                _from(group, members.index(stands), tensors)
            else:
                below.append(group)
        for group in reversed(below):
            _from(group, 0, tensors)

    def _collect(self, own: torch.Tensor, rooms: Sequence[torch.Tensor]) -> None:
        """Gather everyone's ``own`` into ``rooms``.

        The ranks sum tables of bytes in which each has filled its own row only, so the sum is exact.
        """
        row = own.detach().contiguous().reshape(-1).view(torch.uint8)
        table = torch.zeros(self._size, row.numel(), dtype=torch.uint8)
        table[self._rank] = row
        self._sum([table], dist.AllreduceOptions())
        for room, bytes_ in zip(rooms, table, strict=False):
            room.copy_(bytes_.clone().view(own.dtype).reshape(room.shape))


def _from(group: Any, root: int, tensors: list[torch.Tensor]) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = root
    group.broadcast(tensors, options).wait()


def _unknown(name: str) -> Callable[..., Any]:
    def operation(self: Tree, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} over all {self._size} ranks: Odyssey's world knows sums, broadcasts, gathers and barriers. "
            "Use a group of this job's own for it."
        )

    return operation


_KNOWN = {
    "allreduce": Tree._allreduce,
    "barrier": Tree._barrier,
    "broadcast": Tree._broadcast,
    "reduce": Tree._reduce,
    "allgather": Tree._allgather,
    "_allgather_base": Tree._allgather_flat,
    "all_gather_single": Tree._allgather_flat,
    "gather": Tree._gather,
    "scatter": Tree._scatter,
}
for _name in OPERATIONS:
    setattr(Tree, _name, _KNOWN.get(_name) or _unknown(_name))


class _Later(dist._Work):
    """An operation of several parts, which run while it is waited for, since a wait can be left behind."""

    def __init__(self, run: Callable[[], None]):
        super().__init__()
        self._run: Callable[[], None] | None = run

    def wait(self, timeout: Any = None) -> bool:
        run, self._run = self._run, None
        if run is not None:
            run()
        return True

    def is_completed(self) -> bool:
        return self._run is None
