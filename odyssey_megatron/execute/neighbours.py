"""Messages and sums that are made between steps to be timed.

The messages are exchanged with workers that this one exchanges activations with, and the sums are over the
workers that hold the same layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.execute.channels import Channels
from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.placing.groups import Holders
from odyssey_megatron.plan.schedule import MESSAGE, SEND, Program

HolderGroups = Callable[[int, int], Holders[dist.ProcessGroup | None]]
_ROUNDS = 3
"""The fastest round counts, as the first also waits until the other side is there."""

Exchanged = dict[int, list[tuple[tuple[Any, Any], tuple[Any, Any]]]]
"""Worker -> for each round, the beginning and end of an empty message to it and one back, and the same with a
first message as large as an activation.
"""


Summed = dict[tuple[int, ...], list[tuple[Any, Any]]]
"""Workers -> for each round, the beginning of a sum over them, when all were there, and its end."""


class Neighbours:
    """The workers that one worker exchanges messages with in both directions, in one generation."""

    def __init__(
        self,
        program: Program,
        layout: Layout,
        cells: Cells,
        channels: Channels,
        holder_groups: HolderGroups,
    ):
        """Find the neighbours in ``program`` and ``layout``. Workers with another number of ranks are left out.

        Args:
            layout: The layout as this worker knows it.
            holder_groups: See :class:`Interpreter`.
        """
        self._worker, self._channels = cells.cell.worker, channels
        self._holder_groups, self._blocks = holder_groups, dict[tuple[int, ...], Block]()
        for block in layout.blocks():
            if (
                self._worker in block.holders
                and len(block.holders) > 1
                and all(map(cells.alike, block.holders))
            ):
                self._blocks.setdefault(block.holders, block)
        blocks = [block.first for block in layout.blocks()]
        seen: dict[int, dict[bool, set[int]]] = {}
        for one in program:
            if one.op in MESSAGE and cells.alike(one.peer):
                seen.setdefault(one.peer, {}).setdefault(one.op in SEND, set()).add(one.first)
        order = []
        for peer, ways in seen.items():
            if len(ways) == 2:
                edge = min(blocks.index(first) for both in ways.values() for first in both)
                order.append((edge % 2, edge, *sorted((self._worker, peer)), peer))
        self.order = tuple(peer for *_, peer in sorted(order))
        """The other ends of this worker's links. All workers take links in one order, so that nobody waits in
        a circle. Every other link of a pipeline comes first, as those do not wait for one another.
        """

    def exchange(self, message: torch.Tensor, now: Callable[[], Any]) -> Exchanged:
        """Exchange messages with each worker of :attr:`order`, which do the same. Nothing waits for a device.

        Args:
            message: A tensor of the shape of an activation, [s, b, h].
            now: Takes a mark of the time.
        """
        empty, found = message.new_zeros(1), Exchanged()
        for peer in self.order:
            found[peer] = []
            for _ in range(_ROUNDS):
                for begins in (self._worker < peer, self._worker > peer):
                    if begins:
                        short = self._to_and_back(peer, empty, empty, now)
                        found[peer].append((short, self._to_and_back(peer, message, empty, now)))
                    else:
                        for room in (empty, message):
                            self._pass(peer, torch.empty_like(room), sends=False)
                            self._pass(peer, empty, sends=True)
        return found

    def sums(self, message: torch.Tensor, now: Callable[[], Any]) -> Summed:
        """Sum tensors like ``message`` over the holders of the same layers, which do the same, layer by layer.

        The times of a sum are returned on the first of its holders only.
        """
        found = Summed()
        for holders, block in self._blocks.items():
            groups = self._holder_groups(block.first, block.last).groups
            group, rounds = groups[min(groups)], []
            for _ in range(_ROUNDS):
                dist.all_reduce(message.new_zeros(1), group=group)
                began = now()
                dist.all_reduce(torch.zeros_like(message), group=group)
                rounds.append((began, now()))
            if holders[0] == self._worker:
                found[holders] = rounds
        return found

    def _to_and_back(
        self, peer: int, there: torch.Tensor, back: torch.Tensor, now: Callable[[], Any]
    ) -> tuple[Any, Any]:
        began = now()
        self._pass(peer, there, sends=True)
        self._pass(peer, torch.empty_like(back), sends=False)
        return began, now()

    def _pass(self, peer: int, tensor: torch.Tensor, *, sends: bool) -> None:
        post = self._channels.send_beside if sends else self._channels.receive_beside
        post(peer, tensor).wait()
