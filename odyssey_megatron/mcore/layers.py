"""The layers that this rank holds, and the blocks (model chunks) that it assembles from them.

A :class:`HeldLayer` is one planner layer (0 embedding, 1..n transformer layers, n+1 head) with its
optimizer: what moves when a layer moves. A :class:`LayerBlock` is an ordinary Megatron model chunk with its
own DDP wrapper, put together from held layers for the layout at hand and thrown away with it; its layers
live on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from odyssey_megatron.mcore import rng
from odyssey_megatron.mcore.optimizer import LayerOptimizer

ShellProvider = Callable[[bool, bool, ProcessGroupCollection], Any]
"""(pre_process, post_process, pg_collection) -> GPTModel without transformer layers."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What the training script provides: how to build any part of the model."""

    config: TransformerConfig
    layer_spec: ModuleSpec
    shell_provider: ShellProvider
    optimizer_config: OptimizerConfig
    seed: int
    ddp_config: DistributedDataParallelConfig = field(
        default_factory=lambda: DistributedDataParallelConfig(
            overlap_grad_reduce=False, use_distributed_optimizer=False
        )
    )

    @property
    def num_layers(self) -> int:
        """Planner layers: transformer layers + embedding + head."""
        return self.config.num_layers + 2

    @property
    def head(self) -> int:
        return self.num_layers - 1


class HeldLayer(torch.nn.Module):
    """One planner layer: its modules and its optimizer."""

    def __init__(self, spec: ModelSpec, index: int, groups: ProcessGroupCollection, seeds: rng.LayerSeeds):
        super().__init__()
        self.index, self.config, self.ddp_config = index, spec.config, spec.ddp_config
        self.parts = initial_parts(spec, index, groups)
        if spec.config.attention_dropout or spec.config.hidden_dropout:
            for name in ("embedding", "layer"):
                if name in self.parts:
                    seeds.attach(self.parts[name], index)
        self.optimizer = LayerOptimizer(self, spec.optimizer_config, groups)

    def moved_tensors(self) -> list[torch.Tensor]:
        """Everything that a new holder needs, in an order that is the same on every rank."""
        return [*(p.data for _, p in sorted(self.named_parameters())), *self.optimizer.state_tensors()]


def initial_parts(spec: ModelSpec, index: int, groups: ProcessGroupCollection) -> torch.nn.ModuleDict:
    """The modules of planner layer ``index``; their initial weights depend on (seed, layer) alone."""
    rng.set_state(spec.seed, step=rng.INITIAL, microbatch=rng.INITIAL, layer=index)
    if index == 0:
        parts = {"embedding": spec.shell_provider(True, False, groups).embedding}
    elif index == spec.head:
        shell = spec.shell_provider(False, True, groups)
        parts = {"final_layernorm": shell.decoder.final_layernorm, "output_layer": shell.output_layer}
    else:
        layer = build_module(spec.layer_spec, config=spec.config, layer_number=index, pg_collection=groups)
        parts = {"layer": layer}
    return torch.nn.ModuleDict(parts).to(device=torch.cuda.current_device(), dtype=spec.config.params_dtype)


class LayerBlock:
    """Layers ``[first, last)`` as one Megatron chunk under its own DDP wrapper.

    DDP gets a group of one: it provides ``main_grad`` buffers, while the sum over the block's holders is an instruction
    of the schedule. So a change of holders changes neither DDP nor optimizer.
    """

    def __init__(self, spec: ModelSpec, layers: Sequence[HeldLayer], groups: ProcessGroupCollection):
        self.layers = tuple(layers)
        self.first, self.last = layers[0].index, layers[-1].index + 1
        pre, post = self.first == 0, self.last == spec.num_layers
        chunk = spec.shell_provider(pre, post, groups)
        if pre:
            chunk.embedding = layers[0].parts["embedding"]
        if post:
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

    def zero_gradients(self) -> None:
        self.model.zero_grad_buffer()
