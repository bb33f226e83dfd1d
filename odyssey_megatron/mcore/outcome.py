"""What a committed step has come to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a committed step is logged with."""

    losses: dict[str, float]
    grad_norm: float
    lr: float
    num_zeros_in_grad: int | None
    """None unless Megatron's ``log_num_zeros_in_grad`` asks for it."""
    tokens: int
    num_microbatches: int
