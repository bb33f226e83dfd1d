"""What jobs without Megatron compute, and what comes of it in one process."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

LAYERS, WIDTH, ROWS, MICROBATCHES, STEPS = 6, 4, 8, 8, 8
HEAD, TIED = LAYERS - 1, LAYERS
OF_EVALUATIONS = 10**6
"""The number of the first of their samples."""


def initial(layer: int, name: str = "w0", shards: int = 1) -> torch.Tensor:
    """The first weight of a piece, in a job of so many tensor-parallel ``shards``."""
    kind, part = name[0], int(name[1:])
    generator = torch.Generator().manual_seed(layer if kind == "w" else 100 * (1 + part) + layer)
    whole = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) / 2
    return whole.chunk(shards, dim=1)[part].clone() if kind == "w" else whole


def sequence(number: int) -> torch.Tensor:
    """The sample of that number, of one of Megatron's microbatches."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)


def routed(number: int, layer: int, experts: int) -> list[int]:
    """Of each row of that sample the expert that it passes in a layer."""
    return random.Random(f"{number} {layer}").choices(range(experts), k=ROWS)


def of_step(step: int, lanes: int = 1) -> int:
    """The number of its first sample."""
    return 1000 * step * lanes


def has_experts(layer: int, experts: int) -> bool:
    return experts > 1 and 0 < layer < HEAD


def apply_step(weight: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, lanes: int = 1) -> None:
    momentum.mul_(0.9).add_(gradient, alpha=1 / (MICROBATCHES * lanes))
    weight.sub_(momentum, alpha=0.05)


class Undisturbed(NamedTuple):
    """A training in one process."""

    losses: list[float]
    weights: dict[tuple[int, str], torch.Tensor]
    """By layer and piece."""
    evaluated: list[float]
    """Behind each step, the loss of the evaluation's samples."""


@lru_cache
def undisturbed(
    steps: int = STEPS, *, shards: int = 1, experts: int = 1, lanes: int = 1, tied: bool = False
) -> Undisturbed:
    """Without schedule or messages, with autograd's gradients. Gangs have so many ``experts`` and ``lanes``."""
    count = MICROBATCHES * lanes
    weights = {(layer, "w"): initial(layer) for layer in range(tied, LAYERS + tied)}
    for layer in filter(lambda one: has_experts(one, experts), range(LAYERS)):
        parts = [f"e{part}" for part in range(experts * shards)]
        weights |= {(layer, part): initial(layer, part) for part in parts}
    momenta = {key: torch.zeros_like(one) for key, one in weights.items()}

    def loss_from(first: int, weights: Mapping[tuple[int, str], torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number in range(first, first + count):
            x = sequence(number)
            for layer in range(LAYERS):
                places = (layer, TIED) if tied and layer in (0, HEAD) else (layer,)
                weight = sum(weights[place, "w"] for place in places if (place, "w") in weights)
                x = torch.tanh((x + x.mean(0)) @ weight)
                if has_experts(layer, experts):
                    whole = [
                        sum(weights[layer, f"e{part}"] for part in range(one * shards, (one + 1) * shards))
                        for one in range(experts)
                    ]
                    chosen = [whole[one] for one in routed(number, layer, experts)]
                    x = x + torch.stack([row @ one for row, one in zip(x, chosen, strict=True)])
            total = total + x.square().mean()
        return total / count

    losses, evaluated = [], []
    for step in range(steps):
        with torch.enable_grad():
            leaves = {key: one.detach().requires_grad_() for key, one in weights.items()}
            loss = loss_from(of_step(step, lanes), leaves)
            gradients = torch.autograd.grad(loss * count, [*leaves.values()])
        losses.append(float(loss.detach()))
        for key, gradient in zip(leaves, gradients, strict=True):
            apply_step(weights[key], momenta[key], gradient, lanes)
        evaluated.append(float(loss_from(OF_EVALUATIONS, weights)))
    cut = {key: one for key, one in weights.items() if key[1] != "w"}
    for (layer, name), whole in weights.items():
        if name == "w":
            cut |= {(layer, f"w{part}"): one for part, one in enumerate(whole.chunk(shards, dim=1))}
    return Undisturbed(losses, cut, evaluated)
