"""What a rank of a smaller cell has, as the parts of the job's tensor parallelism.

A job with tensor parallelism T cuts a layer into T parts. A cell that has lost ranks goes on with t of them, each with
``tensor_each`` = T/t consecutive parts, and its modules are Megatron's own for tensor parallelism t: a tensor of theirs
is what those parts' tensors are together. Whatever leaves such a rank, or arrives there, goes part by part, as a whole
cell's rank has it: names, shapes, order and flat buffers. Where the cell has but fewer context-parallel ranks, t is T.
A rank of a smaller gang has several consecutive expert-parallel ranks' experts: of these each is in one part alone, and
all else is the same in all of them.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from odyssey_megatron.cluster.cell import ONE, Cell
from odyssey_megatron.mcore.model.experts import in_whole, is_spread, of_one_rank
from odyssey_megatron.mcore.model.flat import Cut
from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock, main_grad
from odyssey_megatron.upstream import compat

Tensors = Mapping[str, torch.Tensor]


class Parts:
    """Those that the ranks of ``cell`` have of each layer."""

    def __init__(self, cell: Cell):
        self.each, self._numbers = cell.of_layer, cell.held_parts
        self._staged: dict[tuple[int, int, int, bool], _Staged] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def number(self, part: int) -> int:
        """Of ``part``, among those of this rank."""
        return self._numbers.index(part)

    @property
    def is_one(self) -> bool:
        """As in whole cells: it is the tensors themselves, and nothing here does anything."""
        return self.each == ONE

    def of(self, layer: HeldLayer, tensors: Tensors, part: int) -> dict[str, torch.Tensor]:
        """Of ``tensors`` of ``layer``, weights and state alike, those of ``part``."""
        if self.is_one:
            return dict(tensors)
        number = self._numbers.index(part)
        if self.each.experts > 1:
            return self._with_experts(layer, tensors, number)
        cuts = self._cuts(layer, tensors)
        return {name: cuts[name].part(one.detach(), number) for name, one in tensors.items()}

    @torch.no_grad()
    def arrived(self, layer: HeldLayer, tensors: Tensors, part: int, sent: Tensors) -> None:
        """What was received in ``sent``, which :meth:`of` has given, is that ``part`` of ``tensors`` from now on."""
        if self.each.shards > 1:  # else it is these tensors
            cuts, number = self._cuts(layer, tensors), self._numbers.index(part)
            for name, one in sent.items():
                cuts[name].put(tensors[name], number, one)

    def bytes_of_one(self, layer: HeldLayer) -> int:
        """Of all that moves of ``layer``, of one part: what is kept here of its optimizer state is a share of that."""
        weights, spread = layer.weights(), self.spread(layer)
        cuts = self._cuts(layer, weights) if self.each.shards > 1 else {}
        of_weights = sum(
            one.nbytes
            // (self.each.shards if name in cuts and cuts[name].dim is not None else 1)
            // (self.each.experts if name in spread else 1)
            for name, one in weights.items()
        )
        return of_weights + (layer.optimizer.part_bytes() if layer.optimizer else 0)

    def _cuts(self, layer: HeldLayer, names: Iterable[str]) -> dict[str, Cut]:
        """Of a parameter, or what an optimizer keeps of it: it is cut in the same way, if it has numbers of its own."""
        parameters, each = dict(layer.named_parameters()), self.each.shards
        found = {}
        for name in names:
            if (parameter := parameters.get(name)) is None:
                parameter = parameters[name.rpartition(".")[0]]
            alike = name.endswith(".step")
            found[name] = Cut(each) if alike else Cut.of(parameter, each)
        return found

    # -- experts ----------------------------------------------------------------------------------------------------

    @staticmethod
    def spread(layer: HeldLayer) -> set[str]:
        """The names of parameters of experts that are spread over ranks."""
        return {name for name, one in layer.named_parameters() if is_spread(one)}

    def _with_experts(self, layer: HeldLayer, tensors: Tensors, number: int) -> dict[str, torch.Tensor]:
        """The tensors themselves, without other parts' experts: with the names of a whole cell's rank, in its order.
        That is weights by name, what is no parameter, and by the names of parameters what optimizers keep.
        """
        parameters, found = dict(layer.named_parameters()), list[tuple[int, str, str, torch.Tensor]]()
        for name, one in tensors.items():
            kind, parameter, kept = 0, name, ""
            if name not in parameters:
                before, _, behind = name.rpartition(".")
                kind, parameter, kept = (2, before, f".{behind}") if before in parameters else (1, "", name)
            if parameter and is_spread(parameters[parameter]):
                part, parameter = in_whole(parameter, of_one_rank(layer.config))
                if part != number:
                    continue
            found.append((kind, parameter, f"{parameter}{kept}", one.detach()))
        return {name: one for *_, name, one in sorted(found, key=lambda each: each[:2])}

    def of_part(self, layer: HeldLayer, part: int) -> set[int]:
        """The ids of the parameters of experts that are in ``part``."""
        number, count = self._numbers.index(part), of_one_rank(layer.config)
        names = {name: one for name, one in layer.named_parameters() if is_spread(one)}
        return {id(one) for name, one in names.items() if in_whole(name, count)[0] == number}

    # -- gradients ------------------------------------------------------------------------------------------------

    def stage(self, block: LayerBlock, first: int, last: int, part: int, *, spread: bool = False) -> _Staged:
        """The gradients of layers ``[first, last)`` of ``block``, or of their experts that are ``spread`` over ranks,
        copied into buffers like a whole cell's.
        """
        if spread:
            ours = {one for layer in block.inside(first, last) for one in self.of_part(layer, part)}
            every = block.buffered(first, last, spread=True)
            made = _Staged.of([[one for one in own if id(one) in ours] for own in every], 1, 0)
        else:
            number = self._numbers.index(part)
            made = _Staged.of(block.buffered(first, last), self.each.shards, number)
        self._staged[first, last, part, spread] = made
        return made

    def staged(self, first: int, last: int, part: int, *, spread: bool = False) -> _Staged:
        """As :meth:`stage` has given it last."""
        return self._staged[first, last, part, spread]

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
    def of(cls, buffered: Iterable[Sequence[torch.nn.Parameter]], each: int, number: int) -> _Staged:
        made: _Staged = cls([], [], each, number)
        for parameters in buffered:
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
        "it has neither tensor, context nor expert parallelism",
        lambda config: (
            config.tensor_model_parallel_size == config.context_parallel_size == 1 and not _has_gangs(config)
        ),
    ),
    ("it computes in 8 bits", lambda config: getattr(config, "fp8", None)),
    (
        "its experts are cut over other ranks than its layers (--expert-tensor-parallel-size)",
        lambda config: (
            _has_gangs(config)
            and config.expert_tensor_parallel_size not in (None, config.tensor_model_parallel_size)
        ),
    ),
    (
        "its experts are one tensor (moe_use_legacy_grouped_gemm)",
        lambda config: _has_gangs(config) and getattr(config, "moe_use_legacy_grouped_gemm", False),
    ),
)

_SEQUENCES_KEPT: _Reasons = (
    # Megatron weighs an auxiliary loss by the tokens of one rank (megatron core_v0.16.1 transformer/moe/router.py,
    # ``attach_and_log_load_balancing_loss``), and experts with a capacity drop tokens of one.
    ("its layers have experts", lambda config: config.num_moe_experts),
    ("it predicts several tokens (--mtp-num-layers)", lambda config: config.mtp_num_layers),
    ("its forward draws numbers (dropout)", lambda config: config.attention_dropout or config.hidden_dropout),
)
"""Where a rank would have several parts of a sequence, or of a layer: a lane has all of a microbatch."""

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
    whole, shards = _first(_KEPT_WHOLE, config), _first(_SHARDS_KEPT, config)
    has_lanes = _has_gangs(config) and config.context_parallel_size == 1
    if not whole and not has_lanes:
        whole = "its sequences are packed" if is_packed else _first(_SEQUENCES_KEPT, config)
    if not whole and is_hybrid:
        whole = "it is a hybrid model"
    if compat.is_muon(optimizer):
        shards = "Muon goes by the matrix that each rank of a whole cell has"
    if not whole and not has_lanes and config.context_parallel_size == 1:
        whole = shards
    return Kept(whole, shards)


def _has_gangs(config: Any) -> bool:
    return bool(config.num_moe_experts) and config.expert_model_parallel_size > 1


def _first(reasons: _Reasons, config: Any) -> str:
    return next((why for why, holds in reasons if holds(config)), "")
