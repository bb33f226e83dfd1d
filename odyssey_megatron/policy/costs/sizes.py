"""The sizes of a model that its costs follow from, and what it is trained with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

_OF_MEMORY = 0.8
"""Share of its memory's bandwidth that a GPU's optimizer is taken to reach. Assumed; a job measures it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The size of attention, or of what takes its place, in a transformer layer."""

    weights: int
    """Number of weights of its matrix products: queries, keys, values and the output."""
    score_width: int
    """Numbers per token over which scores are summed, in all heads together; the mean of queries' and values'."""
    kept: int
    """Numbers per token that its backward needs: queries, keys, values, and the output."""
    up_weights: int = 0
    """Of the weights, those of multi-latent attention's up projections."""
    up_kept: int = 0
    """Of the numbers kept, those that the up projections make: queries, keys and values."""

    @classmethod
    def grouped(cls, hidden_size: int, heads: int, query_groups: int, kv_channels: int) -> AttentionShape:
        """Return grouped-query attention with ``query_groups`` heads of keys and values, each of ``kv_channels``
        numbers.
        """
        width, shared = heads * kv_channels, query_groups * kv_channels
        return cls(weights=2 * hidden_size * (width + shared), score_width=width, kept=2 * (width + shared))

    @classmethod
    def linear(cls, hidden_size: int) -> AttentionShape:
        """Return a single matrix product in place of attention."""
        return cls(weights=hidden_size**2, score_width=0, kept=hidden_size)

    @classmethod
    def state_space(
        cls, hidden_size: int, *, heads: int | None, head_dim: int, groups: int, states: int, seq_length: int
    ) -> AttentionShape:
        """Return a Mamba 2 layer in place of attention (arXiv 2405.21060, sections 6 and 7).

        Each number of all ``heads`` enters and leaves a state, and within chunks of 128 tokens there is a product with
        each earlier token.

        Args:
            heads: number of heads, each of ``head_dim`` numbers; None: as many as have twice the hidden size.
            groups: number of groups of heads; those of a group share ``states`` numbers each way.
        """
        count = heads or 2 * hidden_size // head_dim
        inner, shared = count * head_dim, groups * states
        chunk = min(128, seq_length)
        products = 2 * inner * states + chunk * (inner + shared) // 2
        mixed = inner + 2 * shared
        return cls(
            weights=hidden_size * (2 * inner + mixed + count) + 5 * mixed + 3 * count + inner,
            score_width=products // seq_length,
            kept=3 * inner + 2 * shared + count,
        )

    @classmethod
    def latent(
        cls,
        hidden_size: int,
        heads: int,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_head_dim: int,
        qk_pos_emb_head_dim: int,
        v_head_dim: int,
    ) -> AttentionShape:
        """Return multi-latent attention, whose keys and values come from ``kv_lora_rank`` numbers (DeepSeek-V2, arXiv
        2405.04434, section 2.1).
        """
        query, value = heads * (qk_head_dim + qk_pos_emb_head_dim), heads * v_head_dim
        latents = (q_lora_rank or 0) + kv_lora_rank + qk_pos_emb_head_dim
        up = (q_lora_rank or hidden_size) * query + kv_lora_rank * (heads * qk_head_dim + value)
        return cls(
            weights=hidden_size * latents + up + value * hidden_size,
            score_width=(query + value) // 2,
            kept=2 * (query + value) + latents,
            up_weights=up,
            up_kept=2 * query + value,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts that some layers have in place of an MLP. Each expert is assumed to get equally many tokens."""

    layers: frozenset[int]
    """The layers that have experts, counted from 1."""
    count: int
    topk: int
    """Number of experts for each token."""
    ffn_hidden_size: int
    """Hidden units of each expert."""
    shared_ffn_hidden_size: int = 0
    """Hidden units of the shared experts, which every token passes."""
    parts: int = 0
    """Number of ranks over which they are spread; 0: cut like other weights."""
    tensor_parts: int = 0
    """Number of ranks that each have a part of the same expert; 0: all tensor-parallel ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What is run again in the backward."""

    share: float = 0.0
    """The share of layers that keep only their input."""
    modules: frozenset[str] = frozenset()
    """The parts of all layers that are run again, by Megatron's names."""
    at_a_time: int = 1
    """Number of layers that are run again together."""

    @classmethod
    def by_flags(
        cls,
        granularity: str | None,
        method: str | None,
        num_layers: int | None,
        layers_of_stage: float,
        modules: Collection[str] | None,
    ) -> Recomputed:
        """Return what Megatron's ``--recompute-granularity``, ``-method``, ``-num-layers`` and ``-modules`` say."""
        if granularity == "selective":
            return cls(modules=frozenset(modules or ("core_attn",)))
        if granularity != "full":
            return cls()
        if method == "block":  # so many layers of a stage, each by itself
            return cls(share=min(1.0, (num_layers or 1) / layers_of_stage))
        return cls(share=1.0, at_a_time=min(num_layers or 1, ceil(layers_of_stage)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes of each kind of number."""

    dtype_bytes: int = 2
    """Bytes of a weight, and of a number in activations and messages."""
    gradient_bytes: int = 4
    """Bytes of a gradient, at least; never fewer than those of its weight."""
    moments_bytes: int | None = None
    """Bytes of Adam's two moments of a weight together; None: each is float32, or longer."""

    @property
    def optimizer_bytes(self) -> int:
        """Adam's bytes for a weight: its moments, and a master copy if the weight is shorter than float32."""
        long = max(4, self.dtype_bytes)
        return (self.moments_bytes or 2 * long) + (long if self.dtype_bytes < long else 0)

    def optimizer_s_per_byte(self, memory_bytes_per_s: float) -> float:
        """Return the time of a step's end for each byte of optimizer state, by what is read and written for a weight.

        Its optimizer state is read and written. So is its gradient: read for the norm, scaled (read and written), read
        by Adam, and zeroed. The weight is written, and read if it has no master copy. Source: megatron core_v0.16.1
        core/optimizer/optimizer.py, and ``mcore/model/optimizer.py``.
        """
        has_master = self.dtype_bytes < 4
        gradient = max(self.gradient_bytes, self.dtype_bytes)
        size = 2 * self.optimizer_bytes + 5 * gradient + (1 if has_master else 2) * self.dtype_bytes
        return size / self.optimizer_bytes / (_OF_MEMORY * memory_bytes_per_s)
