"""What a rank of a smaller cell has, as the parts of the job's tensor parallelism.

A job with tensor parallelism T cuts a layer into T parts. A cell that has lost ranks goes on with t of them, each with
``tensor_each`` = T/t consecutive parts, and its modules are Megatron's own for tensor parallelism t: a tensor of theirs
is what those parts' tensors are together. Whatever leaves such a rank, or arrives there, goes part by part, as a whole
cell's rank has it: names, shapes, order and flat buffers. Where the cell has but fewer context-parallel ranks, t is T.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.mcore.model.flat import Cut
from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock, main_grad
from odyssey_megatron.upstream import compat

Tensors = Mapping[str, torch.Tensor]


class Parts:
    """Those that the ranks of ``cell`` have of each layer."""

    def __init__(self, cell: Cell):
        self._each, self._numbers = cell.tensor_each, cell.held_parts
        self._staged: dict[tuple[int, int, int], _Staged] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def number(self, part: int) -> int:
        """Of ``part``, among those of this rank."""
        return self._numbers.index(part)

    @property
    def is_one(self) -> bool:
        """As in whole cells: it is the tensors themselves, and nothing here does anything."""
        return self._each == 1

    def of(self, layer: HeldLayer, tensors: Tensors, part: int) -> dict[str, torch.Tensor]:
        """Of ``tensors`` of ``layer``, weights and state alike, those of ``part``."""
        if self.is_one:
            return dict(tensors)
        cuts, number = self._cuts(layer, tensors), self._numbers.index(part)
        return {name: cuts[name].part(one.detach(), number) for name, one in tensors.items()}

    @torch.no_grad()
    def arrived(self, layer: HeldLayer, tensors: Tensors, part: int, sent: Tensors) -> None:
        """What was received in ``sent``, which :meth:`of` has given, is that ``part`` of ``tensors`` from now on."""
        if not self.is_one:
            cuts, number = self._cuts(layer, tensors), self._numbers.index(part)
            for name, one in sent.items():
                cuts[name].put(tensors[name], number, one)

    def bytes_of_one(self, layer: HeldLayer) -> int:
        """Of all that moves of ``layer``, of one part: what is kept here of its optimizer state is a share of that."""
        weights = layer.weights()
        cuts = self._cuts(layer, weights) if not self.is_one else {}
        of_weights = sum(
            one.nbytes // (self._each if name in cuts and cuts[name].dim is not None else 1)
            for name, one in weights.items()
        )
        return of_weights + (layer.optimizer.part_bytes() if layer.optimizer else 0)

    def _cuts(self, layer: HeldLayer, names: Iterable[str]) -> dict[str, Cut]:
        """Of a parameter, or what an optimizer keeps of it: it is cut in the same way, if it has numbers of its own."""
        parameters = dict(layer.named_parameters())
        found = {}
        for name in names:
            if (parameter := parameters.get(name)) is None:
                parameter = parameters[name.rpartition(".")[0]]
            alike = name.endswith(".step")
            found[name] = Cut(self._each) if alike else Cut.of(parameter, self._each)
        return found

    # -- gradients ------------------------------------------------------------------------------------------------

    def stage(self, block: LayerBlock, first: int, last: int, part: int) -> _Staged:
        """The gradients of layers ``[first, last)`` of ``block``, copied into buffers like a whole cell's."""
        number = self._numbers.index(part)
        found = self._staged[first, last, part] = _Staged.of(block, first, last, self._each, number)
        return found

    def staged(self, first: int, last: int, part: int) -> _Staged:
        """As :meth:`stage` has given it last."""
        return self._staged[first, last, part]

    def take_sums(self) -> None:
        """What has become of the staged gradients is what the layers' gradients are from now on."""
        for one in self._staged.values():
            one.put_back()

    def forget(self) -> None:
        """Nothing is staged any more."""
        self._staged.clear()


@dataclass(frozen=True, slots=True)
class _Staged:
    """Gradients of one part."""

    buffers: list[torch.Tensor]
    """1-D; in each what a buffer of Megatron's has of the part in a whole cell, one parameter behind the other."""
    views: list[tuple[torch.nn.Parameter, torch.Tensor]]
    """Into them, of each parameter."""
    each: int
    number: int
    """Of the part, among those of the rank."""

    @classmethod
    @torch.no_grad()
    def of(cls, block: LayerBlock, first: int, last: int, each: int, number: int) -> _Staged:
        made: _Staged = cls([], [], each, number)
        for parameters in block.buffered(first, last):
            pieces = [Cut.of(one, each).part(main_grad(one), number) for one in parameters]
            buffer = torch.cat([one.reshape(-1) for one in pieces])
            made.buffers.append(buffer)
            cut = torch.split(buffer, [one.numel() for one in pieces])
            for parameter, piece, view in zip(parameters, pieces, cut, strict=True):
                made.views.append((parameter, view.view(piece.shape)))
        return made

    @torch.no_grad()
    def put_back(self) -> None:
        for parameter, view in self.views:
            Cut.of(parameter, self.each).put(main_grad(parameter), self.number, view)

    def of_parameters(self, wanted: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """The views of these, in their order."""
        views = {id(parameter): view for parameter, view in self.views}
        return [views[id(one)] for one in wanted]


# -- which cells can be made smaller -----------------------------------------------------------------------------------


def adapt(config: Any, cell: Cell) -> Any:
    """Makes the ``config`` of the job's model that of the parallel sizes of ``cell``; returns what it was."""
    if cell.each == 1:
        return config
    whole = copy.copy(config)
    config.tensor_model_parallel_size = cell.tensor
    config.sequence_parallel = config.sequence_parallel and cell.tensor > 1
    config.context_parallel_size = cell.context
    if cell.context_each > 1:
        config.hierarchical_context_parallel_sizes = None
    return whole


def _may_be_te(config: Any) -> bool:
    """Megatron's own layer specs do not look at it, and its default is Transformer Engine, be it there or not."""
    return config.transformer_impl != "local" and importlib.util.find_spec("transformer_engine") is not None


_Reasons = tuple[tuple[str, Callable[[Any], object]], ...]

_KEPT_WHOLE: _Reasons = (
    (
        "it has neither tensor nor context parallelism",
        lambda config: config.tensor_model_parallel_size == config.context_parallel_size == 1,
    ),
    ("its layers have experts", lambda config: config.num_moe_experts),
    ("it predicts several tokens (--mtp-num-layers)", lambda config: config.mtp_num_layers),
    ("its forward draws numbers (dropout)", lambda config: config.attention_dropout or config.hidden_dropout),
    ("it computes in 8 bits", lambda config: getattr(config, "fp8", None)),
)

_SHARDS_KEPT: _Reasons = (
    (
        "its layers may be Transformer Engine's (transformer_impl is not local)",
        lambda config: _may_be_te(config),
    ),
    ("it has multi-latent attention", lambda config: getattr(config, "multi_latent_attention", False)),
    (
        "its softmax has an offset for each head",
        lambda config: getattr(config, "softmax_type", "vanilla") != "vanilla",
    ),
    (
        "its layers are not all alike (heterogeneous_block_specs)",
        lambda config: getattr(config, "heterogeneous_block_specs", False),
    ),
    ("Megatron is told not to initialize weights", lambda config: not config.perform_initialization),
)


class Kept(NamedTuple):
    """Why a cell does not go on with fewer ranks; empty: it does."""

    whole: str
    """With any."""
    shards: str
    """With fewer tensor-parallel ones, each of which would have more of a layer."""


def kept_whole(
    config: Any, *, optimizer: str = "adam", is_packed: bool = False, is_hybrid: bool = False
) -> Kept:
    """Of a cell of this model, of Megatron's ``config``.

    ``optimizer``: Megatron's name of it; ``is_packed``: see ``ModelSpec``; ``is_hybrid``: its layers are of several
    kinds.
    """
    whole = _first(_KEPT_WHOLE, config)
    if is_packed:
        whole = "its sequences are packed"
    elif is_hybrid and config.tensor_model_parallel_size * config.context_parallel_size > 1:
        whole = "it is a hybrid model"
    shards = _first(_SHARDS_KEPT, config)
    if compat.is_muon(optimizer):
        shards = "Muon goes by the matrix that each rank of a whole cell has"
    return Kept(whole or (shards if config.context_parallel_size == 1 else ""), shards)


def _first(reasons: _Reasons, config: Any) -> str:
    return next((why for why, holds in reasons if holds(config)), "")
