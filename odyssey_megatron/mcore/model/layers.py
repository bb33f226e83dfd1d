"""The layers that this rank holds, and the blocks (model chunks) that it assembles from them.

A :class:`HeldLayer` is one planner layer (0 embedding, 1..n transformer layers, n+1 head, then the weight that
embedding and head share, if they do) with its optimizer: the unit that moves. A :class:`LayerBlock` is an ordinary
Megatron model chunk with its own DDP wrapper, assembled from held layers for the current layout and discarded with it;
its layers live on.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from odyssey_megatron.cluster.shapes import ONE, Each
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.model import experts, needed, rng, slots, span, te, wgrad
from odyssey_megatron.mcore.model import groups as own
from odyssey_megatron.mcore.model.optimizer import LayerOptimizer
from odyssey_megatron.plan.placing.slices import EVERYTHING, Span
from odyssey_megatron.upstream import compat

ModelProvider = Callable[..., Any]
"""Megatron's: (pre_process, post_process, pg_collection) -> GPTModel made with it; it asks how many layers to build."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What the training script provides: how to build any part of the model, and how to train it."""

    config: TransformerConfig
    model_provider: ModelProvider
    optimizer_config: OptimizerConfig
    seed: int
    ddp_config: DistributedDataParallelConfig = field(
        default_factory=lambda: DistributedDataParallelConfig(
            overlap_grad_reduce=False, use_distributed_optimizer=False
        )
    )
    config_overrides: Any = None
    """Megatron's config overrides for its optimizer."""
    moments: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The types in which Adam's moments are kept between steps, by name, where they differ from the parameters' type
    (``--use-precision-aware-optimizer``).
    """
    loaded_groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """For each parameter group: the flags' settings, and the loaded checkpoint's, which replace them, as in Megatron.
    Filled once, before the first step.
    """
    is_tied: bool = False
    """Whether the provider's models have ``share_embeddings_and_output_weights``."""
    is_packed: bool = False
    """A microbatch is one row of packed sequences (Megatron's ``PackedSeqParams``): all layers ask where these end."""
    has_masks: bool = False
    """Samples come with masks of their own (``--reset-attention-mask``): all layers ask which tokens are hidden."""
    overflow_ends_job: bool = True
    """For a constant loss scale: whether a step that overflows ends the job; if False it is skipped."""
    stages: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each of Megatron's own stages, the planner layers [first, last) of its chunks, if initial weights are to
    equal Megatron's, which draws them stage by stage and chunk by chunk. If empty, a layer's weights depend on (seed,
    layer) alone.
    """
    seed_stage: Callable[[int], None] = lambda stage: None
    """Seeds the generators as Megatron does before it builds a stage."""

    @property
    def num_layers(self) -> int:
        """Planner layers: transformer layers + embedding + head."""
        return int(self.config.num_layers) + 2

    @property
    def head(self) -> int:
        return self.num_layers - 1

    @property
    def looks_ahead(self) -> bool:
        """Whether the head has the blocks of multi-token prediction, which embed tokens as the embedding does."""
        return bool(self.config.mtp_num_layers)

    @property
    def shares_embedding(self) -> bool:
        """Whether embedding and head have a weight in common."""
        return self.is_tied or self.looks_ahead

    @property
    def tied(self) -> int:
        """The layer number of the shared weight (``Layout.tied``)."""
        return self.num_layers

    def activation_shape(self, seq_length: int, micro_batch_size: int, parts: int) -> tuple[int, int, int]:
        """Shape of what layers send one another, where each rank has one of ``parts`` equal parts of the sequence."""
        rows = 1 if self.is_packed else micro_batch_size
        return seq_length * micro_batch_size // rows // parts, rows, self.config.hidden_size

    def reads_as(self, *, first: bool, last: bool) -> tuple[int, int]:
        """The stage, and the number of stages, by which a chunk at these ends of the model reads its microbatch.

        Where layers ask about sequences, every chunk reads as the only stage. Otherwise only the first and the last
        stage would be told where packed sequences end (up to core_v0.17.1), or be given masks (in any version;
        pretrain_gpt.py, ``get_batch``), and the result of a layer would depend on who holds it.
        """
        whole = self.is_packed or self.has_masks
        return own.place(first=first or whole, last=last or whole)


class SharedWeight(torch.nn.Module):
    """The weight that embedding and head share, as a layer that belongs to neither."""

    def __init__(self, weight: torch.nn.Parameter):
        super().__init__()
        self.weight = weight
        weight.odyssey_shared = True  # type: ignore[attr-defined]


def _is_shared(parameter: torch.nn.Parameter) -> bool:
    return getattr(parameter, "odyssey_shared", False)


def main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient that DDP accumulates, in a buffer of its own; shaped as ``parameter``."""
    gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined] # DDP puts it there
    return gradient


class HeldLayer(torch.nn.Module):
    """One planner layer: its modules and, if this worker keeps optimizer state of it, its optimizer."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        parts: torch.nn.ModuleDict,
        groups: ProcessGroupCollection,
        seeds: rng.LayerSeeds,
        *,
        kept: tuple[Span, ...] = (EVERYTHING,),
        each: Each = ONE,
    ):
        """``kept``: the spans whose optimizer state is kept here. ``each``: how much of the layer this rank has."""
        super().__init__()
        self.index, self.config, self.ddp_config = index, spec.config, spec.ddp_config
        self.parts, self.each = parts, each
        if _is_random(spec.config):
            for name in ("embedding", "layer"):
                if name in self.parts:
                    seeds.attach(self.parts[name], index)
            if "mtp" in self.parts:
                seeds.attach(self.parts["mtp_embedding"], 0)  # the embedding is here, too, if both ends are
                for number, one in enumerate(compat.blocks_ahead(self.parts["mtp"]), start=index):
                    seeds.attach(one, number)
        if "layer" in self.parts:
            wgrad.watch(self.parts["layer"], index)
        shares = spec.shares_embedding and index in (0, spec.head)
        needed.watch(self.parts.values(), (index, spec.tied) if shares else (index,))
        self.optimizer = LayerOptimizer(self, spec, groups, kept) if kept else None
        self.former: list[LayerOptimizer] = []
        """Optimizers of earlier layouts, to which others may return until a step of the current one is committed."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As of any module; but an embedding or head leaves out the shared weight, even while it is lent to it."""
        shares = "shared" in self.parts
        for name, parameter in super().named_parameters(*args, **kwargs):
            if shares or not _is_shared(parameter):
                yield name, parameter

    def moved_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that a new holder of the whole layer needs, in an order that is the same on every rank."""
        return self.weights() | (self.optimizer.state_tensors() if self.optimizer else {})

    @property
    def states(self) -> list[LayerOptimizer]:
        """The optimizers whose state is current; the one that makes the step comes first."""
        return [*filter(None, [self.optimizer]), *self.former]

    def gradients(self) -> list[torch.Tensor]:
        """The accumulated gradient of each parameter, of its shape."""
        return [main_grad(parameter) for parameter in self.parameters()]

    def weights(self) -> dict[str, torch.Tensor]:
        """All tensors that a forward computes with, of their own shapes, in an order that is the same on every rank."""
        parameters = {name: parameter.data for name, parameter in sorted(self.named_parameters())}
        return parameters | experts.biases(self)


def _is_random(config: TransformerConfig) -> bool:
    """Whether a forward draws random numbers."""
    drawn = config.attention_dropout, config.hidden_dropout, config.moe_input_jitter_eps
    return any(drawn) or config.moe_router_force_load_balancing


def initial_parts(
    spec: ModelSpec, indices: Iterable[int], groups: ProcessGroupCollection
) -> dict[int, torch.nn.ModuleDict]:
    """The modules of the planner layers ``indices``, with their initial weights."""
    wanted, found = set(indices), {}
    if not spec.stages:
        for index in sorted(wanted):
            drawn_with = 0 if index == spec.tied else index
            rng.set_state(
                spec.seed,
                step=rng.INITIAL,
                microbatch=rng.INITIAL,
                layer=drawn_with,
                part=rng.LayerPart.of(groups),
            )
            found[index] = build_part(spec, index, groups)
    for stage, chunks in enumerate(spec.stages):
        if any(
            wanted & {*range(first, last), *([spec.tied] if first == 0 else [])} for first, last in chunks
        ):
            spec.seed_stage(stage)
            for first, last in chunks:
                found |= build_parts(spec, first, last, groups)
    return {index: found[index] for index in sorted(wanted)}


def build_part(spec: ModelSpec, layer: int, groups: ProcessGroupCollection) -> torch.nn.ModuleDict:
    """The modules of one planner layer."""
    first = 0 if layer == spec.tied else layer
    last = first + 1
    if layer == spec.head and spec.looks_ahead and not (spec.stages and spec.stages[-1][-1] == (first, last)):
        first -= 1  # the blocks of multi-token prediction copy the kind of the stage's last layer
    return build_parts(spec, first, last, groups)[layer]


def build_parts(
    spec: ModelSpec, first: int, last: int, groups: ProcessGroupCollection
) -> dict[int, torch.nn.ModuleDict]:
    """The modules of planner layers ``[first, last)``, by layer; with the embedding comes the weight that it shares.

    Raises:
        ConfigError: embedding and head share weights otherwise than ``spec`` says.
    """
    chunk = slots.built(spec.config, groups, lambda: _build_chunk(spec, first, last, groups))
    if getattr(chunk, "share_embeddings_and_output_weights", False) != spec.is_tied:
        raise ConfigError(
            f"the model provider's share_embeddings_and_output_weights is {not spec.is_tied}, and ModelSpec.is_tied "
            f"{spec.is_tied}. Set both to the same."
        )
    parts: dict[int, dict[str, torch.nn.Module]] = {}
    if first == 0:
        parts[0] = {"embedding": chunk.embedding}
    for layer in chunk.decoder.layers:
        parts[layer.layer_number] = {"layer": layer}
    if last == spec.num_layers:
        parts[spec.head] = _head_of(spec, chunk, groups)
    if spec.shares_embedding and first == 0:
        parts[spec.tied] = {"shared": SharedWeight(chunk.embedding.word_embeddings.weight)}
    if spec.shares_embedding:
        for module in _places(chunk):
            _lend(module, None)
    device, dtype = torch.cuda.current_device(), spec.config.params_dtype
    built = {
        index: torch.nn.ModuleDict(modules).to(device=device, dtype=dtype) for index, modules in parts.items()
    }
    for part in built.values():
        te.split(part, spec.config)
    return built


def _head_of(spec: ModelSpec, chunk: Any, groups: ProcessGroupCollection) -> dict[str, torch.nn.Module]:
    """The modules of the head at the end of ``chunk``, in the order of Megatron's parameters."""
    name = compat.name_of_final_norm(chunk.decoder)
    norm = getattr(chunk.decoder, name)
    # With multi-token prediction the norm follows the last transformer layer, which is elsewhere.
    if norm is None:
        norm = getattr(_build_chunk(spec, spec.head, spec.num_layers, groups, empty=True).decoder, name)
    ahead = {"mtp": chunk.mtp, "mtp_embedding": _twin(chunk.embedding)} if spec.looks_ahead else {}
    return {"final_layernorm": norm, **ahead, "output_layer": chunk.output_layer}


def _twin(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of ``module`` without parameters, which will be lent to it."""
    twin = copy.copy(module)
    own = {name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, dict)}
    vars(twin).update(own, _modules={name: _twin(child) for name, child in module.named_children()})
    for name in module._parameters:
        twin.register_parameter(name, None)
    return twin


def _places(chunk: Any) -> list[torch.nn.Module]:
    """The modules of a chunk that can use the shared weight; where both are here, the head takes the embedding's."""
    places = [chunk.embedding.word_embeddings] if hasattr(chunk, "embedding") else []
    ends_with_it = chunk.post_process and chunk.share_embeddings_and_output_weights
    return [*places, chunk.output_layer] if ends_with_it else places


def _lend(module: torch.nn.Module, weight: torch.nn.Parameter | None, *, hidden: bool = False) -> None:
    """Make ``module`` compute with ``weight``, which counts as one of its parameters unless ``hidden``."""
    module.__dict__.pop("weight", None)
    module.register_parameter("weight", None if hidden else weight)
    if hidden:
        del module._parameters["weight"]
        module.__dict__["weight"] = weight


def _build_chunk(
    spec: ModelSpec, first: int, last: int, groups: ProcessGroupCollection, *, empty: bool = False
) -> Any:
    """Megatron's model of planner layers ``[first, last)``; if ``empty``, without its transformer layers and those of
    multi-token prediction.
    """
    offset = max(first - 1, 0)
    count = 0 if empty else min(last, spec.head) - 1 - offset
    pre_process, post_process = first == 0, last == spec.num_layers
    stage = own.in_stage(*own.place(first=pre_process, last=post_process))
    with span.building(offset, max(count, 0)), stage, _to_build_with(spec, empty=empty):
        chunk = spec.model_provider(pre_process=pre_process, post_process=post_process, pg_collection=groups)
    compat.check_model(chunk)
    compat.number_layers(chunk.decoder.layers, offset)
    return chunk


_OF_THE_LOOP = (
    "grad_scale_func finalize_model_grads_func no_sync_func grad_sync_func param_sync_func timers"
).split()
"""What Megatron's loop puts into the config. It cannot be copied, but a mixture of experts copies it all."""


@contextlib.contextmanager
def _to_build_with(spec: ModelSpec, *, empty: bool) -> Iterator[None]:
    """In the body Megatron does not give the last stage a copy of the embedding's weight, nor sum initial values."""
    instead: dict[str, Any] = dict.fromkeys(_OF_THE_LOOP)
    if empty:
        instead["mtp_num_layers"] = None
    if spec.shares_embedding:
        instead["pipeline_model_parallel_size"] = 1
    before = {name: getattr(spec.config, name) for name in instead}
    vars(spec.config).update(instead)
    try:
        yield
    finally:
        vars(spec.config).update(before)


def empty_chunk(spec: ModelSpec, groups: ProcessGroupCollection) -> Any:
    """Return a chunk to show Megatron's code on a worker that holds nothing; it saves and loads nothing."""
    # Megatron drops empty dictionaries from what it has loaded, and would miss the chunk's: so it has one entry.
    chunk = _build_chunk(spec, 1, 1, groups, empty=True)
    chunk.sharded_state_dict = lambda *args, **kwargs: {"nothing": LocalNonpersistentObject(None)}
    chunk.load_state_dict = lambda *args, **kwargs: None
    return chunk


class LayerBlock:
    """Layers ``[first, last)`` as one Megatron chunk under its own DDP wrapper.

    DDP gets a group of one: it provides the ``main_grad`` buffers, while an instruction of the schedule sums over the
    block's holders. So a change of holders changes neither DDP nor the optimizer.
    """

    def __init__(self, spec: ModelSpec, layers: Sequence[HeldLayer], groups: ProcessGroupCollection):
        self.spec, self.layers = spec, tuple(layers)
        self.first, self.last = layers[0].index, layers[-1].index + 1
        self.is_chunk = self.first != spec.tied
        """Whether it is a chunk of Megatron's model, rather than the shared weight alone."""
        self.borrowed: torch.nn.Parameter | None = None
        # The parts have the model's dtype already. Megatron's Float16Module would ask parallel_state which stage this
        # is, and in a cell of one every chunk is the last.
        chunk = self._chunk(groups) if self.is_chunk else layers[0]
        chunk.to(device=torch.cuda.current_device())
        self.model = DistributedDataParallel(
            spec.config, spec.ddp_config, chunk, disable_bucketing=True, pg_collection=groups
        )
        self.model.train()

    def _chunk(self, groups: ProcessGroupCollection) -> Any:
        spec, layers = self.spec, self.layers
        chunk = _build_chunk(spec, self.first, self.last, groups, empty=True)
        if self.first == 0:
            chunk.embedding = layers[0].parts["embedding"]
        if self.last == spec.num_layers:
            setattr(
                chunk.decoder, compat.name_of_final_norm(chunk.decoder), layers[-1].parts["final_layernorm"]
            )
            chunk.output_layer = layers[-1].parts["output_layer"]
            if spec.looks_ahead:
                chunk.mtp, chunk.mtp_process = layers[-1].parts["mtp"], True
                if self.first > 0:
                    chunk.embedding = layers[-1].parts["mtp_embedding"]
        inner = [layer.parts["layer"] for layer in layers if layer.index not in (0, spec.head)]
        chunk.decoder.layers = torch.nn.ModuleList(inner)
        chunk.decoder.num_layers_per_pipeline_rank = len(inner)
        for module in _places(chunk) if spec.shares_embedding else ():
            _lend(module, None)  # its gradient is accumulated elsewhere
        return chunk

    def borrow(self, weight: torch.nn.Parameter, *, hidden: bool) -> bool:
        """Make embedding and head compute with ``weight``. Returns whether either is in this block.

        Args:
            hidden: another chunk of this worker shows the weight to Megatron.
        """
        places = _places(self.model.module)
        for module in places[:1]:
            _lend(module, weight, hidden=hidden)
        self.borrowed = weight if places else None
        return bool(places)

    @contextlib.contextmanager
    def shown(self) -> Iterator[bool]:
        """In the body Megatron sees the borrowed weight even if it was hidden; yields whether it was."""
        modules = _places(self.model.module) if self.borrowed is not None else []
        hidden = [module for module in modules if "weight" in module.__dict__]
        for module in hidden:
            _lend(module, self.borrowed)
        try:
            yield bool(hidden)
        finally:
            for module in hidden:
                _lend(module, self.borrowed, hidden=True)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The contiguous main_grad buffers, 1-D, without those of experts that are spread over ranks."""
        return [buffer.grad_data for buffer in cast(Any, self.model.buffers)]

    @property
    def expert_buffers(self) -> list[torch.Tensor]:
        """The main_grad buffers of experts that are spread over ranks (``experts.is_spread``), 1-D."""
        return [buffer.grad_data for buffer in self.model.expert_parallel_buffers]

    def gradients(self, first: int, last: int) -> list[torch.Tensor]:
        """The parts of the :attr:`buffers` that belong to the layers ``[first, last)`` of this block, 1-D."""
        return self._within(self.buffers, first, last)

    def expert_gradients(self, first: int, last: int) -> list[torch.Tensor]:
        """The same for :attr:`expert_buffers`."""
        return self._within(self.expert_buffers, first, last)

    def _within(self, buffers: list[torch.Tensor], first: int, last: int) -> list[torch.Tensor]:
        """The parts of ``buffers`` for these layers. DDP lays out parameters in the order of layers, or reversed."""
        if (first, last) == (self.first, self.last):
            return buffers
        views = [view for layer in self.inside(first, last) for view in layer.gradients()]
        found = []
        for buffer in buffers:
            own = [
                one
                for one in views
                if one.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            ]
            low = min((one.storage_offset() for one in own), default=0)
            high = max((one.storage_offset() + one.numel() for one in own), default=0)
            assert high - low == sum(one.numel() for one in own), "another layer's gradients lie between"
            found += [buffer[low - buffer.storage_offset() : high - buffer.storage_offset()]] * bool(own)
        return found

    def buffered(self, first: int, last: int, *, spread: bool = False) -> list[list[torch.nn.Parameter]]:
        """The parameters in each of :meth:`gradients`, or, if ``spread``, of :meth:`expert_gradients`, in order."""
        mine = [parameter for layer in self.inside(first, last) for parameter in layer.parameters()]
        found = []
        for buffer in self.expert_buffers if spread else self.buffers:
            start = buffer.untyped_storage().data_ptr()
            inside = [one for one in mine if main_grad(one).untyped_storage().data_ptr() == start]
            if inside:
                found.append(sorted(inside, key=lambda one: main_grad(one).storage_offset()))
        return found

    def inside(self, first: int, last: int) -> list[HeldLayer]:
        """The layers of this block that are among ``[first, last)``."""
        return [layer for layer in self.layers if first <= layer.index < last]

    def partial_parameters(self, first: int, last: int) -> list[torch.nn.Parameter]:
        """The parameters that all ranks of a cell have alike, where each rank has seen only a part of the sequence or
        of the heads (megatron core_v0.16.1 core/distributed/finalize_model_grads.py,
        ``_allreduce_non_tensor_model_parallel_grads``).
        """
        return [
            parameter
            for layer in self.inside(first, last)
            for name, parameter in layer.named_parameters()
            if (layer.config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
            or (layer.config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))
        ]

    def zero_gradients(self) -> None:
        self.model.zero_grad_buffer()


def lend(chunks: Iterable[LayerBlock], held: Mapping[int, HeldLayer]) -> None:
    """Make embedding and head of a worker compute with their shared weight, if any; Megatron sees it in the first."""
    lent = False
    for chunk in chunks:
        if shared := held.get(chunk.spec.tied):
            lent |= chunk.borrow(*shared.parameters(), hidden=lent)
