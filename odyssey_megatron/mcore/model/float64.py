"""Training in float64, for proofs of exactness: where Megatron drops to float32 regardless, and what is done about it.

Found by reading megatron core_v0.16.1 on the path of a local-spec GPTModel:

- ``tensor_parallel/cross_entropy.py`` ``calculate_logits_max`` casts the logits with ``.float()``: kept in float64
  here.
- ``models/common/embeddings/rotary_pos_embedding.py`` computes the angles in float32: left as it is, since they depend
  on positions only and are the same numbers on every worker.
- Norms are created in torch's default dtype, not ``params_dtype``: converted with the rest of the chunk
  (``layers.py``).
- ``pretrain_gpt.py`` sums the losses of a microbatch with ``.float()``: here ``Tensor.float`` leaves float64 tensors as
  they are.
- ``optimizer/__init__.py`` takes Transformer Engine's or apex's Adam where one is installed; neither steps float64:
  torch's is taken here, as where neither is installed.
- ``optimizer/clip_grads.py`` accepts float32 gradients only and sums the norm in float32: not used, see
  ``optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from odyssey_megatron.upstream import compat, seams
from odyssey_megatron.upstream.seam_table import CALCULATE_LOGITS_MAX


def install() -> None:
    """Keep float64 logits in float64. Float32 and 16-bit logits are treated as before.

    A second call does nothing. Raises MegatronIncompatible.
    """
    if seams.is_applied(CALCULATE_LOGITS_MAX):
        return
    compat.use_torch_optimizers()
    original: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = seams.original(
        CALCULATE_LOGITS_MAX
    )

    def calculate_logits_max(vocab_parallel_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if vocab_parallel_logits.dtype != torch.float64:
            return original(vocab_parallel_logits)
        return vocab_parallel_logits, vocab_parallel_logits.max(dim=-1)[0]

    seams.apply(CALCULATE_LOGITS_MAX, calculate_logits_max)

    to_float = torch.Tensor.float

    def keep_float64(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.dtype == torch.float64 else to_float(self, *args, **kwargs)

    torch.Tensor.float = keep_float64  # type: ignore[method-assign, assignment]
