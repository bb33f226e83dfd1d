"""Mixtures of experts: what their routers count, with each token counted once, whatever a failure makes run again (I4).

A router adds to its token counts, and to Megatron's sums of auxiliary losses, whenever it runs. Here each (microbatch,
layer) has a record of its own, which is overwritten each time that the router runs for it, recomputation included. The
sum of all records travels with the step's totals. From this sum every holder of a layer updates the biases of its
experts (auxiliary-loss-free balancing), Megatron logs its auxiliary losses, and plans know which experts are busy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import Router

from odyssey_megatron.cluster.shapes import ONE, Each
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.model.rng import LayerSeeds
from odyssey_megatron.mcore.pinned import to_device
from odyssey_megatron.upstream import compat

Records = dict[tuple[int, int], torch.Tensor]
"""(microbatch, layer) -> its row: one auxiliary loss for each name, then the number of tokens of each expert. Layers
are numbered as Megatron logs them: those of multi-token prediction, which belong to the head, come after the others.
"""
_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
}
"""Kind of router -> the name under which Megatron logs its auxiliary loss."""


def with_experts(config: TransformerConfig) -> list[int]:
    """The layers whose MLP is a mixture of experts (megatron core_v0.16.1 models/gpt/gpt_layer_specs.py,
    ``get_gpt_decoder_layer_specs``). The layers of multi-token prediction, which come after the others, are like the
    last of them.
    """
    if config.num_moe_experts is None:
        return []
    every = config.moe_layer_freq
    pattern = every if isinstance(every, list) else [at % every == 0 for at in range(config.num_layers)]
    pattern = [*pattern, *pattern[-1:] * (config.mtp_num_layers or 0)]
    return [layer for layer, has_them in enumerate(pattern, start=1) if has_them]


def is_spread(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` belongs to an expert that only some of the expert-parallel ranks have."""
    return not getattr(parameter, "allreduce", True)


_OF_ONE = re.compile(r"((.*\.experts\.(?:local_experts|linear_fc[12])\.)(?:weight|bias)?)(\d+)(.*)")
"""Matches the name of a parameter of one expert, or of its optimizer state: megatron core_v0.16.1
transformer/moe/experts.py, ``SequentialMLP`` and ``TEGroupedMLP``.
"""


def of_one_rank(config: TransformerConfig) -> int:
    """The number of experts of a layer that each rank of a whole cell has."""
    return int(config.num_moe_experts or 0) // int(config.expert_model_parallel_size)


def in_whole(name: str, count: int, each: Each = ONE) -> tuple[int, str]:
    """Translate the ``name`` of an expert's parameter, on a rank that has ``each`` of the layer, to a whole cell, whose
    ranks have ``count`` experts each.

    Returns:
        The number of the part that the expert is in, among those of this rank, and the parameter's name on a rank of a
        whole cell.
    """
    before, _, number, behind = _OF_ONE.fullmatch(name).groups()  # type: ignore[union-attr]
    part, own = each.place_of(int(number), count)
    return part, f"{before}{own}{behind}"


def of_all_in_whole(name: str, count: int) -> list[str]:
    """The names, on a rank of a whole cell with ``count`` experts, of the parameters that are like that of this
    ``name`` of one of them.
    """
    before, _, _, behind = _OF_ONE.fullmatch(name).groups()  # type: ignore[union-attr]
    return [f"{before}{own}{behind}" for own in range(count)]


def home_of_all(name: str) -> str:
    """The name of the module in which all parameters of an expert like that of this ``name`` are beside each other,
    expert after expert: of ``SequentialMLP`` the list of experts, of ``TEGroupedMLP`` one of the two products.
    """
    return str(_OF_ONE.fullmatch(name).group(2))  # type: ignore[union-attr]


def _check(config: TransformerConfig) -> None:
    """Check the config of a user's own script; the flags of an unmodified Megatron-LM job have been checked before."""
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
    """The biases of the experts in ``module``, by name, each [experts]: layer state that no optimizer changes."""
    return {name: value for name, value in module.named_buffers() if name.endswith(".expert_bias")}


class Routing:
    """The records of a step: what the routers of this rank have counted."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection, seeds: LayerSeeds):
        """``seeds`` knows the microbatch at hand. Raises ConfigError."""
        _check(config)
        self._config, self._seeds = config, seeds
        self._layers = {layer: place for place, layer in enumerate(with_experts(config))}
        self._cell_size = groups.tp_cp.size()
        kinds = config.moe_router_load_balancing_type
        kinds = [kinds] if isinstance(kinds, str) else kinds
        self._names = ["z_loss"] * (config.moe_z_loss_coeff is not None)
        self._names += [name for kind, name in _LOSSES.items() if kind in kinds]
        self._has_biases = config.moe_router_enable_expert_bias
        self._num_experts = config.num_moe_experts or 0
        self.tokens = torch.zeros(self._shape[0], self._num_experts, dtype=torch.float64)
        """The tokens of each expert in the last step, on all ranks, [layer with experts, expert]."""
        self.records: Records = {}

    # -- in a forward ---------------------------------------------------------------------------------------------

    def attach(self, layer: int, parts: torch.nn.Module) -> None:
        """From now on record what the routers of planner ``layer`` count. A layer has one router or none; a head may
        have several.
        """
        routers = [one for one in parts.modules() if isinstance(one, Router)]
        for number, router in enumerate(routers, start=layer):
            self._attach(number, router)

    def _attach(self, layer: int, router: Router) -> None:
        if self._has_biases:  # a 16-bit model would count, and balance, in 16 bits
            for name in ("expert_bias", "local_tokens_per_expert"):
                setattr(router, name, getattr(router, name).to(torch.float32))

        def before(*unused: Any) -> None:
            if router.training:
                compat.clear_aux_losses()
                if self._has_biases:
                    _tokens(router).zero_()

        def after(router: Router, given: Any, made: Any) -> Any:
            if self._seeds.is_idle:  # whatever it has counted is not recorded
                return tuple(map(_nothing, made))
            if router.training and torch.is_grad_enabled():  # otherwise it will be recomputed
                # What Megatron balances by leaves padding out.
                tokens = _tokens(router) if self._has_biases else made[1].sum(dim=0)
                self.records[self._seeds.microbatch, layer] = self._row(tokens)
            return None

        router.register_forward_pre_hook(before)
        router.register_forward_hook(
            after, prepend=True
        )  # before choices become those of slots (``slots.py``)

    def _row(self, tokens: torch.Tensor) -> torch.Tensor:
        """The record of a router that has just run: 1-D, float64, as described at ``Records``.

        ``tokens``: the number that it has sent to each expert, [experts].
        """
        row = torch.zeros(
            len(self._names) + self._num_experts, dtype=torch.float64, device=torch.cuda.current_device()
        )
        for name, (values, is_part) in compat.aux_losses().items():
            if name in self._names:
                row[self._names.index(name)] = values.sum() / (1 if is_part else self._cell_size)
        row[len(self._names) :] = tokens
        return row

    def take_back(self, microbatch: int, first: int, last: int) -> Records:
        """Remove and return the records of a visit; they count for nothing unless they are put back."""
        head = self._config.num_layers + 1
        ours = [key for key in self.records if key[0] == microbatch and first <= min(key[1], head) < last]
        return {key: self.records.pop(key) for key in ours}

    # -- at the step's end: [layer with experts, the sum of its records], float64, flat -----------------------------

    @property
    def num_totals(self) -> int:
        return len(self._layers) * (len(self._names) + self._num_experts)

    def local_totals(self) -> torch.Tensor:
        """This rank's share of the totals, 1-D, float64."""
        table = torch.zeros(self._shape, dtype=torch.float64, device=torch.cuda.current_device())
        for (_, layer), row in sorted(self.records.items(), key=lambda item: item[0]):
            table[self._layers[layer]] += row
        return table.flatten()

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self._layers), len(self._names) + self._num_experts

    def losses(self, totals: torch.Tensor) -> dict[str, list[float]]:
        """Name -> for each layer, the sum that Megatron would have by now, from everyone's ``totals``, 1-D."""
        table = totals.reshape(self._shape).tolist()
        count = self._config.num_layers + (self._config.mtp_num_layers or 0)
        found = {name: [0.0] * count for name in self._names}
        for layer, place in self._layers.items():
            for index, name in enumerate(self._names):
                found[name][layer - 1] = table[place][index]
        return found

    def balance(self, layers: Mapping[int, torch.nn.Module], totals: torch.Tensor) -> None:
        """Move the expert biases of ``layers`` by one step, down for experts that got more tokens than the average and
        up for those that got fewer, as megatron core_v0.16.1 transformer/moe/moe_utils.py, ``get_updated_expert_bias``,
        does. ``totals``: everyone's, 1-D.
        """
        self.tokens = totals.reshape(self._shape)[:, len(self._names) :]
        if not self._has_biases:
            return
        tokens = self.tokens.to(torch.float32)
        beside = torch.sign(tokens.sum(1, keepdim=True) / self._num_experts - tokens)
        moves = to_device(beside * self._config.moe_router_bias_update_rate)
        for layer, module in layers.items():
            for number, bias in enumerate(biases(module).values(), start=layer):
                bias += moves[self._layers[number]]


def _tokens(router: Router) -> torch.Tensor:
    """The number of tokens that ``router`` has counted for each expert, [experts]."""
    return cast(torch.Tensor, router.local_tokens_per_expert)


def _nothing(chosen: torch.Tensor) -> torch.Tensor:
    """What a router gives that has chosen no experts, or given them no probability. Their gradients travel like those
    of ``chosen``, as all ranks take part in each message, and end here.
    """
    return torch.zeros_like(chosen, requires_grad=chosen.requires_grad)


def show(losses: Mapping[str, Iterable[float]]) -> None:
    """Have Megatron's loop log ``losses`` as the sums of this step's routers."""
    compat.set_aux_losses({name: torch.tensor(list(values)) for name, values in losses.items()})
