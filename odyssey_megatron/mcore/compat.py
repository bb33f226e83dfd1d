"""The one place that looks at Megatron's version: what we call there, with the arguments that version takes."""

from __future__ import annotations

import inspect
from typing import Any

from odyssey_megatron.errors import MegatronIncompatible

TESTED = ("0.16.1",)


def check_version() -> str:
    """The installed megatron-core's version. Raises MegatronIncompatible if it is missing or known not to work."""
    try:
        from megatron.core import __version__ as found
    except ImportError as error:
        raise MegatronIncompatible(
            f"megatron-core cannot be imported ({error}); install megatron-core=={TESTED[-1]}."
        ) from error
    if tuple(map(int, found.split(".")[:2])) < (0, 16):
        raise MegatronIncompatible(
            f"megatron-core {found} is too old: ProcessGroupCollection-based models need 0.16; tested with "
            + ", ".join(TESTED)
            + "."
        )
    return found


def backward_step(input_tensor: Any, output_tensor: Any, output_grad: Any, config: Any) -> Any:
    """Megatron's ``backward_step``; its ``model_type`` argument went away in 0.17."""
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules

    if "model_type" in inspect.signature(schedules.backward_step).parameters:
        return schedules.backward_step(
            input_tensor, output_tensor, output_grad, ModelType.encoder_or_decoder, config
        )
    return schedules.backward_step(input_tensor, output_tensor, output_grad, config)


def train_step_result(losses: dict[str, Any], grad_norm: float) -> tuple[Any, ...]:
    """What ``megatron.training.training.train_step`` returns, the same from 0.16.1 to 0.19.0: losses, skipped, should
    checkpoint, should exit, exit code, gradient norm, zeros in the gradient, largest attention logit.
    """
    return losses, 0, False, False, 0, grad_norm, None, 0
