"""A stack of small layers: what is computed where there is no Megatron. See ``alone.py``.

Its workers are single ranks; cells, whose tensor-parallel ranks have each some columns of a weight and whose
context-parallel ones some rows of a sequence; or gangs, over whose ranks experts are spread. Gradients are written out,
not autograd's: so what runs beside an input gradient does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.execute.interpreter import Needs
from odyssey_megatron.execute.reduction import Summands
from odyssey_megatron.execute.scatter import Slices
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.groups import cell_group_name
from tests.execute.alone import (
    HEAD,
    LAYERS,
    MICROBATCHES,
    OF_EVALUATIONS,
    ROWS,
    TIED,
    WIDTH,
    apply_step,
    has_experts,
    initial,
    of_step,
    routed,
    sequence,
)
from tests.execute.held import Held, Outcome

_ALONE = Cell(rank=0)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Pass(NamedTuple):
    """Of a sequence through a layer."""

    mixed: torch.Tensor
    hidden: torch.Tensor
    passed: Mapping[str, torch.Tensor]
    """By piece the rows that have come to these experts."""
    back: Callable[[torch.Tensor], tuple[torch.Tensor, Mapping[str, torch.Tensor]]] | None
    """The gradient of what experts have made -> of ``hidden``, and of what these experts have made."""


class Stack(Held):
    """Implements ``execute.parts.Model``: a layer is h = tanh((x + mean of all rows) W), and where there are experts
    each row h + h E of the one that it is routed to; of E tensor-parallel ranks have each a summand. The loss is the
    mean square of the output.

    With ``tied`` the embedding has no weight but the tied one, which the head adds to its own.
    """

    num_totals = 2

    def __init__(self, device: str = "cpu", cell: Cell = _ALONE, *, tied: bool = False) -> None:
        super().__init__()
        self._where: dict[str, Any] = {"device": torch.device(device), "dtype": torch.float64}
        self._cell, self._tied, self._groups = cell, tied, dict[str, Any]()
        self._rows = _rows_of(cell)
        """Of each sequence those that this rank has."""
        self._mine: tuple[int, ...] = ()
        self._flights: dict[tuple[int, int], list[Any]] = {}
        """(microbatch, layer) -> of each layer from there on its :class:`_Pass` of each sequence; behind the input
        gradient its weight gradients by piece; None: they are added up."""
        self._spans: dict[tuple[int, int, str], torch.Tensor] = {}
        """(first and last layer of a block, piece) -> gradients."""
        self._gradients: dict[tuple[int, str], torch.Tensor] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._ahead: dict[tuple[int, int], torch.Tensor | None] = {}
        """Of visits that are run ahead, their losses."""
        self._step = self._first = 0
        self.room: Callable[[], bool] = lambda: True
        self.begins: Callable[[], None] = lambda: None
        """Told of each step."""
        self.pinned: Callable[[torch.Tensor], torch.Tensor] = lambda own: own
        """Puts a tensor of the host's where the device reads it by itself."""

    def enter(self, groups: Any) -> None:
        """Those of a generation."""
        self._groups = groups

    # -- layers ---------------------------------------------------------------------------------------------------

    def _names(self, layer: int) -> list[str]:
        own = [] if self._tied and layer == 0 else [f"w{part}" for part in self._cell.held_shards]
        spread = has_experts(layer, self._cell.full_expert)
        return own + [f"e{part}" for part in self._cell.parts.held if spread]

    def _of_part(self, layer: int, part: int) -> list[str]:
        """Ranks of a gang have the same weight, and each other experts."""
        return [
            name for name in self._names(layer) if name in (f"w{part % self._cell.full_tensor}", f"e{part}")
        ]

    def _begun(self, layer: int, name: str) -> list[torch.Tensor]:
        momentum = torch.zeros(self._shape(name), **self._where)
        return [initial(layer, name, self._cell.full_tensor).to(momentum.device), momentum]

    def _empty(self, layer: int, name: str) -> list[torch.Tensor]:
        return [torch.empty(self._shape(name), **self._where) for _ in range(2)]

    def _shape(self, name: str) -> tuple[int, int]:
        return WIDTH, WIDTH // self._cell.full_tensor if name[0] == "w" else WIDTH

    def take_layout(self, layout: Layout, worker: int) -> None:
        super().take_layout(layout, worker)
        self._mine = layout.held_by(worker)
        before, self._spans, self._gradients = self._gradients, {}, {}
        for block in layout.blocks():
            layers = range(block.first, block.last) if worker in block.holders else ()
            for name in sorted({name for layer in layers for name in self._names(layer)}):
                having = [layer for layer in layers if name in self._names(layer)]
                shape = self._shape(name)
                span = torch.zeros(len(having) * shape[0] * shape[1], **self._where)
                self._spans[block.first, block.last, name] = span
                for layer, piece in zip(having, span.chunk(len(having)), strict=True):
                    self._gradients[layer, name] = piece.view(shape)
        for key in before.keys() & self._gradients.keys():
            self._gradients[key].copy_(before[key])

    def _weight(self, layer: int) -> torch.Tensor:
        """All columns that this rank has."""
        own = [self.held[at] for at in ((layer, TIED) if self._tied and layer in (0, HEAD) else (layer,))]
        columns = [
            _together([piece[0] for name, piece in sorted(one.items()) if name[0] == "w"], dim=1)
            for one in own
            if one
        ]
        return columns[0] if len(columns) == 1 else columns[0] + columns[1]

    # -- a step ---------------------------------------------------------------------------------------------------

    def microbatches_of(self, step: int) -> int:
        return MICROBATCHES

    def begin_step(self, step: int) -> None:
        self.begins()
        self._step = step
        self._begin(of_step(step, self._cell.full_lanes))
        for span in self._spans.values():
            span.zero_()

    def begin_evaluation(self, first: int, microbatches: int) -> None:
        self._begin(OF_EVALUATIONS + first * self._cell.full_lanes)

    def _begin(self, first: int) -> None:
        self._first = first
        self._flights.clear()
        self._ahead.clear()
        self._losses.clear()

    def _numbers(self, microbatch: int, lanes: Iterable[int]) -> list[int]:
        return [self._first + microbatch * self._cell.full_lanes + lane for lane in lanes]

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
        if not self.room():
            raise torch.OutOfMemoryError("no room for an activation")
        numbers = self._numbers(microbatch, self._cell.held_lanes)
        if activation is None:
            own = _together([sequence(one)[self._rows] for one in numbers])
            activation = self.pinned(own).to(self._where["device"], non_blocking=True)
        flight, x = [], activation
        for layer in range(first, last):
            for one in (layer, TIED) if self._tied and layer in (0, HEAD) else (layer,):
                if needs is not None:
                    needs(one)
            # Lanes take their turns, each exchanging rows with the others' of that turn.
            rows = enumerate(_chunks(x, len(numbers)))
            found = [self._pass(layer, row, turn, microbatch) for turn, row in rows]
            flight.append([one for one, _ in found])
            x = _together([output for _, output in found])
        loss = x.square().sum() / (ROWS * WIDTH) if last == LAYERS else None
        if ahead:
            self._ahead[microbatch, first] = loss
        elif loss is not None:
            self._losses[microbatch] = loss
        self._flights[microbatch, first] = [*flight, x]
        return x

    def drop_flights(self) -> None:
        self._flights.clear()

    def adopt(self, visits: Any) -> None:
        ours = {(microbatch, first) for microbatch, first, _ in visits}
        for place, loss in self._ahead.items():
            if place not in ours:
                del self._flights[place]
            elif loss is not None:
                self._losses[place[0]] = loss
        self._ahead = {}

    def undo(self, visits: Any) -> None:
        for microbatch, first, last in visits:
            self._flights.pop((microbatch, first), None)
            self._ahead.pop((microbatch, first), None)
            if last == LAYERS:
                self._losses.pop(microbatch, None)

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
        passed = passed or (lambda layer: None)
        passed(last)
        flight = self._flights[microbatch, first]
        output = flight.pop()
        if grad is None:
            grad = 2 * output / (ROWS * WIDTH) * (1.0 if word is None else word)
        for layer in reversed(range(first, last)):
            sums: dict[str, torch.Tensor] = {}
            passes = flight[layer - first]
            rows = [*zip(passes, _chunks(grad, len(passes)), strict=True)]
            grad = _together([self._pass_back(layer, one, row, sums) for one, row in reversed(rows)][::-1])
            flight[layer - first] = sums
            if layer > first:
                passed(layer)
        return grad

    def weight_grad(self, microbatch: int, first: int, last: int) -> None:
        begin = max(at for one, at in self._flights if one == microbatch and at <= first)
        found = self._flights[microbatch, begin]
        for layer in range(first, last):
            for name, own in found[layer - begin].items():
                if (layer, name) in self._gradients:
                    self._gradients[layer, name] += own
                if self._tied and layer in (0, HEAD):
                    self._gradients[TIED, name] += own
            found[layer - begin] = None
        if not any(one is not None for one in found):
            del self._flights[microbatch, begin]

    def summands(self, first: int, last: int, part: int, *, spread: bool) -> Summands:
        name = f"e{part}" if spread else f"w{part}"
        return Summands(self._summed(first, last, name), self._slices(first, last, name))

    def _slices(self, first: int, last: int, name: str) -> list[Slices]:
        return []

    def _summed(self, first: int, last: int, name: str) -> list[torch.Tensor]:
        for (low, high, one), span in self._spans.items():
            if one == name and low <= first and last <= high:
                sizes = [
                    self._gradients[at, name].numel()
                    for at in range(low, high)
                    if (at, name) in self._gradients
                ]
                before = sum((at, name) in self._gradients for at in range(low, first))
                count = sum((at, name) in self._gradients for at in range(first, last))
                return [span[before * sizes[0] : (before + count) * sizes[0]]] if count else []
        return []

    def empty_message(self) -> torch.Tensor:
        return torch.empty(len(self._rows) * self._cell.lane_each, WIDTH, **self._where)

    def local_totals(self) -> torch.Tensor:
        """Of tensor-parallel ranks, which have the same loss, one counts."""
        totals = torch.zeros(2, **self._where)
        if self._cell.tensor_rank == 0:
            for loss in self._losses.values():
                totals[0] += loss
            totals[1] += len(self._losses) * self._cell.lane_each * len(self._rows) / ROWS
        return totals

    def suspect(self, microbatches: Any) -> None:
        pass

    def apply(self, totals: torch.Tensor, checkpoint: Any) -> Outcome:
        for (layer, name), gradient in self._gradients.items():
            apply_step(*self.held[layer][name], gradient, self._cell.full_lanes)
            checkpoint()
        self.held = {layer: self.held[layer] for layer in self._mine}
        loss, count = totals.tolist()
        return Outcome(losses={"loss": loss / count})

    def samples_of_losses(self) -> dict[int, list[int]]:
        return {m: [self._step * MICROBATCHES + m] for m in self._losses}

    # -- a layer --------------------------------------------------------------------------------------------------

    def _pass(self, layer: int, x: torch.Tensor, turn: int, microbatch: int) -> tuple[_Pass, torch.Tensor]:
        mixed = torch.add(x, self._over_rows(x.sum(0)), alpha=1 / ROWS)
        hidden = torch.tanh(self._over_columns(mixed @ self._weight(layer)))
        if not has_experts(layer, self._cell.full_expert):
            return _Pass(mixed, hidden, {}, None), hidden
        gang = [replace(self._cell, rank=rank) for rank in self._cell.expert_ranks]
        # In each turn every rank of the gang has a sequence, or some rows of one.
        numbers = [self._numbers(microbatch, one.held_lanes)[turn] for one in gang]
        experts = [
            [routed(number, layer, self._cell.full_expert)[row] for row in _rows_of(one)]
            for number, one in zip(numbers, gang, strict=True)
        ]
        exchange = _Exchange(self._cell, lambda: self._groups, experts)
        experts = {name: piece[0] for name, piece in self.held[layer].items() if name[0] == "e"}
        came = exchange.there(hidden)
        made = exchange.back({name: rows @ experts[name] for name, rows in came.items()})
        self._sum(made, self._cell.tensor_ranks)

        def back(grad: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
            of_made = exchange.there(grad)
            of_hidden = exchange.back({name: rows @ experts[name].t() for name, rows in of_made.items()})
            self._sum(of_hidden, self._cell.tensor_ranks)
            return of_hidden, of_made

        return _Pass(mixed, hidden, came, back), hidden + made

    def _pass_back(
        self, layer: int, one: _Pass, grad: torch.Tensor, sums: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        if one.back is not None:
            of_hidden, of_made = one.back(grad)
            grad = grad + of_hidden
            for name, rows in of_made.items():
                _add(sums, name, one.passed[name].t() @ rows)
        width = WIDTH // self._cell.full_tensor
        held = self._cell.held_shards
        inner = torch.ops.aten.tanh_backward(grad, one.hidden)
        if len(held) < self._cell.full_tensor:
            inner = inner[:, held.start * width : held.stop * width]
        for part, columns in zip(held, _chunks(one.mixed.t() @ inner, len(held), dim=1), strict=True):
            _add(sums, f"w{part}", columns)
        mixed_grad = inner @ self._weight(layer).t()
        self._sum(mixed_grad, self._cell.tensor_ranks)
        return torch.add(mixed_grad, self._over_rows(mixed_grad.sum(0)), alpha=1 / ROWS)

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


def _rows_of(cell: Cell) -> list[int]:
    """Of each sequence that a rank computes, the rows that it has."""
    ends = 2 * cell.full_context if cell.full_context > 1 else 1
    pieces, each = cell.pieces(False), ROWS // ends
    of_lane, first = pieces[: len(pieces) // cell.lane_each], cell.held_lanes.start * ends
    return [(piece - first) * each + at for piece in of_lane for at in range(each)]


def _chunks(tensor: torch.Tensor, count: int, dim: int = 0) -> Sequence[torch.Tensor]:
    return [tensor] if count == 1 else tensor.chunk(count, dim)


def _together(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim)


def _add(sums: dict[str, torch.Tensor], name: str, own: torch.Tensor) -> None:
    sums[name] = sums[name] + own if name in sums else own


class _Exchange:
    """Rows on their way to experts, and back: an all-to-all each, of sizes that all ranks of the gang know."""

    def __init__(self, cell: Cell, groups: Callable[[], Any], experts: Sequence[Sequence[int]]):
        """``groups``: those of the generation by then; ``experts``: of each rank of the gang, those of its rows."""
        ranks, each = cell.expert_ranks, cell.expert_each
        self._groups, self._name = groups, cell_group_name(ranks) if len(ranks) > 1 else ""
        me = ranks.index(cell.rank)
        self._order = sorted(range(len(experts[me])), key=lambda row: experts[me][row])
        self._own = range(me * each, (me + 1) * each)
        self._names = [f"e{one * cell.tensor + cell.tensor_rank}" for one in self._own]
        self._sent = [sum(one // each == rank for one in experts[me]) for rank in range(len(ranks))]
        self._pieces = [[own.count(one) for one in self._own] for own in experts]
        """Of each rank, the rows that come from it for each of this rank's experts."""

    def there(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """By piece what has come for these experts."""
        each = rows.split(1)
        sent = torch.cat([each[at] for at in self._order])
        came = self._all_to_all(sent, self._come, self._sent)
        pieces = torch.split(came, [one for own in self._pieces for one in own])
        each = len(self._own)
        return {name: _together(pieces[at::each]) for at, name in enumerate(self._names)}

    def back(self, made: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """``made`` of what has come, where it came from, row by row."""
        parts = [
            torch.split(made[name], [own[at] for own in self._pieces]) for at, name in enumerate(self._names)
        ]
        returned = torch.cat([one for of_rank in zip(*parts, strict=True) for one in of_rank])
        here = self._all_to_all(returned, self._sent, self._come)
        each = here.split(1)
        return torch.cat([each[at] for at in sorted(range(len(each)), key=lambda at: self._order[at])])

    @property
    def _come(self) -> list[int]:
        return [sum(own) for own in self._pieces]

    def _all_to_all(self, given: torch.Tensor, come: list[int], sent: list[int]) -> torch.Tensor:
        if not self._name:
            return given
        taken = given.new_empty(sum(come), given.shape[1])
        dist.all_to_all_single(taken, given.contiguous(), come, sent, group=self._groups()[self._name])
        return taken
