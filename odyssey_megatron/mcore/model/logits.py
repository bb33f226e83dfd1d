"""``--log-max-attention-logit``: the largest attention logit in a step, whatever a failure makes run again.

Transformer Engine's attention keeps, in each layer, the largest logit of each head that it has seen. A maximum cannot
be summed, so the totals that ranks sum with a step's agreement have a place for each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from megatron.core.transformer import TransformerConfig

from odyssey_megatron.mcore.model.layers import HeldLayer

_SEEN = "current_max_attn_logits"
"""Attribute for the logits seen so far: megatron core_v0.16.1 core/extensions/transformer_engine.py, line 1314."""


class LargestLogit:
    """The largest logit in one rank's layers, and in all ranks'."""

    def __init__(self, config: TransformerConfig, rank: int, world_size: int):
        """``world_size``: the largest number of ranks that the job may have."""
        self._rank, self._head = rank, config.num_layers + 1
        self.num_totals = world_size if config.log_max_attention_logit else 0

    def begin(self, layers: Iterable[HeldLayer]) -> None:
        """Forget what earlier steps and evaluations have seen. Megatron does so from 0.19 on."""
        for module in self._attentions(layers):
            setattr(module, _SEEN, None)

    def local_totals(self, layers: Iterable[HeldLayer]) -> torch.Tensor:
        """This rank's share: [a place for each rank], float64. It starts at 0, as Megatron does."""
        totals = torch.zeros(self.num_totals, dtype=torch.float64, device=torch.cuda.current_device())
        for module in self._attentions(layers):
            if (seen := getattr(module, _SEEN)) is not None:
                totals[self._rank] = torch.maximum(totals[self._rank], seen.max().to(totals.dtype))
        return totals

    @staticmethod
    def largest(totals: torch.Tensor) -> float:
        """The largest logit, from everyone's ``totals``, 1-D."""
        return float(totals.max()) if len(totals) else 0.0

    def _attentions(self, layers: Iterable[HeldLayer]) -> Iterator[torch.nn.Module]:
        """The attention modules in ``layers``, without those of multi-token prediction, which belong to the head, and
        which Megatron leaves out.
        """
        if self.num_totals:
            for layer in layers:
                if layer.index < self._head:
                    yield from (one for one in layer.modules() if hasattr(one, _SEEN))
