"""The loss scale: what Megatron multiplies losses by before a 16-bit backward, and divides gradients by afterwards.

All ranks have the same scale without sending it: it follows from the totals that all agree on in a step, where the
gradient norm is not finite if any gradient is not. A rank that joins is told the others' scale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.execute.ledger import Word

_BESIDE: tuple[Any, ...] = MoEAuxLossAutoScaler, MTPLossAutoScaler
"""Megatron's classes that add gradients of losses which a forward step does not return, while its own loss goes
backward.
"""


class LossScale:
    """The loss scale of ``config``, 1 if it has none, and the number of steps that the job has skipped."""

    def __init__(self, config: OptimizerConfig, *, ends_job: bool):
        """``ends_job``: a step whose gradients are not finite ends the job, unless a smaller scale may cure it.

        Raises:
            ConfigError: Megatron refuses these numbers.
        """
        self._ends_job = ends_job
        self._word: Word = None
        self._beside: list[Any] = []
        self.skipped_steps = self.skipped_samples = 0
        """Steps since the job was started that do not count in the learning rate's schedule, and the number of their
        samples.
        """
        try:
            self.scaler = _scaler(config)
        except AssertionError as error:
            raise ConfigError(
                f"Megatron refuses this loss scale: --loss-scale {config.loss_scale}, --initial-loss-scale "
                f"{config.initial_loss_scale}, --min-loss-scale {config.min_loss_scale}, --loss-scale-window "
                f"{config.loss_scale_window}, --hysteresis {config.hysteresis}. All must be above 0, and the smallest "
                "scale at most the first."
            ) from error

    def __bool__(self) -> bool:
        """Whether there is a loss scale."""
        return self.scaler is not None

    @property
    def value(self) -> torch.Tensor:
        """The current scale, as Megatron's optimizers show it: [1], float32."""
        if self.scaler is None:
            return torch.ones(1, dtype=torch.float32, device=torch.cuda.current_device())
        scale: torch.Tensor = self.scaler.scale
        return scale

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The value that the backward of ``loss``, 0-D, begins with: 0-D, or [1] where there is a scale."""
        loss = loss if self._word is None else self._word * loss
        return loss if self.scaler is None else self.value * loss

    @contextlib.contextmanager
    def only_if(self, word: Word) -> Iterator[None]:
        """In the body a backward begins with zero unless ``word`` (``execute/ledger.py``) stands."""
        self._word = word
        before = [one.main_loss_backward_scale for one in _BESIDE]
        for one in _BESIDE if word is not None else ():
            scale = one.main_loss_backward_scale
            one.main_loss_backward_scale = word if scale is None else scale * word
        self._beside = [one.main_loss_backward_scale for one in _BESIDE]
        try:
            yield
        finally:
            self._word = None
            for one, scale in zip(_BESIDE, before, strict=True):
                one.main_loss_backward_scale = scale

    def beside(self, *, counts: bool) -> None:
        """In the body of :meth:`only_if`: whether losses count from now on that no forward step returns."""
        for one, scale in zip(_BESIDE, self._beside, strict=True):
            one.main_loss_backward_scale = scale if counts else 0.0

    @property
    def skips(self) -> bool:
        """Whether the job goes on after a step whose gradients are not finite, without changing any weight."""
        return isinstance(self.scaler, DynamicGradScaler) or (bool(self) and not self._ends_job)

    @property
    def blames_nobody(self) -> bool:
        """Whether such a step only says that the scale is too large; not so once the scale is as small as it may be."""
        smallest = getattr(self.scaler, "min_scale", 0.0)
        return self.skips and bool(self.value > smallest)

    def update(self, *, skipped: bool, samples: int) -> None:
        """Adapt the scale after a step of ``samples``."""
        if skipped:
            self.leave_out(samples)
        if self.scaler is not None:
            self.scaler.update(skipped)

    def leave_out(self, samples: int) -> None:
        """Count a step of ``samples`` that changes no weight, whatever the scale."""
        self.skipped_steps += 1
        self.skipped_samples += samples

    def state(self) -> torch.Tensor:
        """Everything that steps have changed, for :meth:`take_over` on a rank that joins: 1-D, float64, on the host."""
        kept = self.scaler.state_dict() if self else {}
        return torch.tensor(
            [self.skipped_steps, self.skipped_samples, *(float(kept[name]) for name in sorted(kept))],
            dtype=torch.float64,
        )

    def take_over(self, state: torch.Tensor) -> None:
        """Take over the ``state`` that :meth:`state` of another rank has returned."""
        skipped, samples, *values = state.tolist()
        self.skipped_steps, self.skipped_samples = int(skipped), int(samples)
        if values:
            growth, hysteresis, scale = values
            self.scaler.load_state_dict(
                {
                    "growth_tracker": int(growth),
                    "hysteresis_tracker": int(hysteresis),
                    "scale": torch.tensor([scale], dtype=torch.float32),
                }
            )


def _scaler(config: OptimizerConfig) -> Any:
    """The scaler that megatron core_v0.16.1 core/optimizer/__init__.py, lines 419-443, makes for each optimizer."""
    if not (config.fp16 or config.bf16):
        return None
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
    )
