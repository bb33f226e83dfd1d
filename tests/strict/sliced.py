"""The stack of ``tests/execute/model.py`` as with a distributed optimizer: what each holder keeps of a layer's momentum
are slices, and the weights of others' slices are sent to it behind each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from odyssey_megatron.errors import TransferIncomplete
from odyssey_megatron.execute.scatter import Slices
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.slices import Span, elements, without
from odyssey_megatron.rebuild.manifest import Tensors
from tests.execute.alone import WIDTH, apply_step, initial
from tests.execute.held import Outcome, State
from tests.execute.model import Stack

Momenta = dict[Span, torch.Tensor]
"""Slice -> its momentum, 1-D."""


class Sliced(Stack):
    """Of a layer's piece in ``held`` there is one tensor, the weight. Of cells of one rank."""

    def __init__(self, device: str, *, tied: bool = False):
        super().__init__(device, tied=tied)
        self.states: dict[int, list[Momenta]] = {}
        """That are current, the one that is stepped first: others may go back to those behind it."""
        self._arriving: dict[int, Momenta] = {}
        self._lacking: dict[int, list[Span]] = {}
        self._layout, self._worker = Layout(holders=(), routes=()), -1

    def create_layers(self, layers: tuple[int, ...], kept: Mapping[int, tuple[Span, ...]]) -> None:
        for layer in layers:
            if layer not in self.held:
                self.held[layer] = {
                    name: [initial(layer, name).to(self._where["device"])] for name in self._names(layer)
                }
                spans = kept.get(layer, ())
                self.states[layer] = (
                    [{span: self._room(layer, span).zero_() for span in spans}] if spans else []
                )

    def _size(self, layer: int) -> int:
        """A tied embedding has no weight of its own."""
        return WIDTH * WIDTH if self._names(layer) else 0

    def _within(self, layer: int, span: Span) -> slice:
        return slice(*elements(span, self._size(layer)))

    def _room(self, layer: int, span: Span) -> torch.Tensor:
        here = self._within(layer, span)
        return torch.empty(here.stop - here.start, **self._where)

    def _empty(self, layer: int, name: str) -> list[torch.Tensor]:
        return super()._empty(layer, name)[:1]

    # -- what moves -----------------------------------------------------------------------------------------------

    def weights_of(self, layer: int, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        # What comes of a weight that is there already is what it is: microbatches in flight go on with it.
        pieces = self._incoming[layer] if layer in self._incoming else self.held[layer]
        return {
            f"{name} {span}": weight.data.view(-1)[self._within(layer, span)]
            for name, (weight,) in pieces.items()
            for span in spans
        }

    def expect(self, kept: Mapping[int, tuple[Span, ...]]) -> None:
        for layer, spans in kept.items():
            having = self.states.get(layer, [])
            if having and tuple(having[0]) == spans:
                continue
            if layer not in self.held:
                self._incoming[layer] = self._fresh(layer)
            made, lacking = {span: self._room(layer, span) for span in spans}, [*spans]
            for state in having:
                for span, momentum in state.items():
                    for wanted in lacking:
                        self._copy(layer, momentum, span, made, wanted)
                lacking = [*without(lacking, sorted(state))]
            self._arriving[layer], self._lacking[layer] = made, lacking

    def tensors_to_send(self, layer: int, part: int, span: Span) -> dict[str, torch.Tensor]:
        state = next(one for one in self.states[layer] if not [*without([span], sorted(one))])
        momentum = self._room(layer, span)
        for one, numbers in state.items():
            self._copy(layer, numbers, one, {span: momentum}, span)
        return self._moved(layer, part, span, momentum)

    def tensors_to_fill(self, layer: int, part: int, span: Span) -> dict[str, torch.Tensor]:
        return self._moved(layer, part, span, self._room(layer, span))

    def _moved(self, layer: int, part: int, span: Span, momentum: torch.Tensor) -> dict[str, torch.Tensor]:
        weights = self.weights_of(layer, part, [span])
        return weights | {"momentum": momentum} if weights else {}

    def filled(self, layer: int, part: int, span: Span, sent: Tensors) -> None:
        if sent:
            self._copy(layer, sent["momentum"], span, self._arriving[layer], span)
        self._lacking[layer] = [*without(self._lacking[layer], [span])]

    def settled(self) -> None:
        if unsent := [layer for layer, spans in self._lacking.items() if spans]:
            raise TransferIncomplete(f"no state of layer(s) {unsent} was sent")
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

    def slices(self, first: int, last: int, part: int) -> list[Any]:
        holders, states = self._layout.all_holders[first], self._layout.states
        if all(len(one.owners) == len(holders) for layer in range(first, last) for one in states[layer]):
            return []
        return [
            Slices(
                tuple(map(holders.index, one.owners)),
                [
                    self._gradients[layer, name].view(-1)[self._within(layer, one.span)]
                    for name in self._names(layer)
                ],
            )
            for layer in range(first, last)
            for one in states[layer]
        ]

    def apply(self, totals: torch.Tensor, checkpoint: Any) -> Outcome:
        kept = self._layout.spans_kept_by(self._worker)
        self.held = {layer: self.held[layer] for layer in self._mine}
        self.states = {layer: self.states[layer][:1] for layer in kept}
        for layer, spans in kept.items():
            (state,) = self.states[layer]
            assert tuple(state) == spans
            for name in self._names(layer):
                weight, gradient = self.held[layer][name][0].view(-1), self._gradients[layer, name].view(-1)
                for span, momentum in state.items():
                    here = self._within(layer, span)
                    apply_step(weight[here], momentum, gradient[here])
            checkpoint()
        loss, count = totals.tolist()
        return Outcome(losses={"loss": loss / count})

    def _copy(self, layer: int, numbers: torch.Tensor, span: Span, into: Momenta, wanted: Span) -> None:
        """What of ``wanted`` is in ``span``, which ``numbers`` are, goes to where it is ``into``."""
        for target, room in into.items():
            low = max(span[0], wanted[0], target[0])
            high = min(span[1], wanted[1], target[1])
            if low < high:
                start, stop = elements((low, high), self._size(layer))
                at, begins = self._within(layer, target).start, self._within(layer, span).start
                room[start - at : stop - at].copy_(numbers[start - begins : stop - begins])
