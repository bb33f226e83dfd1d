"""Megatron's mixtures of experts where the ranks of a gang do not all have the same number of experts.

Megatron's layers and token dispatchers assume ``num_moe_experts`` / ranks experts on each rank. In a gang whose ranks
do not divide the experts they are built for slots (``cluster/slots.py``): a dispatcher knows slots only, and a rank has
the experts that are in its slots. The router knows experts, so probabilities and losses are as usual; a hook behind it
moves its choices to the experts' slots. A token is computed by the same experts, with the same probabilities, as in a
whole gang.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from odyssey_megatron.cluster.slots import Slots
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.pinned import to_device
from odyssey_megatron.upstream import compat
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
        layer.router = router = compat.router_of(layer, config, groups)
        layer.set_layer_number(cast(int, layer.layer_number))
        router.register_forward_hook(_into(slots))
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

    Raises:
        ConfigError: for experts of another class than SequentialMLP and TEGroupedMLP.
    """
    count, ranks = len(own), _Ranks(own[0], of_all)
    if isinstance(experts, SequentialMLP):
        experts.local_experts = experts.local_experts[:count]
    elif isinstance(experts, TEGroupedMLP):
        for linear in (experts.linear_fc1, experts.linear_fc2):
            for name in [
                f"{kind}{number}" for number in range(count, linear.num_gemms) for kind in ("weight", "bias")
            ]:
                linear._parameters.pop(name, None)
            linear.num_gemms = count
            linear._pg_collection = copy.copy(linear._pg_collection)
            linear._pg_collection.ep = ranks
    else:
        raise ConfigError(
            f"the experts of a rank as a {type(experts).__name__} do not go with ranks that do not divide them. Use as "
            "many ranks as divide them."
        )
    experts.num_local_experts, experts.ep_group = count, ranks
    experts.register_forward_pre_hook(lambda module, given: (given[0], given[1][:count], *given[2:]))


class _Ranks:
    """A stand-in for Megatron's expert-parallel group, from which Megatron derives the numbers of a rank's experts in
    checkpoints: it multiplies the rank's number, and the number of ranks, by the number of experts that each has.
    """

    def __init__(self, first: int, count: int):
        """``first``: the number of the rank's first expert, of ``count``."""
        self._first, self._count = _AsItIs(first), _AsItIs(count)

    def rank(self) -> int:
        return self._first

    def size(self) -> int:
        return self._count


class _AsItIs(int):
    """A number that multiplication does not change."""

    def __mul__(self, other: Any) -> int:
        return int(self)
