"""The factor that a step's gradients are multiplied by before the optimizer sees them."""

from __future__ import annotations

import math
from typing import NamedTuple


class Clipped(NamedTuple):
    """Scale and norm of the gradients of one step, summed over all ranks."""

    scale: float
    """The factor to multiply the gradients by."""
    norm: float
    """Norm of all gradients together, before clipping; NaN or infinite if any of them is not finite."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.norm)


def clipped(squared_norm: float, *, loss_scale: float, tokens: float, clip_grad: float) -> Clipped:
    """Scale and norm by Megatron's rule for clipping.

    Source: megatron core_v0.16.1 optimizer/clip_grads.py, ``max_norm / (total_norm + 1e-6)``.

    Args:
        squared_norm: of the gradients as they are, before any scaling.
        loss_scale: the factor that the losses were multiplied by.
        tokens: the number that the gradients are divided by; 1.0 where losses are means. With 0 tokens, as where masks
            leave out all, gradients are zero, and not divided (core_v0.16.1 distributed/finalize_model_grads.py, line
            495).
        clip_grad: the largest norm allowed; 0.0: any.
    """
    scale = 1.0 / loss_scale / (tokens or 1.0)
    norm = math.sqrt(squared_norm) * scale if squared_norm >= 0.0 else math.nan
    if clip_grad > 0.0 and norm > 0.0:
        return Clipped(scale * min(1.0, clip_grad / (norm + 1.0e-6)), norm)
    return Clipped(scale, norm)
