"""Mixtures of experts: what their routers count, each token once, whatever a failure makes run again (I4).

A router adds to its count of tokens, and to Megatron's sums of auxiliary losses, whenever it runs. Here each
(microbatch, layer) has a record of its own, which the newest run of it fills, be that a recomputation. The sum of all
records rides on the step's totals. From it every holder of a layer moves the biases of its experts (auxiliary-loss-free
balancing), and Megatron logs its auxiliary losses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import Router

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.model.rng import LayerSeeds
from odyssey_megatron.mcore.pinned import to_device
from odyssey_megatron.upstream import compat

Records = dict[tuple[int, int], torch.Tensor]
"""(microbatch, layer) -> its row: an auxiliary loss for each name, then the tokens of each expert. Layers are counted
as Megatron logs them: those of multi-token prediction, which are the head's, follow upon the others.
"""
_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
}
"""Kind of router -> what Megatron calls its auxiliary loss where it logs it."""


def with_experts(config: TransformerConfig) -> list[int]:
    """The layers whose MLP is a mixture of experts (megatron core_v0.16.1 models/gpt/gpt_layer_specs.py,
    ``get_gpt_decoder_layer_specs``). Those of multi-token prediction, behind the others, are like the last one.
    """
    if config.num_moe_experts is None:
        return []
    every = config.moe_layer_freq
    pattern = every if isinstance(every, list) else [at % every == 0 for at in range(config.num_layers)]
    pattern = [*pattern, *pattern[-1:] * (config.mtp_num_layers or 0)]
    return [layer for layer, has_them in enumerate(pattern, start=1) if has_them]


def is_spread(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` is of an expert that not every expert-parallel rank has."""
    return not getattr(parameter, "allreduce", True)


_OF_ONE = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)(.*)")
"""The name of a parameter of one expert, or of what an optimizer keeps of it: megatron core_v0.16.1
transformer/moe/experts.py, ``SequentialMLP`` and ``TEGroupedMLP``.
"""


def of_one_rank(config: TransformerConfig) -> int:
    """How many experts of a layer each rank of a whole cell has."""
    return (config.num_moe_experts or 0) // config.expert_model_parallel_size


def in_whole(name: str, count: int) -> tuple[int, str]:
    """Of a parameter of an expert, where several expert-parallel ranks' experts are on one, ``count`` of each: the
    number of its rank among these, and its ``name`` there.
    """
    before, number, behind = _OF_ONE.fullmatch(name).groups()  # type: ignore[union-attr]
    rank, own = divmod(int(number), count)
    return rank, f"{before}{own}{behind}"


def _check(config: TransformerConfig) -> None:
    """Of a script of the user's own; an unmodified Megatron-LM job's flags have been looked at by then."""
    if config.num_moe_experts is None:
        return
    experts, tensor = config.expert_tensor_parallel_size, config.tensor_model_parallel_size
    if config.expert_model_parallel_size == 1 and experts != tensor:
        raise ConfigError(
            f"expert_tensor_parallel_size {experts} with tensor_model_parallel_size {tensor} and one expert-parallel "
            "rank: Megatron would not sum the gradients of experts over the ranks that have the same. Set "
            "expert_model_parallel_size above 1, or the two to the same."
        )


def biases(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The biases of the experts in ``module``: state of a layer that no optimizer changes."""
    return {name: value for name, value in module.named_buffers() if name.endswith(".expert_bias")}


class Routing:
    """The records of a step."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection, seeds: LayerSeeds):
        """``seeds`` knows which microbatch is at hand. Raises ConfigError."""
        _check(config)
        self._config, self._seeds = config, seeds
        self._layers = {layer: place for place, layer in enumerate(with_experts(config))}
        self._cell_size = groups.tp_cp.size()
        kinds = config.moe_router_load_balancing_type
        kinds = [kinds] if isinstance(kinds, str) else kinds
        self._names = ["z_loss"] * (config.moe_z_loss_coeff is not None)
        self._names += [name for kind, name in _LOSSES.items() if kind in kinds]
        self._counted = (config.num_moe_experts or 0) if config.moe_router_enable_expert_bias else 0
        self.records: Records = {}

    # -- in a forward ---------------------------------------------------------------------------------------------

    def attach(self, layer: int, parts: torch.nn.Module) -> None:
        """From now on what the routers of planner ``layer`` count is recorded: one, or none; several in a head."""
        routers = [one for one in parts.modules() if isinstance(one, Router)]
        for number, router in enumerate(routers, start=layer):
            self._attach(number, router)

    def _attach(self, layer: int, router: Router) -> None:
        if self._counted:  # a model in 16 bits would count, and balance, in 16 bits
            for name in ("expert_bias", "local_tokens_per_expert"):
                setattr(router, name, getattr(router, name).to(torch.float32))

        def before(*unused: Any) -> None:
            if router.training:
                compat.clear_aux_losses()
                if self._counted:
                    router.local_tokens_per_expert.zero_()

        def after(*unused: Any) -> None:
            if router.training and torch.is_grad_enabled():  # else it will be recomputed
                self.records[self._seeds.microbatch, layer] = self._row(router)

        router.register_forward_pre_hook(before)
        router.register_forward_hook(after)

    def _row(self, router: Router) -> torch.Tensor:
        row = torch.zeros(
            len(self._names) + self._counted, dtype=torch.float64, device=torch.cuda.current_device()
        )
        for name, (values, is_part) in compat.aux_losses().items():
            if name in self._names:
                row[self._names.index(name)] = values.sum() / (1 if is_part else self._cell_size)
        if self._counted:
            row[len(self._names) :] = router.local_tokens_per_expert
        return row

    def take_back(self, microbatch: int, first: int, last: int) -> Records:
        """The records of a visit, which count for nothing before they are put back."""
        head = self._config.num_layers + 1
        ours = [key for key in self.records if key[0] == microbatch and first <= min(key[1], head) < last]
        return {key: self.records.pop(key) for key in ours}

    # -- at the step's end: [layer with experts, the sum of its records], float64, flat -----------------------------

    @property
    def num_totals(self) -> int:
        return len(self._layers) * (len(self._names) + self._counted)

    def local_totals(self) -> torch.Tensor:
        """This rank's share."""
        table = torch.zeros(self._shape, dtype=torch.float64, device=torch.cuda.current_device())
        for (_, layer), row in sorted(self.records.items(), key=lambda item: item[0]):
            table[self._layers[layer]] += row
        return table.flatten()

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self._layers), len(self._names) + self._counted

    def losses(self, totals: torch.Tensor) -> dict[str, list[float]]:
        """Name -> of each layer what Megatron would have added up by now, from everyone's totals."""
        table = totals.reshape(self._shape).tolist()
        count = self._config.num_layers + (self._config.mtp_num_layers or 0)
        found = {name: [0.0] * count for name in self._names}
        for layer, place in self._layers.items():
            for index, name in enumerate(self._names):
                found[name][layer - 1] = table[place][index]
        return found

    def balance(self, layers: Mapping[int, torch.nn.Module], totals: torch.Tensor) -> None:
        """Moves the biases of ``layers`` by a step against what their experts have had too much of, as megatron
        core_v0.16.1 transformer/moe/moe_utils.py, ``get_updated_expert_bias``, does.
        """
        if not self._counted:
            return
        tokens = totals.reshape(self._shape)[:, len(self._names) :].to(torch.float32)
        beside = torch.sign(tokens.sum(1, keepdim=True) / self._counted - tokens)
        moves = to_device(beside * self._config.moe_router_bias_update_rate)
        for layer, module in layers.items():
            for number, bias in enumerate(biases(module).values(), start=layer):
                bias += moves[self._layers[number]]


def show(losses: Mapping[str, Iterable[float]]) -> None:
    """Megatron's loop logs these as what this step's routers have added up."""
    compat.set_aux_losses({name: torch.tensor(list(values)) for name, values in losses.items()})
