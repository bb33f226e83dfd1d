"""The layers that this rank holds, and the blocks (model chunks) that it assembles from them.

A :class:`HeldLayer` is one planner layer (0 embedding, 1..n transformer layers, n+1 head) with its
optimizer: what moves when a layer moves. A :class:`LayerBlock` is an ordinary Megatron model chunk with its
own DDP wrapper, put together from held layers for the layout at hand and thrown away with it; its layers
live on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from odyssey_megatron.mcore.model import rng, span, te
from odyssey_megatron.mcore.model.optimizer import LayerOptimizer

ModelProvider = Callable[..., Any]
"""Megatron's: (pre_process, post_process, pg_collection) -> GPTModel; it asks how many layers it is to build."""


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
    """Megatron's, for its optimizer."""
    loaded_groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """Of groups of parameters: what the flags say, and what a checkpoint has said in its place, which Megatron
    believes. Filled once, before the first step.
    """
    stages: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Of each of Megatron's own stages the planner layers [first, last) of its chunks, if initial weights are to be as
    Megatron's: drawn stage by stage, and chunk by chunk. Without them those of a layer depend on (seed, layer) alone.
    """
    seed_stage: Callable[[int], None] = lambda stage: None
    """Sets the generators as Megatron does before it builds a stage."""

    @property
    def num_layers(self) -> int:
        """Planner layers: transformer layers + embedding + head."""
        return self.config.num_layers + 2

    @property
    def head(self) -> int:
        return self.num_layers - 1


def main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient as DDP sums it, in a buffer of its own; shaped as ``parameter``."""
    return parameter.main_grad  # type: ignore[attr-defined] # DDP puts it there


class HeldLayer(torch.nn.Module):
    """One planner layer: its modules and, if this worker keeps that, its optimizer."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        parts: torch.nn.ModuleDict,
        groups: ProcessGroupCollection,
        seeds: rng.LayerSeeds,
        *,
        kept: bool = True,
    ):
        """``kept``: with the optimizer and its state."""
        super().__init__()
        self.index, self.config, self.ddp_config, self.parts = index, spec.config, spec.ddp_config, parts
        if spec.config.attention_dropout or spec.config.hidden_dropout:
            for name in ("embedding", "layer"):
                if name in self.parts:
                    seeds.attach(self.parts[name], index)
        self.optimizer = LayerOptimizer(self, spec, groups) if kept else None

    def moved_tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a new holder needs, in an order that is the same on every rank."""
        return self.weights() | (self.optimizer.state_tensors() if self.optimizer else {})

    @property
    def moved_bytes(self) -> int:
        """Of :meth:`moved_tensors`, wherever they lie."""
        state_bytes = self.optimizer.state_bytes if self.optimizer else 0
        return sum(weight.nbytes for weight in self.weights().values()) + state_bytes

    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters, in an order that is the same on every rank."""
        return {name: parameter.data for name, parameter in sorted(self.named_parameters())}


def initial_parts(
    spec: ModelSpec, indices: Iterable[int], groups: ProcessGroupCollection
) -> dict[int, torch.nn.ModuleDict]:
    """The modules of planner layers with their initial weights."""
    wanted, found = set(indices), {}
    if not spec.stages:
        for index in sorted(wanted):
            rng.set_state(
                spec.seed, step=rng.INITIAL, microbatch=rng.INITIAL, layer=index, tp_rank=groups.tp.rank()
            )
            found[index] = build_parts(spec, index, index + 1, groups)[index]
    for stage, chunks in enumerate(spec.stages):
        if any(wanted & set(range(first, last)) for first, last in chunks):
            spec.seed_stage(stage)
            for first, last in chunks:
                found |= build_parts(spec, first, last, groups)
    return {index: found[index] for index in sorted(wanted)}


def build_parts(
    spec: ModelSpec, first: int, last: int, groups: ProcessGroupCollection
) -> dict[int, torch.nn.ModuleDict]:
    """The modules of planner layers ``[first, last)``, by layer."""
    chunk = _build_chunk(spec, first, last, groups)
    parts: dict[int, dict[str, torch.nn.Module]] = {}
    if first == 0:
        parts[0] = {"embedding": chunk.embedding}
    for layer in chunk.decoder.layers:
        parts[layer.layer_number] = {"layer": layer}
    if last == spec.num_layers:
        parts[spec.head] = {
            "final_layernorm": chunk.decoder.final_layernorm,
            "output_layer": chunk.output_layer,
        }
    device, dtype = torch.cuda.current_device(), spec.config.params_dtype
    built = {
        index: torch.nn.ModuleDict(modules).to(device=device, dtype=dtype) for index, modules in parts.items()
    }
    for part in built.values():
        te.split(part, spec.config)
    return built


def _build_chunk(
    spec: ModelSpec, first: int, last: int, groups: ProcessGroupCollection, *, empty: bool = False
) -> Any:
    """Megatron's model of planner layers ``[first, last)``; without its transformer layers if ``empty``."""
    offset = max(first - 1, 0)
    count = 0 if empty else min(last, spec.head) - 1 - offset
    with span.building(offset, max(count, 0)):
        return spec.model_provider(
            pre_process=first == 0, post_process=last == spec.num_layers, pg_collection=groups
        )


def empty_chunk(spec: ModelSpec, groups: ProcessGroupCollection) -> Any:
    """What Megatron's code is shown of a worker that holds nothing: a chunk of its model with nothing to save."""
    chunk = _build_chunk(spec, 1, 1, groups, empty=True)
    chunk.sharded_state_dict = lambda *args, **kwargs: {}
    return chunk


class LayerBlock:
    """Layers ``[first, last)`` as one Megatron chunk under its own DDP wrapper.

    DDP gets a group of one: it provides ``main_grad`` buffers, while the sum over the block's holders is an instruction
    of the schedule. So a change of holders changes neither DDP nor optimizer.
    """

    def __init__(self, spec: ModelSpec, layers: Sequence[HeldLayer], groups: ProcessGroupCollection):
        self.layers = tuple(layers)
        self.first, self.last = layers[0].index, layers[-1].index + 1
        chunk = _build_chunk(spec, self.first, self.last, groups, empty=True)
        if self.first == 0:
            chunk.embedding = layers[0].parts["embedding"]
        if self.last == spec.num_layers:
            chunk.decoder.final_layernorm = layers[-1].parts["final_layernorm"]
            chunk.output_layer = layers[-1].parts["output_layer"]
        inner = [layer.parts["layer"] for layer in layers if layer.index not in (0, spec.head)]
        chunk.decoder.layers = torch.nn.ModuleList(inner)
        chunk.decoder.num_layers_per_pipeline_rank = len(inner)
        # The parts have the model's dtype already. Megatron's Float16Module would ask parallel_state which stage this
        # is, and every chunk of a cell of one is the last there.
        chunk.to(device=torch.cuda.current_device())
        self.model = DistributedDataParallel(
            spec.config, spec.ddp_config, chunk, disable_bucketing=True, pg_collection=groups
        )
        self.model.train()

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The contiguous main_grad buffers, 1-D."""
        return [buffer.grad_data for buffer in self.model.buffers]

    @property
    def partial_gradients(self) -> list[torch.Tensor]:
        """Of parameters that all ranks of a cell have alike, where each rank has seen a part of the sequence or of the
        heads (megatron core_v0.16.1 core/distributed/finalize_model_grads.py,
        ``_allreduce_non_tensor_model_parallel_grads``).
        """
        return [
            main_grad(parameter)
            for layer in self.layers
            for name, parameter in layer.named_parameters()
            if (layer.config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
            or (layer.config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))
        ]

    def zero_gradients(self) -> None:
        self.model.zero_grad_buffer()
