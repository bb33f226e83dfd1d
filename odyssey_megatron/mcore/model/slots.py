"""Megatron's mixtures of experts where the ranks of a gang do not all have the same number of experts.

Megatron's layers and token dispatchers assume ``num_moe_experts`` / ranks experts on each rank. In a gang whose ranks
do not divide the experts they are built for slots (``cluster/slots.py``): a dispatcher knows slots only, and a rank has
the experts that are in its slots. The router knows experts, so probabilities and losses are as usual; a hook behind it
moves its choices to the experts' slots. A token is computed by the same experts, with the same probabilities, as in a
whole gang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from odyssey_megatron.cluster.slots import Slots
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.pinned import to_device
from odyssey_megatron.upstream import compat, seams
from odyssey_megatron.upstream.seam_table import SHARDED_EXPERTS
from odyssey_megatron.upstream.smaller import why_even


def built(config: TransformerConfig, groups: ProcessGroupCollection, build: Callable[[], Any]) -> Any:
    """What ``build`` makes from ``config`` for a gang with ``groups``, however the experts are spread over its ranks.

    Raises:
        ConfigError: the ranks do not have the same number of experts, and ``config`` does not allow that.
    """
    experts, ranks = config.num_moe_experts, groups.ep.size()
    if experts is None or experts % ranks == 0:
        return build()
    if reason := why_even(config):
        raise ConfigError(
            f"{experts} experts on {ranks} expert-parallel ranks, which do not divide them, do not go with {reason}. "
            "Use as many ranks as divide them, or another setting."
        )
    slots = Slots.evenly(experts, ranks)
    config.num_moe_experts = slots.count
    try:
        module = build()
    finally:
        config.num_moe_experts = experts
    for layer in [one for one in module.modules() if isinstance(one, MoELayer)]:
        layer.router = compat.router_of(layer, config, groups)
        layer.set_layer_number(layer.layer_number)
        layer.router.register_forward_hook(_into(slots))
        _keep(layer.experts, slots.held[groups.ep.rank()], experts)
    return module


def _into(slots: Slots) -> Any:
    """A forward hook for a router that turns probabilities and choices over experts, [tokens, experts] each, into those
    over slots, [tokens, slots].
    """
    at = to_device(torch.tensor(slots.of_experts))

    def spread(chosen: torch.Tensor) -> torch.Tensor:
        return chosen.new_zeros(len(chosen), slots.count).index_copy(1, at, chosen)

    def hook(router: Any, given: Any, made: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        probabilities, routing_map = made
        return spread(probabilities), spread(routing_map)

    return hook


def _keep(experts: Any, own: tuple[int, ...], of_all: int) -> None:
    """Keep only the first of ``experts``, which has one for each slot: these become the rank's ``own`` of ``of_all``
    experts, and have their numbers in checkpoints.
    """
    assert isinstance(experts, SequentialMLP), type(experts)
    experts.local_experts = experts.local_experts[: len(own)]
    experts.num_local_experts = len(own)
    experts.sharded_state_dict = lambda *args, **kwargs: dict(_sharded(experts, own, of_all, *args, **kwargs))


class _Ranks:
    """A stand-in for Megatron's expert-parallel group with as many ranks as experts: Megatron derives an expert's
    number in checkpoints from it.
    """

    def __init__(self, number: int, count: int):
        self._number, self._count = number, count

    def rank(self) -> int:
        return self._number

    def size(self) -> int:
        return self._count


def _sharded(
    experts: Any, own: tuple[int, ...], of_all: int, prefix: str = "", *args: Any, **kwargs: Any
) -> Iterator[tuple[str, Any]]:
    """What Megatron saves of each expert, by name."""
    group, modules = experts.ep_group, experts.local_experts
    try:
        experts.num_local_experts = 1
        for place, number in enumerate(own):
            experts.ep_group, experts.local_experts = _Ranks(number, of_all), modules[place : place + 1]
            found = seams.original(SHARDED_EXPERTS)(experts, prefix, *args, **kwargs)
            for name, shard in found.items():
                yield name.replace(f"{prefix}local_experts.0.", f"{prefix}local_experts.{place}.", 1), shard
    finally:
        experts.ep_group, experts.local_experts, experts.num_local_experts = group, modules, len(own)
