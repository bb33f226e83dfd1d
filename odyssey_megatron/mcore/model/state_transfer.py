"""The tensors that move between ranks, part by part, as a rank of a whole cell has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from odyssey_megatron.errors import TransferIncomplete
from odyssey_megatron.mcore.model import experts, groups
from odyssey_megatron.mcore.model.arriving import Arriving
from odyssey_megatron.mcore.model.assembling import unsent
from odyssey_megatron.mcore.model.flat import ranges
from odyssey_megatron.mcore.model.holdings import Holdings
from odyssey_megatron.mcore.model.layers import HeldLayer
from odyssey_megatron.mcore.model.optimizer import LayerOptimizer
from odyssey_megatron.mcore.model.parts import Tensors
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import EVERYTHING, Span, within, without
from odyssey_megatron.plan.placing.stretches import kept_by, of_kind


class StateTransfer:
    """Gives the tensors of layers to send, and those to receive into; owns what is arriving. Implements
    ``execute.parts.StateTransfer``.

    Everywhere, ``part`` is one of the parts that this rank has of each layer (``cluster.parts.Parts.held``). In a whole
    cell there is one, and its tensors are the layer's own.
    """

    def __init__(self, holdings: Holdings):
        self._holdings, self._arriving = holdings, Arriving()

    def weights_of(self, layer: int, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        """The numbers of a held layer's parameters in ``spans``.

        Returns:
            1-D tensors by name, in an order that is the same on every rank. They are views of the parameters, or
            copies: call :meth:`weights_arrived` after receiving into them.
        """
        return self._weights_in(self._holdings.held[layer], part, spans)

    def _weights_in(self, held: HeldLayer, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        parts = self._holdings.parts
        number = parts.number(part)
        found = {
            one.text: one.of_part(one.parameter, number) for one in ranges(held, parts.each, spans, number)
        }
        if not held.config.moe_router_enable_expert_bias:
            return found  # to look for buffers takes long, several times in a step
        # These are not parameters, and no optimizer has them. All ranks have them alike.
        own = [of_kind(span, spread=False) for span in spans]
        return found | (experts.biases(held) if any(one and one[0] == 0 for one in own) else {})

    def weights_arrived(self, layer: int, part: int, spans: Sequence[Span], weights: Tensors) -> None:
        """Take over ``weights``, tensors from :meth:`weights_of` into which others have been received."""
        self._put_weights(self._holdings.held[layer], part, spans, weights)

    def _put_weights(self, held: HeldLayer, part: int, spans: Sequence[Span], weights: Tensors) -> None:
        parts = self._holdings.parts
        if parts.is_one:  # these are the parameters themselves
            return
        number = parts.number(part)
        for one in ranges(held, parts.each, spans, number):
            one.put(one.parameter, number, weights[one.text])

    def expect(self, kept: Mapping[int, tuple[Span, ...]]) -> None:
        """Prepare for what others will send: ``kept`` says which spans of each layer's optimizer state this rank keeps
        when all has arrived.

        Until :meth:`settled`, what is held already stays as it is: microbatches may be in flight on it, and others may
        return to it.
        """
        holdings, parts = self._holdings, self._holdings.parts
        for layer, spans in kept.items():
            held = holdings.held.get(layer)
            having = held.states if held is not None else []
            if having and having[0].spans == spans:
                continue
            is_new = held is None
            if held is None:
                held = holdings.new_layer(layer)
            made = holdings.optimizer_of(held, spans)
            lacking = [*spans]
            for one in having:
                for span in (both for wanted in lacking for both in within(wanted, one.spans)):
                    for part in parts:
                        number = parts.number(part)
                        made.put(number, span, one.numbers(number, span))
                lacking = [*without(lacking, one.spans)]
            self._arriving.expect(held, made, lacking, is_new=is_new)

    def tensors_to_send(self, layer: int, part: int, span: Span = EVERYTHING) -> dict[str, torch.Tensor]:
        """The current state of a held layer, or of a ``span`` of it that is kept here."""
        held = self._holdings.held[layer]
        if span == EVERYTHING:
            return self._holdings.parts.of(held, held.moved_tensors(), part)
        kept = next(one for one in held.states if not [*without([span], one.spans)])
        return self._weights_in(held, part, [span]) | kept.numbers(self._holdings.parts.number(part), span)

    def tensors_to_fill(self, layer: int, part: int, span: Span = EVERYTHING) -> dict[str, torch.Tensor]:
        """Tensors to receive the state of ``layer`` into, which was expected; call :meth:`filled` when it has arrived.

        The layer counts as held only from ``take_layout`` on. If it is held already, the weights that are sent are
        equal to those that it has.
        """
        held, optimizer = self._expected(layer)
        if span == EVERYTHING:
            return self._holdings.parts.of(held, held.weights() | optimizer.state_tensors(), part)
        state = optimizer.numbers(self._holdings.parts.number(part), span)
        room = {name: torch.empty_like(one) for name, one in state.items()}
        return self._weights_in(held, part, [span]) | room

    def filled(self, layer: int, part: int, span: Span, sent: Tensors) -> None:
        """Take over ``sent``, tensors from :meth:`tensors_to_fill` that have been received."""
        held, optimizer = self._expected(layer)
        self._arriving.came(layer, span)
        if span != EVERYTHING:
            self._put_weights(held, part, [span], sent)
            optimizer.put(self._holdings.parts.number(part), span, sent)
        elif not self._holdings.parts.is_one:
            self._holdings.parts.arrived(held, held.weights() | optimizer.state_tensors(), part, sent)

    def _expected(self, layer: int) -> tuple[HeldLayer, LayerOptimizer]:
        """An arriving layer and its arriving state; a layout may have taken the layer before its contents were here."""
        held = self._arriving.layer(layer) or self._holdings.held[layer]
        optimizer = self._arriving.state(layer) or held.optimizer
        assert optimizer is not None
        return held, optimizer

    def bring_in(self, layout: Layout, worker: int) -> None:
        """Make new layers that ``layout`` gives to ``worker`` held ones, even if their contents are still on their way.

        Raises:
            TransferIncomplete: the state of a layer is neither held nor expected.
        """
        self._holdings.held.update(self._arriving.take_layers())
        kept = kept_by(self._holdings.cell, layout, worker)
        if lacking := unsent(kept, self._holdings.held, self._arriving.states):
            raise TransferIncomplete(f"worker {worker} was not sent layer(s) {lacking}")

    def settled(self) -> None:
        """Make everything that was expected, and has arrived, what this rank holds.

        Raises:
            TransferIncomplete: some of it has not arrived.
        """
        if unsent := self._arriving.lacking:
            raise TransferIncomplete(
                f"worker {self._holdings.cell.worker} was not sent state of layer(s) {unsent}"
            )
        self._holdings.held.update(self._arriving.take_layers())
        for layer, optimizer in self._arriving.states.items():
            held = self._holdings.held[layer]
            held.former, held.optimizer = held.states, optimizer
            optimizer.take_over()
        self._arriving.clear()

    def discard_incoming(self) -> None:
        """Forget half-received layers of a generation that has ended, and the buffers that its operations may still
        write to.
        """
        self._arriving.clear()
        groups.renew_buffers()
