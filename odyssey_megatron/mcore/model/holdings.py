"""What one rank holds of the model, and moving it: part by part, as a rank of a whole cell has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
    """The layers that this rank holds, and those that are arriving.

    Everywhere, ``part`` is one of the parts that this rank has of each layer (``cluster.parts.Parts.held``). In a whole
    cell there is one, and its tensors are the layer's own.
    """

    def __init__(self, spec: ModelSpec, cell: Cell, groups_of_cell: ProcessGroupCollection):
        self.spec, self.cell, self._groups = spec, cell, groups_of_cell
        rng.initialize(spec.seed, rng.LayerPart.of(self._groups))
        self._seeds = rng.LayerSeeds(spec.seed, rng.LayerPart.of(self._groups))
        self.routing = experts.Routing(spec.config, self._groups, self._seeds)
        self._parts = Parts(cell)
        self._held: dict[int, HeldLayer] = {}
        self._arriving = Arriving()
        self._blocks: dict[tuple[int, int], LayerBlock] = {}
        self._worker, self._layout = -1, Layout(holders=(), routes=())

    @property
    def layers(self) -> list[HeldLayer]:
        """This worker's layers under the current layout, in order."""
        return [layer for span in sorted(self._blocks) for layer in self._blocks[span].layers]

    @property
    def place(self) -> Place:
        """This rank's place under the current layout."""
        return Place(self._layout, self._worker, self.cell)

    def take_cell(self, cell: Cell) -> None:
        """Number parts as in ``cell``, this rank's in a new generation, whose smaller cells say how experts are cut."""
        if cell == self.cell:
            return
        self.cell, self._parts = cell, Parts(cell)
        for held in self._held.values():
            held.each = cell.parts.each

    def create_layers(self, layers: Sequence[int], kept: Mapping[int, tuple[Span, ...]]) -> None:
        """Creates ``layers`` with their initial weights, and an optimizer for what is ``kept`` of each.

        Layers that are held already keep their weights: they were created for a first layout that never went live. It
        may have cut the optimizer state in another way, so their optimizers follow ``kept``.
        """
        for layer, held in ((one, self._held[one]) for one in layers if one in self._held):
            spans = kept.get(layer, ())
            if spans != (held.optimizer.spans if held.optimizer is not None else ()):
                held.optimizer = self.optimizer_of(held, spans) if spans else None
        missing = [layer for layer in layers if layer not in self._held]
        for layer, parts in initial_parts(self.spec, missing, self._groups).items():
            self._held[layer] = self._hold(layer, parts, kept=kept.get(layer, ()))

    def _hold(self, layer: int, parts: torch.nn.ModuleDict, *, kept: tuple[Span, ...] = ()) -> HeldLayer:
        self.routing.attach(layer, parts)
        each = self.cell.parts.each
        return HeldLayer(self.spec, layer, parts, self._groups, self._seeds, kept=kept, each=each)

    # -- what moves -----------------------------------------------------------------------------------------------

    def weights_of(self, layer: int, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        """The numbers of a held layer's parameters in ``spans``.

        Returns:
            1-D tensors by name, in an order that is the same on every rank. They are views of the parameters, or
            copies: call :meth:`weights_arrived` after receiving into them.
        """
        return self._weights_in(self._held[layer], part, spans)

    def _weights_in(self, held: HeldLayer, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        number = self._parts.number(part)
        found = {
            one.text: one.of_part(one.parameter, number)
            for one in ranges(held, self.cell.parts.each, spans, number)
        }
        # These buffers are not parameters, and no optimizer has them.
        return found | (experts.biases(held) if any(span[0] == 0 for span in spans) else {})

    def weights_arrived(self, layer: int, part: int, spans: Sequence[Span], weights: Tensors) -> None:
        """Take over ``weights``, tensors from :meth:`weights_of` into which others have been received."""
        self._put_weights(self._held[layer], part, spans, weights)

    def _put_weights(self, held: HeldLayer, part: int, spans: Sequence[Span], weights: Tensors) -> None:
        number = self._parts.number(part)
        for one in () if self._parts.is_one else ranges(held, self.cell.parts.each, spans, number):
            one.put(one.parameter, number, weights[one.text])

    def moved_bytes(self, layer: int) -> int:
        """The number of bytes of all state of one part of a layer, wherever its tensors lie."""
        return self._parts.bytes_of_one(self._held[layer])

    def expect(self, kept: Mapping[int, tuple[Span, ...]]) -> None:
        """Prepare for what others will send: ``kept`` says which spans of each layer's optimizer state this rank keeps
        when all has arrived.

        Until :meth:`settled`, what is held already stays as it is: microbatches may be in flight on it, and others may
        return to it.
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
        """A new optimizer for ``spans`` of a layer."""
        return LayerOptimizer(held, self.spec, self._groups, spans)

    def tensors_to_send(self, layer: int, part: int, span: Span = EVERYTHING) -> dict[str, torch.Tensor]:
        """The current state of a held layer, or of a ``span`` of it that is kept here."""
        held = self._held[layer]
        if span == EVERYTHING:
            return self._parts.of(held, held.moved_tensors(), part)
        kept = next(one for one in held.states if not [*without([span], one.spans)])
        return self._weights_in(held, part, [span]) | kept.numbers(self._parts.number(part), span)

    def tensors_to_fill(self, layer: int, part: int, span: Span = EVERYTHING) -> dict[str, torch.Tensor]:
        """Tensors to receive the state of ``layer`` into, which was expected; call :meth:`filled` when it has arrived.

        The layer counts as held only from ``take_layout`` on. If it is held already, the weights that are sent are
        equal to those that it has.
        """
        held, optimizer = self._expected(layer)
        if span == EVERYTHING:
            return self._parts.of(held, held.weights() | optimizer.state_tensors(), part)
        state = optimizer.numbers(self._parts.number(part), span)
        room = {name: torch.empty_like(one) for name, one in state.items()}
        return self._weights_in(held, part, [span]) | room

    def filled(self, layer: int, part: int, span: Span, sent: Tensors) -> None:
        """Take over ``sent``, tensors from :meth:`tensors_to_fill` that have been received."""
        held, optimizer = self._expected(layer)
        self._arriving.came(layer, span)
        if span != EVERYTHING:
            self._put_weights(held, part, [span], sent)
            optimizer.put(self._parts.number(part), span, sent)
        elif not self._parts.is_one:
            self._parts.arrived(held, held.weights() | optimizer.state_tensors(), part, sent)

    def _expected(self, layer: int) -> tuple[HeldLayer, LayerOptimizer]:
        """An arriving layer and its arriving state; a layout may have taken the layer before its contents were here."""
        held = self._arriving.layer(layer) or self._held[layer]
        optimizer = self._arriving.state(layer) or held.optimizer
        assert optimizer is not None
        return held, optimizer

    def settled(self) -> None:
        """Make everything that was expected, and has arrived, what this rank holds.

        Raises:
            TransferIncomplete: some of it has not arrived.
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
        """Forget half-received layers of a generation that has ended, and the buffers that its operations may still
        write to.
        """
        self._arriving.clear()
        groups.renew_buffers()

    # -- what it comes to -----------------------------------------------------------------------------------------

    def _current(self) -> list[HeldLayer]:
        """The layers that are held under the current layout. Others did not take part in the last step, and are dropped
        with the next.
        """
        return [self._held[layer] for layer in self._layout.held_by(self._worker)]

    def digests(self) -> dict[str, str]:
        """Held layer (and shard) -> SHA-256 of its weights, and under ``N.optimizer`` that of the state kept; the same
        on all holders.
        """
        found = {}
        for shard, of_part in zip(self.place.shards, digests(self._current(), self._parts), strict=True):
            for (layer, span), value in of_part.items():
                kind = "" if span is None else ".optimizer"
                kind += f":{span[0]}-{span[1]}" if span not in (None, EVERYTHING) else ""
                found[f"{layer}{'.' * bool(shard)}{shard}{kind}"] = value.hex()[:16]
        return found

    def odd_holders(self, world: dist.ProcessGroup, *, rank: int) -> dict[int, str]:
        """Worker -> how its state differs from the other holders of a layer; empty if all have the same bytes.

        Collective. ``rank`` is this rank's number in the job. Raises HoldersDiffer, on all ranks alike, if it is
        unclear who is right.
        """
        held = dict(zip(self._parts, digests(self._current(), self._parts), strict=True))
        return odd_ones(held, world, rank=rank, cell_size=self.cell.full, layout=self._layout)

    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state of everything held, without :meth:`host_bytes`."""
        gradients = sum(one.nbytes for block in self._blocks.values() for one in block.buffers)
        return (
            gradients
            + sum(one.nbytes for held in self._held.values() for one in held.weights().values())
            + self.optimizer_bytes()
            - self.host_bytes()
        )

    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state alone, wherever it lies."""
        return sum(one.state_bytes() for held in self._held.values() for one in held.states)

    def host_bytes(self) -> int:
        """Bytes of what lies in host memory between steps."""
        return sum(one.host_bytes for held in self._held.values() for one in held.states)

    def weights(self) -> dict[tuple[int, str], dict[str, torch.Tensor]]:
        """(layer, name of a shard) -> its weights by name, if this rank is the first holder of them."""
        found, place, parts = {}, self.place, self._parts
        if self.cell.each == 1:  # all in one part, whatever parts others have
            place = replace(place, cell=self.cell.among({}))
            parts = Parts(place.cell)
        for layer in self._current():
            first = place.first_of(layer)
            mine = {name: one for name, one in layer.weights().items() if name in first}
            for part, shard in zip(parts, place.shards, strict=True):
                weights = parts.of(layer, mine, part)
                found[layer.index, shard] = {name: one.cpu() for name, one in weights.items()}
                if self.cell.parts.each.cuts_experts:  # everything else is the same in each part
                    mine = {name: one for name, one in mine.items() if name in self._parts.spread(layer)}
        return {place: weights for place, weights in found.items() if weights}
