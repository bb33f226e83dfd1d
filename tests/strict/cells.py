"""A stack of small layers whose workers are cells: tensor-parallel ranks have each some columns of a weight, and
context-parallel ones each some rows of a sequence. They exchange both within each forward and each input gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.execute.interpreter import Needs
from odyssey_megatron.plan.groups import cell_group_name
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.slices import Span
from tests.execute.stack import (
    LAYERS,
    MICROBATCHES,
    WIDTH,
    CellOfOne,
    NoLossScale,
    Outcome,
    apply_step,
    by_number,
    initial,
)

ROWS = 8
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def sequence(step: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)


class CellStack(CellOfOne):
    """Implements ``execute.parts.Model``: layer i is x -> tanh((x + mean of all rows) W_i)."""

    num_totals = 2
    share = 1.0
    loss_scale = NoLossScale()

    def __init__(self, device: str, cell: Cell):
        self._where: dict[str, Any] = {"device": torch.device(device), "dtype": torch.float64}
        self._cell, self._groups = cell, dict[str, Any]()
        pieces, each = cell.pieces(False), ROWS // (2 * cell.full_context if cell.full_context > 1 else 1)
        self._rows = [piece * each + at for piece in pieces for at in range(each)]
        self._width = WIDTH // cell.full_tensor
        self.held: dict[int, dict[int, list[torch.Tensor]]] = {}
        """Layer -> part of it -> columns of the weight, and their momentum."""
        self._incoming: dict[int, dict[int, list[torch.Tensor]]] = {}
        self._flights: dict[tuple[int, int], list[Any]] = {}
        self._spans: dict[tuple[int, int, int], torch.Tensor] = {}
        self._gradients: dict[tuple[int, int], torch.Tensor] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._step = 0
        self.begins: Callable[[], None] = lambda: None

    def enter(self, groups: Any) -> None:
        """Those of a generation."""
        self._groups = groups

    # -- layers ---------------------------------------------------------------------------------------------------

    def create_layers(self, layers: tuple[int, ...], kept: Mapping[int, tuple[Span, ...]]) -> None:
        for layer in layers:
            self.held.setdefault(layer, {part: self._columns(layer, part) for part in self._cell.held_shards})

    def _columns(self, layer: int, part: int) -> list[torch.Tensor]:
        own = initial(layer)[:, part * self._width : (part + 1) * self._width].clone()
        momentum = torch.zeros(WIDTH, self._width, **self._where)
        return [own.to(momentum.device), momentum]

    def moved_bytes(self, layer: int) -> int:
        return sum(one.nbytes for own in self.held[layer].values() for one in own)

    def weights_of(self, layer: int, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        return {str(layer): self.held[layer][part][0]}

    def tensors_to_send(self, layer: int, part: int, span: Span) -> dict[str, torch.Tensor]:
        return by_number(self.held[layer][part])

    def tensors_to_fill(self, layer: int, part: int, span: Span) -> dict[str, torch.Tensor]:
        room = [torch.empty(WIDTH, self._width, **self._where) for _ in range(2)]
        self._incoming.setdefault(layer, {})[part] = room
        return by_number(room)

    def discard_incoming(self) -> None:
        self._incoming.clear()

    def forget(self) -> None:
        self.discard_incoming()
        self.held.clear()

    def take_layout(self, layout: Layout, worker: int) -> None:
        self.held.update(self._incoming)
        self._incoming.clear()
        before, size = self._gradients, WIDTH * self._width
        self._spans, self._gradients = {}, {}
        for block in layout.blocks():
            for part in self._cell.held_shards if worker in block.holders else ():
                span = torch.zeros((block.last - block.first) * size, **self._where)
                self._spans[block.first, block.last, part] = span
                for at, piece in enumerate(span.split(size)):
                    self._gradients[block.first + at, part] = piece.view(WIDTH, self._width)
        for key in before.keys() & self._gradients.keys():
            self._gradients[key].copy_(before[key])

    # -- a step ---------------------------------------------------------------------------------------------------

    def microbatches_of(self, step: int) -> int:
        return MICROBATCHES

    def begin_step(self, step: int) -> None:
        self.begins()
        self._step = step
        self._flights.clear()
        self._losses.clear()
        for span in self._spans.values():
            span.zero_()

    def forward(
        self,
        microbatch: int,
        first: int,
        last: int,
        activation: torch.Tensor | None,
        *,
        ahead: bool = False,
        needs: Needs = None,
    ) -> torch.Tensor:
        x, flight = activation, []
        if x is None:
            own = sequence(self._step, microbatch)[self._rows]
            x = own.to(self._where["device"], non_blocking=True)
        for layer in range(first, last):
            mixed = x + self._over_rows(x.sum(0)) / ROWS
            x = torch.tanh(self._over_columns(mixed @ self._weight(layer)))
            flight.append((mixed, x))
        if last == LAYERS:
            self._losses[microbatch] = x.square().sum() / (ROWS * WIDTH)
        self._flights[microbatch, first] = flight
        return x

    def input_grad(
        self,
        microbatch: int,
        first: int,
        last: int,
        grad: torch.Tensor | None,
        *,
        word: Any = None,
        passed: Callable[[int], None] | None = None,
    ) -> torch.Tensor | None:
        flight = self._flights[microbatch, first]
        if grad is None:
            grad = 2 * flight[-1][1] / (ROWS * WIDTH) * word
        low = self._cell.held_shards.start * self._width
        high = self._cell.held_shards.stop * self._width
        for at in reversed(range(len(flight))):
            mixed, y = flight[at]
            inner = (grad * (1 - y.square()))[:, low:high]
            flight[at] = mixed.t() @ inner
            mixed_grad = inner @ self._weight(first + at).t()
            self._sum(mixed_grad, self._cell.tensor_ranks)
            grad = mixed_grad + self._over_rows(mixed_grad.sum(0)) / ROWS
        return grad

    def weight_grad(self, microbatch: int, first: int, last: int) -> None:
        begin = max(at for one, at in self._flights if one == microbatch and at <= first)
        found = self._flights[microbatch, begin]
        for layer in range(first, last):
            columns = found[layer - begin].split(self._width, dim=1)
            for part, own in zip(self._cell.held_shards, columns, strict=True):
                self._gradients[layer, part] += own
            found[layer - begin] = None
        if not any(one is not None for one in found):
            del self._flights[microbatch, begin]

    def adopt(self, visits: Any) -> None: ...
    def timed(self, compute_s: Any) -> None: ...
    def kept(self, microbatch: int, first: int, last: int) -> None: ...

    def undo(self, visits: Any) -> None:
        for microbatch, first, last in visits:
            self._flights.pop((microbatch, first), None)
            if last == LAYERS:
                self._losses.pop(microbatch, None)

    def gradients(self, first: int, last: int, part: int) -> list[torch.Tensor]:
        begin = max(at for at, _, _ in self._spans if at <= first)
        whole = next(span for (at, _, one), span in self._spans.items() if (at, one) == (begin, part))
        size = WIDTH * self._width
        return [whole[(first - begin) * size : (last - begin) * size]]

    def empty_message(self) -> torch.Tensor:
        return torch.empty(len(self._rows), WIDTH, **self._where)

    def local_totals(self) -> torch.Tensor:
        """Of tensor-parallel ranks, which have the same loss, one counts."""
        totals = torch.zeros(2, **self._where)
        if self._cell.tensor_rank == 0:
            for loss in self._losses.values():
                totals[0] += loss
            totals[1] += len(self._losses) * len(self._rows) / ROWS
        return totals

    def apply(self, totals: torch.Tensor, checkpoint: Any) -> Outcome:
        for (layer, part), gradient in self._gradients.items():
            apply_step(*self.held[layer][part], gradient)
            checkpoint()
        layers = {layer for layer, _ in self._gradients}
        self.held = {layer: own for layer, own in self.held.items() if layer in layers}
        loss, count = totals.tolist()
        return Outcome(losses={"loss": loss / count})

    def samples_of_losses(self) -> dict[int, list[int]]:
        return {m: [self._step * MICROBATCHES + m] for m in self._losses}

    # -- within the cell ------------------------------------------------------------------------------------------

    def _weight(self, layer: int) -> torch.Tensor:
        return torch.cat([own[0] for _, own in sorted(self.held[layer].items())], dim=1)

    def _sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            dist.all_reduce(tensor, group=self._groups[cell_group_name(ranks)])

    def _over_rows(self, own: torch.Tensor) -> torch.Tensor:
        self._sum(own, self._cell.context_ranks)
        return own

    def _over_columns(self, own: torch.Tensor) -> torch.Tensor:
        ranks = self._cell.tensor_ranks
        if len(ranks) == 1:
            return own
        every = own.new_empty(len(ranks) * own.shape[0], own.shape[1])
        _all_gather(every, own.contiguous(), group=self._groups[cell_group_name(ranks)])
        return torch.cat(every.chunk(len(ranks)), dim=1)


def undisturbed(steps: int) -> tuple[list[float], dict[int, torch.Tensor]]:
    """The same in one process: losses and final weights."""
    weights = {layer: initial(layer) for layer in range(LAYERS)}
    momenta = {layer: torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for layer in range(LAYERS)}
    losses = []
    for step in range(steps):
        with torch.enable_grad():
            leaves = [weights[layer].detach().requires_grad_() for layer in range(LAYERS)]
            total = torch.zeros((), dtype=torch.float64)
            for microbatch in range(MICROBATCHES):
                x = sequence(step, microbatch)
                for leaf in leaves:
                    x = torch.tanh((x + x.mean(0)) @ leaf)
                total = total + x.square().mean()
            gradients = torch.autograd.grad(total, leaves)
        losses.append(float(total.detach()) / MICROBATCHES)
        for layer, gradient in enumerate(gradients):
            apply_step(weights[layer], momenta[layer], gradient)
    return losses, weights
