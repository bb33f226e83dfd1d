"""What a script's forward step and its loss function return, checked where Megatron would fail later and elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from odyssey_megatron.errors import ConfigError

_LOSS = "return loss, {'lm loss': value}; or loss, number of tokens, {'lm loss': value}, with the loss a sum"


def checked(forward_step: Callable[..., Any] | None, *, sums_losses: bool) -> Callable[..., Any] | None:
    """Return ``forward_step``, which raises ConfigError if it, or its loss function, returns something unexpected.

    ``sums_losses``: losses are sums, which the number of tokens divides (``calculate_per_token_loss``).
    """
    if forward_step is None:
        return None

    @functools.wraps(forward_step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        found = forward_step(*args, **kwargs)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise ConfigError(
                f"the forward step returns {_kind(found)}, and the model's output and a loss function are expected: "
                "return output, functools.partial(loss_func, loss_mask)."
            )
        output, loss_func = found
        return output, loss_func and functools.partial(_loss, loss_func, sums_losses)

    return stepped


def _loss(loss_func: Callable[..., Any], sums_losses: bool, output: torch.Tensor, **kwargs: Any) -> Any:
    found = loss_func(output, **kwargs)
    if not (isinstance(found, tuple) and len(found) in (2, 3) and isinstance(found[-1], dict)):
        raise ConfigError(f"the loss function returns {_kind(found)}: {_LOSS}.")
    loss = found[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"the loss function returns {_kind(loss)} as the loss, and one number is expected: {_LOSS}."
        )
    if torch.is_grad_enabled() and output.requires_grad and not loss.requires_grad:
        raise ConfigError(
            "the loss function returns a loss without a gradient, so that nothing would be trained: is it detached, or "
            "made of numbers?"
        )
    if sums_losses and len(found) == 2:
        raise ConfigError(
            "calculate_per_token_loss divides the sum of all losses by the number of tokens, which the loss function "
            f"does not return: {_LOSS}."
        )
    return found


def _kind(value: Any) -> str:
    """Return what ``value`` is, for people."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, value))})"
    return "None" if value is None else f"a {type(value).__name__}"
