"""Multi-token prediction: what the tokens further ahead lose, each microbatch once, whatever a failure makes run again.

Megatron's blocks for them are part of the head, which embeds tokens with the embedding's own weight (``layers.py``).
Their losses are no result of a forward step: it adds their gradients in passing, and sums them where they are logged.
Here each microbatch has its own, beside what its forward step reports, and so they are counted as that is (I4).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.transformer import TransformerConfig

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.upstream import compat


class FutureTokens:
    """What a model of ``config`` is logged with besides its loss."""

    def __init__(self, config: TransformerConfig):
        """Raises ConfigError."""
        if config.mtp_num_layers and config.context_parallel_size > 1:
            raise ConfigError(
                f"mtp_num_layers {config.mtp_num_layers} with context_parallel_size {config.context_parallel_size}: "
                "Megatron would send tokens over the default group, which is not this model's. Use a "
                "context_parallel_size of 1."
            )
        self._depths = config.mtp_num_layers or 0
        self.names = tuple(
            self._name(depth, kind) for depth in range(self._depths) for kind in compat.future_token_sums()
        )
        """Of :meth:`taken`."""

    @staticmethod
    def _name(depth: int, kind: str) -> str:
        return f"mtp_{depth + 1} {kind}"

    def taken(self) -> dict[str, torch.Tensor]:
        """What Megatron has summed since the last time, under :attr:`names`; empty before a forward in training."""
        if not self._depths:
            return {}
        found = compat.take_future_tokens()
        return {
            self._name(depth, kind): values[depth]
            for kind, values in found.items()
            for depth in range(self._depths)
        }

    def show(self, means: Mapping[str, float], num_microbatches: int) -> None:
        """Megatron's loop logs the ``means`` of what a step's microbatches have :meth:`taken`."""
        if not self._depths:
            return
        device = torch.cuda.current_device()
        sums = {
            kind: [means[self._name(depth, kind)] * num_microbatches for depth in range(self._depths)]
            for kind in compat.future_token_sums()
        }
        compat.set_future_tokens({kind: torch.tensor(one, device=device) for kind, one in sums.items()})
