"""The stack of ``tests/execute/stack.py`` as with a distributed optimizer: what each holder keeps of a layer's momentum
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
from tests.execute.stack import WIDTH, Outcome, Stack, apply_step, initial

SIZE = WIDTH * WIDTH
State = dict[Span, torch.Tensor]
"""Slice -> its momentum, 1-D."""


class Sliced(Stack):
    """Of a layer's ``held`` tensors there is one, the weight."""

    def __init__(self, device: str):
        super().__init__(device)
        self.states: dict[int, list[State]] = {}
        """That are current, the one that is stepped first: others may go back to those behind it."""
        self._arriving: dict[int, State] = {}
        self._lacking: dict[int, list[Span]] = {}
        self._layout, self._worker = Layout(holders=(), routes=()), -1

    def create_layers(self, layers: tuple[int, ...], kept: Mapping[int, tuple[Span, ...]]) -> None:
        for layer in layers:
            if layer not in self.held:
                self.held[layer] = [initial(layer).to(self._where["device"])]
                spans = kept.get(layer, ())
                self.states[layer] = [{span: self._room(span).zero_() for span in spans}] if spans else []

    def _room(self, span: Span) -> torch.Tensor:
        low, high = elements(span, SIZE)
        return torch.empty(high - low, **self._where)

    # -- what moves -----------------------------------------------------------------------------------------------

    def weights_of(self, layer: int, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        # What comes of a weight that is there already is what it is: microbatches in flight go on with it.
        weight = (self._incoming.get(layer) or self.held[layer])[0].data.view(-1)
        return {f"{layer} {span}": weight[slice(*elements(span, SIZE))] for span in spans}

    def expect(self, kept: Mapping[int, tuple[Span, ...]]) -> None:
        for layer, spans in kept.items():
            having = self.states.get(layer, [])
            if having and tuple(having[0]) == spans:
                continue
            if layer not in self.held:
                self._incoming[layer] = [torch.empty(WIDTH, WIDTH, **self._where)]
            made, lacking = {span: self._room(span) for span in spans}, [*spans]
            for state in having:
                for span, momentum in state.items():
                    for wanted in lacking:
                        _copy(momentum, span, made, wanted)
                lacking = [*without(lacking, sorted(state))]
            self._arriving[layer], self._lacking[layer] = made, lacking

    def tensors_to_send(self, layer: int, part: int, span: Span) -> dict[str, torch.Tensor]:
        state = next(one for one in self.states[layer] if not [*without([span], sorted(one))])
        momentum = self._room(span)
        for one, numbers in state.items():
            _copy(numbers, one, {span: momentum}, span)
        return self.weights_of(layer, part, [span]) | {"momentum": momentum}

    def tensors_to_fill(self, layer: int, part: int, span: Span) -> dict[str, torch.Tensor]:
        return self.weights_of(layer, part, [span]) | {"momentum": self._room(span)}

    def filled(self, layer: int, part: int, span: Span, sent: Tensors) -> None:
        _copy(sent["momentum"], span, self._arriving[layer], span)
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
            self.held.setdefault(layer, [torch.empty(WIDTH, WIDTH, **self._where)])
        self._layout, self._worker = layout, worker
        super().take_layout(layout, worker)

    # -- one step -------------------------------------------------------------------------------------------------

    def slices(self, first: int, last: int, part: int) -> list[Any]:
        holders, states = self._layout.holders[first], self._layout.states
        if all(len(one.owners) == len(holders) for layer in range(first, last) for one in states[layer]):
            return []
        return [
            Slices(
                tuple(map(holders.index, one.owners)),
                [self._gradients[layer].view(-1)[slice(*elements(one.span, SIZE))]],
            )
            for layer in range(first, last)
            for one in states[layer]
        ]

    def apply(self, totals: torch.Tensor, checkpoint: Any) -> Outcome:
        kept = self._layout.spans_kept_by(self._worker)
        self.held = {layer: self.held[layer] for layer in self._gradients}
        self.states = {layer: self.states[layer][:1] for layer in kept}
        for layer, spans in kept.items():
            (state,) = self.states[layer]
            assert tuple(state) == spans
            for span, momentum in state.items():
                here = slice(*elements(span, SIZE))
                apply_step(
                    self.held[layer][0].view(-1)[here], momentum, self._gradients[layer].view(-1)[here]
                )
            checkpoint()
        loss, count = totals.tolist()
        return Outcome(losses={"loss": loss / count})


def _copy(numbers: torch.Tensor, span: Span, into: State, wanted: Span) -> None:
    """What of ``wanted`` is in ``span``, which ``numbers`` are, goes to where it is ``into``."""
    for target, room in into.items():
        low = max(span[0], wanted[0], target[0])
        high = min(span[1], wanted[1], target[1])
        if low < high:
            start, stop = elements((low, high), SIZE)
            at, begins = elements(target, SIZE)[0], elements(span, SIZE)[0]
            room[start - at : stop - at].copy_(numbers[start - begins : stop - begins])
