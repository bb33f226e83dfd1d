"""The loss of a rank of a smaller cell that has several context-parallel ranks' parts of a sequence.

In whole cells each of them takes the mean over its own tokens, and Megatron the mean of these. Where a loss mask leaves
some of them more tokens than others, that is another number than the mean over all tokens.
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
    """``forward_step``, with a loss as the ranks of a whole cell have it; ``sums_losses``: it is a sum, and no mean."""
    if forward_step is None or cell.context_each == 1 or sums_losses:
        return forward_step

    @functools.wraps(forward_step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        output, loss_func = forward_step(*args, **kwargs)
        return output, loss_func and functools.partial(_loss, loss_func, cell.context_each)

    return stepped


def _loss(loss_func: LossFunc, parts: int, output: torch.Tensor, **kwargs: Any) -> Any:
    """``output``: a loss for each token, [rows, tokens]. The function sums them, as far as its mask has them."""
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
    # Megatron divides by the tokens.
    return torch.stack(means).mean() * torch.clamp(tokens, min=1), tokens, reported


def _only(output: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """Of ``output`` two of its pieces, one from each end; 0 elsewhere."""
    pieces: torch.Tensor = torch.unflatten(output, 1, (2 * parts, -1))
    ours = torch.zeros(2 * parts, 1, dtype=torch.bool, device=output.device)
    ours[part] = ours[-1 - part] = True  # a list of indices would be a copy of the host's, which waits
    return torch.where(ours, pieces, 0.0).flatten(1)
