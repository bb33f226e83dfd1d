"""What one rank holds of the model, and what of it moves: part by part, as a whole cell's rank has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.errors import TransferIncomplete
from odyssey_megatron.mcore.model import experts, groups, rng
from odyssey_megatron.mcore.model.arriving import Arriving
from odyssey_megatron.mcore.model.flat import ranges
from odyssey_megatron.mcore.model.holders import digests, odd_ones
from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock, ModelSpec, build_part, initial_parts
from odyssey_megatron.mcore.model.optimizer import LayerOptimizer
from odyssey_megatron.mcore.model.parts import Parts, Tensors
from odyssey_megatron.mcore.model.place import Place
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.slices import EVERYTHING, Span, within, without


class Holdings:
    """Held layers, and those that arrive.

    ``part`` is everywhere one of those that this rank has of each layer (``Cell.held_parts``). In whole cells that is
    one, and the tensors are the layer's own.
    """

    def __init__(self, spec: ModelSpec, cell: Cell, groups_of_cell: ProcessGroupCollection):
        self.spec, self.cell, self._groups = spec, cell, groups_of_cell
        rng.initialize(spec.seed, rng.Part.of(self._groups))
        self._seeds = rng.LayerSeeds(spec.seed, rng.Part.of(self._groups))
        self.routing = experts.Routing(spec.config, self._groups, self._seeds)
        self._parts = Parts(cell)
        self._held: dict[int, HeldLayer] = {}
        self._arriving = Arriving()
        self._blocks: dict[tuple[int, int], LayerBlock] = {}
        self._worker, self._layout = -1, Layout(holders=(), routes=())

    @property
    def layers(self) -> list[HeldLayer]:
        """This worker's under the layout at hand, in their order."""
        return [layer for span in sorted(self._blocks) for layer in self._blocks[span].layers]

    @property
    def place(self) -> Place:
        """This rank's, under the layout at hand."""
        return Place(self._layout, self._worker, self.cell)

    def create_layers(self, layers: Sequence[int], kept: Mapping[int, tuple[Span, ...]]) -> None:
        """Initial weights of ``layers``, with an optimizer for what is ``kept`` of each; those held already stay."""
        missing = [layer for layer in layers if layer not in self._held]
        for layer, parts in initial_parts(self.spec, missing, self._groups).items():
            self._held[layer] = self._hold(layer, parts, kept=kept.get(layer, ()))

    def _hold(self, layer: int, parts: torch.nn.ModuleDict, *, kept: tuple[Span, ...] = ()) -> HeldLayer:
        self.routing.attach(layer, parts)
        each = self.cell.of_layer
        return HeldLayer(self.spec, layer, parts, self._groups, self._seeds, kept=kept, each=each)

    # -- what moves -----------------------------------------------------------------------------------------------

    def weights_of(self, layer: int, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        """The numbers of a held layer's parameters in ``spans``: by name 1-D tensors, which are the parameters' own or
        copies, in an order that is the same on every rank. Call :meth:`weights_arrived` when others are in them.
        """
        return self._weights_in(self._held[layer], part, spans)

    def _weights_in(self, held: HeldLayer, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        number = self._parts.number(part)
        found = {
            one.text: one.of_part(one.parameter, number)
            for one in ranges(held, self.cell.of_layer, spans, number)
        }
        # Of no parameter, and no optimizer's.
        return found | (experts.biases(held) if any(span[0] == 0 for span in spans) else {})

    def weights_arrived(self, layer: int, part: int, spans: Sequence[Span], weights: Tensors) -> None:
        """``weights``, which :meth:`weights_of` has given, have been received."""
        self._put_weights(self._held[layer], part, spans, weights)

    def _put_weights(self, held: HeldLayer, part: int, spans: Sequence[Span], weights: Tensors) -> None:
        number = self._parts.number(part)
        for one in () if self._parts.is_one else ranges(held, self.cell.of_layer, spans, number):
            one.put(one.parameter, number, weights[one.text])

    def moved_bytes(self, layer: int) -> int:
        """Bytes of all state of one part of a layer, wherever its tensors lie."""
        return self._parts.bytes_of_one(self._held[layer])

    def expect(self, kept: Mapping[int, tuple[Span, ...]]) -> None:
        """What is ``kept`` of each layer when all has arrived that others send. Until :meth:`settled` what is held
        already stays as it is: microbatches may be in flight on it, and others may go back to it.
        """
        for layer, spans in kept.items():
            held = self._held.get(layer)
            having = held.states if held is not None else []
            if having and having[0].spans == spans:
                continue
            is_new = held is None
            if held is None:
                held = self._hold(layer, build_part(self.spec, layer, self._groups))
            made = self.optimizer_of(held, spans)
            lacking = [*spans]
            for one in having:
                for span in (both for wanted in lacking for both in within(wanted, one.spans)):
                    for part in self._parts:
                        number = self._parts.number(part)
                        made.put(number, span, one.numbers(number, span))
                lacking = [*without(lacking, one.spans)]
            self._arriving.expect(held, made, lacking, is_new=is_new)

    def optimizer_of(self, held: HeldLayer, spans: tuple[Span, ...]) -> LayerOptimizer:
        """A new one, of ``spans`` of a layer."""
        return LayerOptimizer(held, self.spec, self._groups, spans, self.cell.of_layer)

    def tensors_to_send(self, layer: int, part: int, span: Span = EVERYTHING) -> dict[str, torch.Tensor]:
        """The current state of a held layer, or that of a ``span`` of it, which is kept here."""
        held = self._held[layer]
        if span == EVERYTHING:
            return self._parts.of(held, held.moved_tensors(), part)
        kept = next(one for one in held.states if not [*without([span], one.spans)])
        return self._weights_in(held, part, [span]) | kept.numbers(self._parts.number(part), span)

    def tensors_to_fill(self, layer: int, part: int, span: Span = EVERYTHING) -> dict[str, torch.Tensor]:
        """Room for the state of ``layer``, which was expected; :meth:`filled` is told when it has arrived. It counts as
        held only from ``take_layout`` on. What is sent of the weights of one that is held already is what they are.
        """
        held, optimizer = self._expected(layer)
        if span == EVERYTHING:
            return self._parts.of(held, held.weights() | optimizer.state_tensors(), part)
        state = optimizer.numbers(self._parts.number(part), span)
        room = {name: torch.empty_like(one) for name, one in state.items()}
        return self._weights_in(held, part, [span]) | room

    def filled(self, layer: int, part: int, span: Span, sent: Tensors) -> None:
        """``sent``, which :meth:`tensors_to_fill` has given, has been received."""
        held, optimizer = self._expected(layer)
        self._arriving.came(layer, span)
        if span != EVERYTHING:
            self._put_weights(held, part, [span], sent)
            optimizer.put(self._parts.number(part), span, sent)
        elif not self._parts.is_one:
            self._parts.arrived(held, held.weights() | optimizer.state_tensors(), part, sent)

    def _expected(self, layer: int) -> tuple[HeldLayer, LayerOptimizer]:
        """A layer, and its state, that arrives; it may be taken into a layout before it has."""
        held = self._arriving.layer(layer) or self._held[layer]
        optimizer = self._arriving.state(layer) or held.optimizer
        assert optimizer is not None
        return held, optimizer

    def settled(self) -> None:
        """All that was expected has arrived.

        Raises:
            TransferIncomplete: that was not all.
        """
        if unsent := self._arriving.lacking:
            raise TransferIncomplete(f"worker {self.cell.worker} was not sent state of layer(s) {unsent}")
        self._held.update(self._arriving.take_layers())
        for layer, optimizer in self._arriving.states.items():
            held = self._held[layer]
            held.former, held.optimizer = held.states, optimizer
            optimizer.take_over()
        self._arriving.clear()

    def discard_incoming(self) -> None:
        """Forgets half-received layers of a generation that has ended, and buffers that its operations write to."""
        self._arriving.clear()
        groups.renew_buffers()

    # -- what it comes to -----------------------------------------------------------------------------------------

    def _current(self) -> list[HeldLayer]:
        """Others have not got the last step, and go with the next."""
        return [self._held[layer] for layer in self._layout.held_by(self._worker)]

    def digests(self) -> dict[str, str]:
        """Held layer (and shard) -> SHA-256 of its weights, and ``N.optimizer`` of the state kept: equal everywhere."""
        found = {}
        for shard, of_part in zip(self.place.shards, digests(self._current(), self._parts), strict=True):
            for (layer, span), value in of_part.items():
                kind = "" if span is None else ".optimizer"
                kind += f":{span[0]}-{span[1]}" if span not in (None, EVERYTHING) else ""
                found[f"{layer}{'.' * bool(shard)}{shard}{kind}"] = value.hex()[:16]
        return found

    def odd_holders(self, world: dist.ProcessGroup, *, rank: int) -> dict[int, str]:
        """Worker -> what it has otherwise than the other holders of a layer; empty if all have the same bytes.

        Collective; this is ``rank`` of the job. Raises HoldersDiffer on all ranks alike if nobody can say who is right.
        """
        held = dict(zip(self.place.parts, digests(self._current(), self._parts), strict=True))
        return odd_ones(held, world, rank=rank, cell_size=self.cell.full, layout=self._layout)

    def state_bytes(self) -> int:
        """Of weights, gradients and optimizer state of everything held, without :meth:`host_bytes`."""
        gradients = sum(one.nbytes for block in self._blocks.values() for one in block.buffers)
        return (
            gradients
            + sum(one.nbytes for held in self._held.values() for one in held.weights().values())
            + self.optimizer_bytes()
            - self.host_bytes()
        )

    def optimizer_bytes(self) -> int:
        """Of optimizer state alone, wherever it lies."""
        return sum(one.state_bytes() for held in self._held.values() for one in held.states)

    def host_bytes(self) -> int:
        """Of what lies in host memory between steps."""
        return sum(one.host_bytes for held in self._held.values() for one in held.states)

    def weights(self) -> dict[tuple[int, str], dict[str, torch.Tensor]]:
        """(layer, name of a shard) -> its weights by name, of those that this rank is the first to have."""
        found = {}
        for layer in self._current():
            first = self.place.first_of(layer)
            mine = {name: one for name, one in layer.weights().items() if name in first}
            for part, shard in zip(self._parts, self.place.shards, strict=True):
                weights = self._parts.of(layer, mine, part)
                found[layer.index, shard] = {name: one.cpu() for name, one in weights.items()}
                if self.cell.of_layer.experts > 1:  # all the rest is the same in each part
                    mine = {name: one for name, one in mine.items() if name in self._parts.spread(layer)}
        return {place: weights for place, weights in found.items() if weights}
