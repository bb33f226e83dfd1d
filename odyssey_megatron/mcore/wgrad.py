"""Weight gradients apart from input gradients, for Megatron's own (non-TE) linear layers.

While a :class:`WeightGrads` collects, the backward of a linear layer computes the input gradient only and leaves
(weight, input, output gradient) behind; ``flush()`` adds the weight gradients to ``main_grad`` later, in the order in
which the fused backward would have. Norms and embeddings keep their ordinary backward.
"""

from __future__ import annotations

from typing import Any

import torch

from odyssey_megatron.mcore import seams
from odyssey_megatron.mcore.seam_table import LINEAR_BACKWARD

_collecting: WeightGrads | None = None


class WeightGrads:
    """The deferred weight gradients of one microbatch on one worker. Use as a context around its backward."""

    def __init__(self) -> None:
        self._pending: list[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> WeightGrads:
        global _collecting
        _collecting = self
        return self

    def __exit__(self, *error: object) -> None:
        global _collecting
        _collecting = None

    def add(self, weight: torch.nn.Parameter, total_input: torch.Tensor, grad_output: torch.Tensor) -> None:
        self._pending.append((weight, total_input, grad_output))

    def flush(self) -> None:
        """Computes what was left behind, and lets go of the activations."""
        for weight, total_input, grad_output in self._pending:
            rows = grad_output.reshape(-1, grad_output.shape[-1])
            weight.main_grad.add_(  # type: ignore[attr-defined]
                rows.t().matmul(total_input.reshape(-1, total_input.shape[-1]))
            )
        self._pending.clear()


def install() -> None:
    """Puts the seam in; a second call does nothing. Raises MegatronIncompatible."""
    if seams.is_applied(LINEAR_BACKWARD):
        return
    fused = seams.original(LINEAR_BACKWARD)

    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        deferrable = not (ctx.sequence_parallel or ctx.gradient_accumulation_fusion)
        if _collecting is None or not deferrable:
            return fused(ctx, grad_output)
        total_input, weight = ctx.saved_tensors
        grad_input = grad_output.matmul(weight)
        if ctx.allreduce_dgrad:
            torch.distributed.all_reduce(grad_input, group=ctx.tp_group)
        if weight.requires_grad:
            _collecting.add(weight, total_input.detach(), grad_output.detach())
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0) if ctx.use_bias else None
        # input, weight, bias, and whatever else this version's forward takes.
        return (grad_input, None, grad_bias) + (None,) * (len(ctx.needs_input_grad) - 3)

    seams.apply(LINEAR_BACKWARD, backward)
