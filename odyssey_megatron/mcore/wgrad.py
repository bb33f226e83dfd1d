"""Weight gradients apart from input gradients.

While a :class:`WeightGrads` collects, the backward of one of Megatron's own linear layers computes the input
gradient only and leaves (weight, input, output gradient) behind; ``flush()`` adds the weight gradients to
``main_grad`` later, in the order in which the fused backward would have. Norms and embeddings keep their ordinary
backward. Layers of Transformer Engine's leave a function behind (``mcore/te.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from odyssey_megatron.mcore import seams
from odyssey_megatron.mcore.seam_table import LINEAR_BACKWARD

_collecting: WeightGrads | None = None


class WeightGrads:
    """The deferred weight gradients of one microbatch on one worker. Use as a context around its backward."""

    def __init__(self) -> None:
        self._pending: list[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor, bool]] = []
        self._bound: list[Callable[[], None]] = []

    def __enter__(self) -> WeightGrads:
        global _collecting
        _collecting = self
        return self

    def __exit__(self, *error: object) -> None:
        global _collecting
        _collecting = None

    def add(
        self, weight: torch.nn.Parameter, total_input: torch.Tensor, grad_output: torch.Tensor, fused: bool
    ) -> None:
        """``fused``: by apex's kernel, which multiplies and accumulates at once (--gradient-accumulation-fusion)."""
        self._pending.append((weight, total_input, grad_output, fused))

    def add_bound(self, add: Callable[[], None]) -> None:
        """``add()`` computes a weight gradient and adds it to the buffer that was there when the backward ran."""
        self._bound.append(add)

    def flush_bound(self) -> None:
        """Computes what would not find another buffer: before a block's are replaced."""
        while self._bound:
            self._bound.pop(0)()

    def flush(self) -> None:
        """Computes what was left behind, and lets go of the activations."""
        self.flush_bound()
        for weight, total_input, grad_output, fused in self._pending:
            rows = grad_output.reshape(-1, grad_output.shape[-1])
            columns = total_input.reshape(-1, total_input.shape[-1])
            if fused:
                _apex_kernel(weight.main_grad.dtype)(columns, rows, weight.main_grad)  # type: ignore[attr-defined]
            else:
                weight.main_grad.add_(rows.t().matmul(columns))  # type: ignore[attr-defined]
        self._pending.clear()


def later(add: Callable[[], None]) -> None:
    """``add()`` runs with the weight gradients of the microbatch whose backward this is, at once if there is none."""
    if _collecting is None:
        add()
    else:
        _collecting.add_bound(add)


def _apex_kernel(dtype: torch.dtype) -> Any:
    """As megatron core_v0.16.1 core/tensor_parallel/layers.py chooses it. It needs a GPU, so no test here runs it."""
    from megatron.core.tensor_parallel import layers

    apex: Any = layers.fused_weight_gradient_mlp_cuda
    return apex.wgrad_gemm_accum_fp32 if dtype == torch.float32 else apex.wgrad_gemm_accum_fp16


def install() -> None:
    """Puts the seam in; a second call does nothing. Raises MegatronIncompatible."""
    if seams.is_applied(LINEAR_BACKWARD):
        return
    fused = seams.original(LINEAR_BACKWARD)

    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        if _collecting is None or ctx.sequence_parallel:
            return fused(ctx, grad_output)
        total_input, weight = ctx.saved_tensors
        grad_input = grad_output.matmul(weight)
        if ctx.allreduce_dgrad:
            torch.distributed.all_reduce(grad_input, group=ctx.tp_group)
        if weight.requires_grad:
            inputs, outputs = total_input.detach(), grad_output.detach()
            _collecting.add(weight, inputs, outputs, ctx.gradient_accumulation_fusion)
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0) if ctx.use_bias else None
        # input, weight, bias, and whatever else this version's forward takes.
        return (grad_input, None, grad_bias) + (None,) * (len(ctx.needs_input_grad) - 3)

    seams.apply(LINEAR_BACKWARD, backward)
