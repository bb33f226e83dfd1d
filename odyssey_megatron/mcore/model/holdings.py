"""What one rank holds of the model: layers, the layout that it holds them under, and the blocks made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.mcore.model import rng
from odyssey_megatron.mcore.model.assembling import assembled, unwrap
from odyssey_megatron.mcore.model.experts import Routing
from odyssey_megatron.mcore.model.holders import digests, odd_ones
from odyssey_megatron.mcore.model.layers import (
    HeldLayer,
    LayerBlock,
    ModelSpec,
    build_part,
    initial_parts,
    lend,
)
from odyssey_megatron.mcore.model.optimizer import LayerOptimizer
from odyssey_megatron.mcore.model.parts import Parts
from odyssey_megatron.mcore.model.place import Place
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import EVERYTHING, Span
from odyssey_megatron.plan.placing.stretches import Stretches


class Holdings:
    """The layers that this rank holds, and the blocks that a layout makes of them. Implements
    ``execute.parts.Holdings``.
    """

    def __init__(self, spec: ModelSpec, cell: Cell, groups: ProcessGroupCollection):
        """``cell``: the one that this rank is in, and ``groups`` Megatron's for it."""
        self.spec, self.groups = spec, groups
        self.cell, self.parts = cell, Parts(cell)
        part = rng.LayerPart.of(groups)
        rng.initialize(spec.seed, part)
        self.seeds = rng.LayerSeeds(spec.seed, part)
        """What the layers draw random numbers by."""
        self.routing = Routing(spec.config, groups, self.seeds)
        """What the layers' routers count."""
        self.held: dict[int, HeldLayer] = {}
        """The held layers by number. Until a step of the current layout is committed some may be of an earlier one."""
        self.blocks: dict[tuple[int, int], LayerBlock] = {}
        """What is computed with, by (first layer, last layer + 1)."""
        self.layout, self.worker = Layout(holders=(), routes=()), -1

    # -- under a layout -------------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[HeldLayer]:
        """This worker's layers under the current layout, in order."""
        return [layer for span in sorted(self.blocks) for layer in self.blocks[span].layers]

    @property
    def chunks(self) -> list[LayerBlock]:
        """This worker's chunks of Megatron's model, in the order of their layers."""
        return [self.blocks[span] for span in sorted(self.blocks) if self.blocks[span].is_chunk]

    @property
    def stretches(self) -> Stretches:
        """Which stretches of its layers this rank keeps state of under the current layout."""
        return Stretches.of(self.cell, self.layout)

    @property
    def place(self) -> Place:
        """This rank's place under the current layout."""
        return Place(self.layout, self.worker, self.cell)

    def block_with(self, first: int, last: int) -> LayerBlock:
        """The block that contains the layers ``[first, last)``."""
        return next(one for one in self.blocks.values() if one.first <= first and last <= one.last)

    def blocks_of(self, first: int, last: int) -> list[LayerBlock]:
        """The blocks that together are the layers ``[first, last)``."""
        blocks = [b for (a, z), b in sorted(self.blocks.items()) if first <= a and z <= last]
        assert blocks, (first, last)
        assert (blocks[0].first, blocks[-1].last) == (first, last)
        return blocks

    def take_layout(self, layout: Layout, worker: int, *, replacing: Callable[[], None]) -> None:
        """Assemble this worker's blocks. Blocks with the same layers are kept, and gradients are kept in any case.

        ``replacing``: called before each block that is made.
        """
        for layer in layout.held_by(worker):
            if layer not in self.held:  # only its weights are needed, which arrive as after every step
                self.held[layer] = self.new_layer(layer)
        self.blocks = assembled(layout, worker, self.held, self.blocks, make=self._block, replacing=replacing)
        self.layout, self.worker = layout, worker
        lend(self.chunks, self.held)

    def zero_gradients(self) -> None:
        for block in self.blocks.values():
            block.zero_gradients()

    def let_go(self) -> None:
        """Drop what the current layout does not need: its step is agreed on, and nobody returns to an earlier one."""
        keeps = self.layout.kept_by(self.worker)
        for layer in self.layers:
            layer.former.clear()  # from now on only others keep these up to date
            if layer.index not in keeps:
                layer.optimizer = None
        self._keep(self.layers)

    def forget(self) -> None:
        """Hold nothing from now on."""
        self.blocks = {}
        self._keep([])
        self.layout = Layout(holders=(), routes=())

    def _keep(self, layers: Sequence[HeldLayer]) -> None:
        """Drop all layers but ``layers``, with the gradient buffers of blocks that they were in."""
        before, self.held = self.held, {layer.index: layer for layer in layers}
        unwrap(layer for index, layer in before.items() if self.held.get(index) is not layer)

    # -- what it is made of ---------------------------------------------------------------------------------------

    def take_cell(self, cell: Cell) -> None:
        """Number parts as in ``cell``, this rank's in a new generation, whose smaller cells say how experts are cut."""
        if cell == self.cell:
            return
        self.cell, self.parts = cell, Parts(cell)
        for held in self.held.values():
            held.each = cell.parts.each

    def create_layers(self, layers: Sequence[int], kept: Mapping[int, tuple[Span, ...]]) -> None:
        """Creates ``layers`` with their initial weights, and an optimizer for what is ``kept`` of each.

        Layers that are held already keep their weights: they were created for a first layout that never went live. It
        may have cut the optimizer state in another way, so their optimizers follow ``kept``.
        """
        for layer, held in ((one, self.held[one]) for one in layers if one in self.held):
            spans = kept.get(layer, ())
            if spans != (held.optimizer.spans if held.optimizer is not None else ()):
                held.optimizer = self.optimizer_of(held, spans) if spans else None
        missing = [layer for layer in layers if layer not in self.held]
        for layer, parts in initial_parts(self.spec, missing, self.groups).items():
            self.held[layer] = self._hold(layer, parts, kept=kept.get(layer, ()))

    def new_layer(self, layer: int) -> HeldLayer:
        """A layer whose weights have yet to arrive; no optimizer state of it is kept."""
        return self._hold(layer, build_part(self.spec, layer, self.groups))

    def _hold(self, layer: int, parts: torch.nn.ModuleDict, *, kept: tuple[Span, ...] = ()) -> HeldLayer:
        self.routing.attach(layer, parts)
        each = self.cell.parts.each
        return HeldLayer(self.spec, layer, parts, self.groups, self.seeds, kept=kept, each=each)

    def optimizer_of(self, held: HeldLayer, spans: tuple[Span, ...]) -> LayerOptimizer:
        """A new optimizer for ``spans`` of a layer."""
        return LayerOptimizer(held, self.spec, self.groups, spans)

    def _block(self, layers: Sequence[HeldLayer]) -> LayerBlock:
        return LayerBlock(self.spec, layers, self.groups)

    def idle_block(self) -> LayerBlock:
        """A block of one transformer layer that this worker does not hold, for Megatron's code to look at."""
        block = self._block([self.new_layer(1)])
        unwrap(block.layers)  # which nobody trains, and which would keep the block alive
        return block

    def stand_in(self) -> None:
        """Make an unused block of one transformer layer before this rank has joined: code that expects a model finds
        one, and first-time costs of building layers are paid before others wait for it.
        """
        block = self.idle_block()
        self.optimizer_of(block.layers[0], (EVERYTHING,))
        self.blocks = {(block.first, block.last): block}

    # -- what it comes to -----------------------------------------------------------------------------------------

    def _current(self) -> list[HeldLayer]:
        """The layers that are held under the current layout. Others did not take part in the last step, and are dropped
        with the next.
        """
        return [self.held[layer] for layer in self.layout.held_by(self.worker)]

    def digests(self) -> dict[str, str]:
        """Held layer (and shard) -> SHA-256 of its weights, and under ``N.optimizer`` that of the state kept; the same
        on all holders.
        """
        found = {}
        place, every = self.place, digests(self._current(), self.parts, self.stretches)
        for shard, of_part in zip((*place.shards, place.shard), every, strict=True):
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
        parts = self.cell.parts
        numbers = (*self.parts, parts.count + self.cell.held_shards[0])
        # What the first owner of a slice has sent is no second opinion on it; so owners compare its weights by itself.
        every = digests(self._current(), self.parts, self.stretches, with_stepped=bool(self.layout.keepers))
        return odd_ones(
            dict(zip(numbers, every, strict=True)),
            world,
            rank=rank,
            cell_size=self.cell.full,
            layout=self.layout,
            stretches=self.stretches,
        )

    def moved_bytes(self, layer: int) -> int:
        """The number of bytes of all state of one part of a layer, wherever its tensors lie."""
        return self.parts.bytes_of_one(self.held[layer])

    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state of everything held, without :meth:`host_bytes`."""
        gradients = sum(one.nbytes for block in self.blocks.values() for one in block.buffers)
        return (
            gradients
            + sum(one.nbytes for held in self.held.values() for one in held.weights().values())
            + self.optimizer_bytes()
            - self.host_bytes()
        )

    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state alone, wherever it lies."""
        return sum(one.state_bytes() for held in self.held.values() for one in held.states)

    def host_bytes(self) -> int:
        """Bytes of what lies in host memory between steps."""
        return sum(one.host_bytes for held in self.held.values() for one in held.states)

    def weights(self) -> dict[tuple[int, str], dict[str, torch.Tensor]]:
        """(layer, name of a shard) -> its weights by name, if this rank is the first holder of them."""
        found, place, parts = {}, self.place, self.parts
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
                    mine = {name: one for name, one in mine.items() if name in self.parts.spread(layer)}
        return {place: weights for place, weights in found.items() if weights}
