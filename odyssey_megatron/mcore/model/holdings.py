"""What one rank holds of the model, and what of it moves: part by part, as a whole cell's rank has it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.mcore.model import experts, groups, rng
from odyssey_megatron.mcore.model.holders import digests, odd_ones
from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock, ModelSpec, build_part, initial_parts
from odyssey_megatron.mcore.model.optimizer import LayerOptimizer
from odyssey_megatron.mcore.model.parts import Parts, Tensors
from odyssey_megatron.mcore.model.place import Place
from odyssey_megatron.plan.layout import Layout


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
        self._incoming: dict[int, HeldLayer] = {}
        self._incoming_states: dict[int, LayerOptimizer] = {}
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

    def create_layers(self, layers: Sequence[int], kept: Collection[int]) -> None:
        """Initial weights of ``layers``, with an optimizer for those ``kept``; those held already stay."""
        missing = [layer for layer in layers if layer not in self._held]
        for layer, parts in initial_parts(self.spec, missing, self._groups).items():
            self._held[layer] = self._hold(layer, parts, kept=layer in kept)

    def _hold(self, layer: int, parts: torch.nn.ModuleDict, *, kept: bool) -> HeldLayer:
        self.routing.attach(layer, parts)
        return HeldLayer(self.spec, layer, parts, self._groups, self._seeds, kept=kept)

    # -- what moves -----------------------------------------------------------------------------------------------

    def weights_of(self, layers: Sequence[int], part: int) -> dict[str, torch.Tensor]:
        """The parameters of held layers, in place, in an order that is the same on every rank; what arrives in them
        :meth:`weights_arrived` is told of.
        """
        held = [self._held[layer] for layer in layers]
        return {
            f"{one.index}.{name}": weight
            for one in held
            for name, weight in self._parts.of(one, one.weights(), part).items()
        }

    def weights_arrived(self, layers: Sequence[int], part: int, weights: Tensors) -> None:
        """``weights``, which :meth:`weights_of` has given, have been received."""
        for layer in () if self._parts.is_one else layers:
            held, prefix = self._held[layer], f"{layer}."
            sent = {
                name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)
            }
            self._parts.arrived(held, held.weights(), part, sent)

    def moved_bytes(self, layer: int) -> int:
        """What :meth:`tensors_to_send` gives of one part, be the tensors wherever they are."""
        return self._parts.bytes_of_one(self._held[layer])

    def tensors_to_send(self, layer: int, part: int) -> dict[str, torch.Tensor]:
        """The current state of a held layer."""
        held = self._held[layer]
        return self._parts.of(held, held.moved_tensors(), part)

    def tensors_to_fill(self, layer: int, part: int) -> dict[str, torch.Tensor]:
        """Room for the state of ``layer``; :meth:`filled` is told when it has arrived. It counts as held only from
        ``take_layout`` on.

        A layer that is held already stays, and gets an optimizer: microbatches may be in flight on it, and what is sent
        of its weights is what they are.
        """
        if layer not in self._incoming_states:
            held = self._held.get(layer)
            if held is None:
                parts = build_part(self.spec, layer, self._groups)
                held = self._incoming[layer] = self._hold(layer, parts, kept=False)
            self._incoming_states[layer] = LayerOptimizer(held, self.spec, self._groups)
        return self._parts.of(*self._arriving(layer), part)

    def filled(self, layer: int, part: int, sent: Tensors) -> None:
        """``sent``, which :meth:`tensors_to_fill` has given, has been received."""
        if not self._parts.is_one:
            self._parts.arrived(*self._arriving(layer), part, sent)

    def _arriving(self, layer: int) -> tuple[HeldLayer, dict[str, torch.Tensor]]:
        """A layer, and its tensors, that arrives; it may be taken into a layout before it has."""
        held = self._incoming.get(layer) or self._held[layer]
        optimizer = self._incoming_states.get(layer) or held.optimizer
        assert optimizer is not None
        return held, held.weights() | optimizer.state_tensors()

    def discard_incoming(self) -> None:
        """Forgets half-received layers of a generation that has ended, and buffers that its operations write to."""
        self._incoming.clear()
        self._incoming_states.clear()
        groups.renew_buffers()

    def _take_incoming(self) -> None:
        """They are held from now on."""
        self._held.update(self._incoming)
        for layer, optimizer in self._incoming_states.items():
            self._held[layer].optimizer = optimizer
        self._incoming.clear()
        self._incoming_states.clear()

    # -- what it comes to -----------------------------------------------------------------------------------------

    def _current(self) -> list[HeldLayer]:
        """Others have not got the last step, and go with the next."""
        return [self._held[layer] for layer in self._layout.held_by(self._worker)]

    def digests(self) -> dict[str, str]:
        """Held layer (and shard) -> SHA-256 of its weights, and ``N.optimizer`` of the state kept: equal everywhere."""
        kinds, found = ("", ".optimizer"), {}
        for shard, of_part in zip(self.place.shards, digests(self._current(), self._parts), strict=True):
            for (layer, kind), value in of_part.items():
                found[f"{layer}{'.' * bool(shard)}{shard}{kinds[kind]}"] = value.hex()[:16]
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
            + sum(sum(one.moved_bytes().values()) for one in self._held.values())
            - self.host_bytes()
        )

    def host_bytes(self) -> int:
        """Of what lies in host memory between steps."""
        return sum(layer.optimizer.parking.host_bytes for layer in self._held.values() if layer.optimizer)

    def weights(self) -> dict[tuple[int, str], dict[str, torch.Tensor]]:
        """(layer, name of a shard) -> its weights by name, of those that this rank is the first to have."""
        found = {}
        for index, layer in sorted(self._held.items()):
            first = self.place.first_of(layer)
            for part, shard in zip(self._parts, self.place.shards, strict=True):
                weights = self._parts.of(layer, layer.weights(), part)
                found[index, shard] = {name: one.cpu() for name, one in weights.items() if name in first}
        return {place: weights for place, weights in found.items() if weights}
