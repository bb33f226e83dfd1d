"""The loss on a rank of a smaller cell that has the sequence parts of several context-parallel ranks.

In a whole cell each context-parallel rank takes the mean over its own tokens, and Megatron averages these means. Where
a loss mask leaves some ranks more tokens than others, this differs from the mean over all tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from odyssey_megatron.cluster.cell import Cell

LossFunc = Callable[..., Any]


def forward_step_of(
    cell: Cell, forward_step: Callable[..., Any] | None, *, sums_losses: bool
) -> Callable[..., Any] | None:
    """``forward_step`` with the loss that the ranks of a whole cell would compute; ``sums_losses``: the loss is a sum,
    not a mean.
    """
    if forward_step is None or cell.context_each == 1 or sums_losses:
        return forward_step

    @functools.wraps(forward_step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        output, loss_func = forward_step(*args, **kwargs)
        return output, loss_func and functools.partial(_loss, loss_func, cell.context_each)

    return stepped


def _loss(loss_func: LossFunc, parts: int, output: torch.Tensor, **kwargs: Any) -> Any:
    """The mean of the per-part means of the loss. ``output``: the loss of each token, [rows, tokens]; ``loss_func``
    sums those that its mask selects.
    """
    found = loss_func(output, **kwargs)
    if not isinstance(found, tuple) or len(found) != 3:
        return found
    _, tokens, reported = found
    means = []
    for part in range(parts):
        with torch.no_grad():
            count, *_ = loss_func(_only(torch.ones_like(output), part, parts), **kwargs)
        total, *_ = loss_func(_only(output, part, parts), **kwargs)
        means.append(total / count.clamp(min=1))
    # Megatron divides by the number of tokens.
    return torch.stack(means).mean() * torch.clamp(tokens, min=1), tokens, reported


def _only(output: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """``output``, [rows, tokens], with zeros everywhere but in the two pieces of part ``part``, one from each end."""
    pieces: torch.Tensor = torch.unflatten(output, 1, (2 * parts, -1))
    ours = torch.zeros(2 * parts, 1, dtype=torch.bool, device=output.device)
    ours[part] = ours[-1 - part] = True  # indexing with a list would copy it from the host, which waits
    return torch.where(ours, pieces, 0.0).flatten(1)
