"""Multi-token prediction: the losses of the tokens further ahead, with each microbatch counted once, whatever a failure
makes run again.

Megatron's blocks for these tokens are part of the head, which embeds tokens with the embedding's own weight
(``layers.py``). A forward step does not return their losses: it adds their gradients in passing, and sums the losses
where they are logged. Here each microbatch's losses are kept beside what its forward step reports, and so are counted
in the same way (I4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig

from odyssey_megatron.mcore.contexts import in_order, places
from odyssey_megatron.mcore.pinned import to_device
from odyssey_megatron.upstream import compat, seams
from odyssey_megatron.upstream.seam_table import ROLL_TENSOR


class FutureTokens:
    """The losses of multi-token prediction that a model of ``config`` logs besides its own loss."""

    def __init__(self, config: TransformerConfig):
        """Raises MegatronIncompatible."""
        self._depths, self._parts = config.mtp_num_layers or 0, config.context_parallel_size
        if self._depths and self._parts > 1 and not seams.is_applied(ROLL_TENSOR):
            seams.wrap(ROLL_TENSOR, _rolled)
        self.names = tuple(
            self._name(depth, kind) for depth in range(self._depths) for kind in compat.future_token_sums()
        )
        """Names of the sums that :meth:`taken` returns."""

    @staticmethod
    def _name(depth: int, kind: str) -> str:
        return f"mtp_{depth + 1} {kind}"

    def taken(self) -> dict[str, torch.Tensor]:
        """The sums that Megatron has made since the last call, each 0-D, by :attr:`names`; empty before a forward in
        training.
        """
        if not self._depths:
            return {}
        found = compat.take_future_tokens()
        return {
            self._name(depth, kind): values[depth]
            for kind, values in found.items()
            for depth in range(self._depths)
        }

    def show(self, means: Mapping[str, float], num_microbatches: int) -> None:
        """Have Megatron's loop log the ``means`` of what a step's microbatches have :meth:`taken`."""
        if not self._depths:
            return
        sums = {  # Megatron averages the losses of a sequence's parts, and adds up their tokens
            kind: [
                means[self._name(depth, kind)] * num_microbatches * (1 if kind == "loss" else self._parts)
                for depth in range(self._depths)
            ]
            for kind in compat.future_token_sums()
        }
        compat.set_future_tokens({kind: to_device(torch.tensor(one)) for kind, one in sums.items()})


def _rolled(
    original: Callable[..., Any],
    tensor: torch.Tensor,
    shifts: int = -1,
    dims: int = -1,
    cp_group: Any = None,
    packed_seq_params: Any = None,
) -> Any:
    """Megatron's shift of tokens by one where each rank of ``cp_group`` has a part of the sequence, by messages within
    the cell. Megatron's own sends them over the default group.
    """
    if cp_group is None or cp_group.size() == 1:
        return original(tensor, shifts, dims, cp_group, packed_seq_params)
    parts = [torch.empty_like(tensor) for _ in range(cp_group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=cp_group)
    gathered = torch.cat(parts, dim=dims)
    if packed_seq_params is None:
        ends = torch.arange(2, device=tensor.device) * gathered.size(dims)  # no copy from the host
    else:
        ends = packed_seq_params.cu_seqlens_q
    whole = in_order(gathered, ends, len(parts), dims)
    rolled, _ = original(whole, shifts, dims, None, packed_seq_params)
    own = places(ends, gathered.size(dims), len(parts), cp_group.rank())
    rolled = rolled.index_select(dims, own)
    return rolled, rolled.sum()
