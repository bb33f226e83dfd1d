"""The stack of ``tests/execute/model.py`` as with a distributed optimizer: what each holder keeps of a layer's momentum
are slices, and the weights of others' slices are sent to it behind each step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.errors import TransferIncomplete
from odyssey_megatron.execute.scatter import Slices
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import Span, elements, without
from odyssey_megatron.plan.placing.stretches import Stretches, kept_by, of_kind
from odyssey_megatron.rebuild.manifest import Tensors
from tests.execute.alone import apply_step
from tests.execute.held import Outcome, State
from tests.execute.model import Stack

Momenta = dict[Span, dict[str, torch.Tensor]]
"""Slice -> by the names of a layer's pieces its momentum of each, 1-D: each piece is cut by itself."""


class Sliced(Stack):
    """Of a layer's piece in ``held`` there is one tensor, the weight."""

    def __init__(self, device: str, cell: Cell, *, tied: bool = False):
        super().__init__(device, cell, tied=tied)
        self.states: dict[int, list[Momenta]] = {}
        """That are current, the one that is stepped first: others may go back to those behind it."""
        self._arriving: dict[int, Momenta] = {}
        self._lacking: dict[tuple[int, str], list[Span]] = {}
        """Of a layer's piece."""
        self._layout, self._worker = Layout(holders=(), routes=()), -1

    @property
    def current(self) -> tuple[int, ...]:
        """Layers under the layout at hand. Of others, which go with the next step, a failure may have cut off the
        weights of slices that others have stepped.
        """
        return self._mine

    def create_layers(self, layers: tuple[int, ...], kept: Mapping[int, tuple[Span, ...]]) -> None:
        for layer in layers:
            if layer not in self.held:
                self.held[layer] = {name: self._begun(layer, name)[:1] for name in self._names(layer)}
            spans = kept.get(layer, ())
            if layer not in self.states or spans != tuple(span for one in self.states[layer] for span in one):
                made = self._rooms(layer, spans)
                for momentum in (one for pieces in made.values() for one in pieces.values()):
                    momentum.zero_()
                self.states[layer] = [made] if made else []

    def _named(self, layer: int, part: int, span: Span) -> list[str]:
        """The pieces of ``part`` that ``span`` has anything of."""
        return [name for name in self._of_part(layer, part) if _of(name, span) is not None]

    def _within(self, name: str, span: Span) -> slice:
        own = _of(name, span)
        return slice(*elements(own or (0, 0), math.prod(self._shape(name))))

    def _room(self, name: str, span: Span) -> torch.Tensor:
        here = self._within(name, span)
        return torch.empty(here.stop - here.start, **self._where)

    def _rooms(self, layer: int, spans: Sequence[Span]) -> Momenta:
        return {span: {name: self._room(name, span) for name in self._names(layer)} for span in spans}

    def _empty(self, layer: int, name: str) -> list[torch.Tensor]:
        return super()._empty(layer, name)[:1]

    # -- what moves -----------------------------------------------------------------------------------------------

    def weights_of(self, layer: int, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        # What comes of a weight that is there already is what it is: microbatches in flight go on with it.
        pieces = self._incoming[layer] if layer in self._incoming else self.held[layer]
        return {
            f"{name} {span}": pieces[name][0].data.view(-1)[self._within(name, span)]
            for span in spans
            for name in self._named(layer, part, span)
        }

    def expect(self, kept: Mapping[int, tuple[Span, ...]]) -> None:
        for layer, spans in kept.items():
            having = self.states.get(layer, [])
            if having and tuple(having[0]) == spans:
                continue
            if layer not in self.held:
                self._incoming[layer] = self._fresh(layer)
            made, lacking = self._rooms(layer, spans), [*spans]
            for state in having:
                for span, pieces in state.items():
                    for wanted in lacking:
                        self._copy(pieces, span, made, wanted)
                lacking = [*without(lacking, sorted(state))]
            self._arriving[layer] = made
            self._lacking |= {
                (layer, name): [span for span in lacking if _of(name, span) is not None]
                for name in self._names(layer)
            }

    def tensors_to_send(self, layer: int, part: int, span: Span) -> dict[str, torch.Tensor]:
        state = next(one for one in self.states[layer] if not [*without([span], sorted(one))])
        momenta = {name: self._room(name, span) for name in self._named(layer, part, span)}
        for one, pieces in state.items():
            self._copy({name: pieces[name] for name in momenta}, one, {span: momenta}, span)
        return self._moved(layer, part, span, momenta)

    def tensors_to_fill(self, layer: int, part: int, span: Span) -> dict[str, torch.Tensor]:
        rooms = {name: self._room(name, span) for name in self._named(layer, part, span)}
        return self._moved(layer, part, span, rooms)

    def _moved(
        self, layer: int, part: int, span: Span, momenta: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return self.weights_of(layer, part, [span]) | {f"{name}.m": one for name, one in momenta.items()}

    def filled(self, layer: int, part: int, span: Span, sent: Tensors) -> None:
        names = self._named(layer, part, span)
        self._copy({name: sent[f"{name}.m"] for name in names}, span, self._arriving[layer], span)
        for name in names:
            self._lacking[layer, name] = [*without(self._lacking[layer, name], [span])]

    def settled(self) -> None:
        if unsent := [place for place, spans in self._lacking.items() if spans]:
            raise TransferIncomplete(f"no state of {unsent} was sent")
        for layer, state in self._arriving.items():
            self.states[layer] = [state, *self.states.get(layer, [])]
        self.held.update(self._incoming)
        self.discard_incoming()

    def discard_incoming(self) -> None:
        super().discard_incoming()
        self._arriving.clear()
        self._lacking.clear()

    def forget(self) -> None:
        super().forget()
        self.states.clear()

    def take_layout(self, layout: Layout, worker: int) -> None:
        self.held.update(self._incoming)
        self._incoming.clear()
        for layer in layout.held_by(worker):  # of some only weights, which come like after every step
            if layer not in self.held:
                self.held[layer] = self._fresh(layer)
        self._layout, self._worker = layout, worker
        super().take_layout(layout, worker)

    def _fresh(self, layer: int) -> State:
        return {name: self._empty(layer, name) for name in self._names(layer)}

    # -- one step -------------------------------------------------------------------------------------------------

    def _slices(self, first: int, last: int, name: str) -> list[Slices]:
        holders, states = self._layout.all_holders[first], self._layout.states
        kind = Stretches.of(self._cell, self._layout).kinds[-1 if name[0] == "e" else 0]
        count, every = kind.stretches, [states[layer] for layer in range(first, last)]
        if count == 1 and all(len(one.owners) == len(holders) for found in every for one in found):
            return []
        return [
            Slices(
                tuple(map(holders.index, one.owners)),
                [self._gradients[layer, name].view(-1)[self._within(name, kind.cut(one.span, stretch))]]
                if (layer, name) in self._gradients
                else [],
                stretch,
                count,
            )
            for layer in range(first, last)
            for one in states[layer]
            for stretch in range(count)
        ]

    def apply(self, totals: torch.Tensor, checkpoint: Any) -> Outcome:
        kept = kept_by(self._cell, self._layout, self._worker)
        self.held = {layer: self.held[layer] for layer in self._mine}
        self.states = {layer: self.states[layer][:1] for layer in kept}
        for layer, spans in kept.items():
            (state,) = self.states[layer]
            assert tuple(state) == spans
            for name in self._names(layer):
                weight, gradient = self.held[layer][name][0].view(-1), self._gradients[layer, name].view(-1)
                for span, momenta in state.items():
                    here = self._within(name, span)
                    apply_step(weight[here], momenta[name], gradient[here], self._cell.full_lanes)
            checkpoint()
        loss, count = totals.tolist()
        return Outcome(losses={"loss": loss / count})

    def _copy(self, pieces: Mapping[str, torch.Tensor], span: Span, into: Momenta, wanted: Span) -> None:
        """What of ``wanted`` is in ``span``, which ``pieces`` are of, goes to where it is ``into``."""
        for target, rooms in into.items():
            low = max(span[0], wanted[0], target[0])
            high = min(span[1], wanted[1], target[1])
            for name, numbers in pieces.items() if low < high else ():
                here = self._within(name, (low, high))
                at, begins = self._within(name, target).start, self._within(name, span).start
                rooms[name][here.start - at : here.stop - at].copy_(
                    numbers[here.start - begins : here.stop - begins]
                )


def _of(name: str, span: Span) -> Span | None:
    """What ``span`` has of a piece of that ``name``, an expert's or another."""
    return of_kind(span, spread=name[0] == "e")
