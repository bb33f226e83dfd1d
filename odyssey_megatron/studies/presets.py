"""Named models and accelerators, for questions before there is a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.policy.costs.block_configs import UnlikeLayers
from odyssey_megatron.policy.costs.estimate import Links, estimated_profile, exchanging, share_of_experts
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.costs.sizes import AttentionShape, Experts, Precision, Recomputed

EFFICIENCY = 0.45
"""Share of the peak that is reached inside a layer, without what its ranks exchange. Megatron-LM's README has 41 to
48 % for whole steps on H100s, exchange and bubbles included, so times with much tensor parallelism are too long.
"""
LINK_EFFICIENCY = 0.8
"""Share of a link's rate that NCCL's collectives reach with large messages: on eight A100s nccl-tests find about 235 of
300 GB/s."""
_HEADROOM_PERCENT = OdysseyConfig().memory_headroom_percent
_Named = TypeVar("_Named")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU. Peaks are from the vendor's data sheet (dense bf16); ``EFFICIENCY`` is the share that is achieved.

    Memory is the data sheet's, too, whose GB are GiB: nvidia-smi shows 81,920 MiB of an A100 (80 GB), 81,559 of an H100
    (80), 143,771 of an H200 (141), 183,359 of a B200 (180) and 189,471 of a GB200 (186).
    """

    peak_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Rate between nodes for one GPU: that of its network card."""
    node_bytes_per_s: float
    """Rate of NVLink in one direction for one GPU."""
    rack_gpus: int | None = None
    """Number of GPUs that NVLink joins across nodes; None: it joins those of a node."""

    def links(self, node_gpus: int) -> Links:
        """Return the links among the ranks of a worker, on nodes of ``node_gpus`` GPUs."""
        return Links(
            node_bytes_per_s=self.node_bytes_per_s * LINK_EFFICIENCY,
            card_bytes_per_s=self.link_bytes_per_s * LINK_EFFICIENCY,
            node_gpus=self.rack_gpus or node_gpus,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer, as in its published configuration or a launch line."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    attention: AttentionShape
    num_attention_heads: int = 0
    """Of a named model; 0: a launch line says it."""
    vocab_size: int
    seq_length: int
    precision: Precision = Precision()  # noqa: RUF009 # frozen
    is_gated: bool = True
    is_tied: bool = False
    recomputed: Recomputed = Recomputed()  # noqa: RUF009 # frozen
    experts: Experts | None = None
    mtp_num_layers: int = 0
    unlike: UnlikeLayers = ()
    """For each layer its attention and MLP, if they are not alike."""

    def profile(
        self,
        device: Accelerator,
        *,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_parts: int = 0,
        expert_tensor_parts: int = 0,
        micro_batch_size: int = 1,
        sequence_parallel: bool = True,
        headroom_percent: int = _HEADROOM_PERCENT,
        node_gpus: int = 8,
    ) -> Profile:
        """Return the estimated profile on ``device``.

        Args:
            expert_parts: the number of ranks over which experts are spread; 0: cut like other weights.
            expert_tensor_parts: the number of ranks that each have a part of the same expert; 0: all tensor-parallel
                ranks.
            headroom_percent: share of the device's memory that no plan may use (--odyssey-memory-headroom-percent).
            node_gpus: the number of GPUs of a node.
        """
        experts = self.experts and replace(self.experts, parts=expert_parts, tensor_parts=expert_tensor_parts)
        computing = estimated_profile(
            num_transformer_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            attention=self.attention,
            seq_length=self.seq_length,
            micro_batch_size=micro_batch_size,
            vocab_size=self.vocab_size,
            precision=self.precision,
            flops_per_s=device.peak_flops_per_s * EFFICIENCY,
            link_bytes_per_s=device.link_bytes_per_s,  # each rank sends its own part
            memory_bytes=device.memory_bytes * (100 - headroom_percent) // 100,
            memory_bytes_per_s=device.memory_bytes_per_s,
            tensor_parallel_size=tensor_parallel_size,
            context_parallel_size=context_parallel_size,
            sequence_parallel=sequence_parallel,
            is_tied=self.is_tied,
            is_gated=self.is_gated,
            recomputed=self.recomputed,
            experts=experts,
            mtp_num_layers=self.mtp_num_layers,
            unlike=self.unlike,
        )
        return exchanging(
            computing,
            device.links(node_gpus),
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            attention=self.attention,
            tokens=self.seq_length * micro_batch_size // context_parallel_size,
            precision=self.precision,
            tensor_parallel_size=tensor_parallel_size,
            recomputed=self.recomputed,
            experts=experts,
            unlike=self.unlike,
        )

    @property
    def experts_work(self) -> float:
        """The share of its FLOPs that are of experts, without the shared ones."""
        if self.experts is None:
            return 0.0
        return share_of_experts(
            self.experts,
            num_transformer_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            attention=self.attention,
            seq_length=self.seq_length,
            vocab_size=self.vocab_size,
            is_gated=self.is_gated,
            unlike=self.unlike,
        )


def _grouped(
    heads: int,
    query_groups: int,
    *,
    num_layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    vocab_size: int,
    seq_length: int,
    experts: Experts | None = None,
) -> Model:
    """Return a model with grouped-query attention, each of whose heads has 128 numbers."""
    return Model(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        attention=AttentionShape.grouped(hidden_size, heads, query_groups, 128),
        num_attention_heads=heads,
        vocab_size=vocab_size,
        seq_length=seq_length,
        experts=experts,
    )


MODELS = {
    "llama2-7b": _grouped(
        32, 32, num_layers=32, hidden_size=4096, ffn_hidden_size=11008,
        vocab_size=32000, seq_length=4096,
    ),
    "llama2-13b": _grouped(
        40, 40, num_layers=40, hidden_size=5120, ffn_hidden_size=13824,
        vocab_size=32000, seq_length=4096,
    ),
    "llama2-70b": _grouped(
        64, 8, num_layers=80, hidden_size=8192, ffn_hidden_size=28672,
        vocab_size=32000, seq_length=4096,
    ),
    "llama3-8b": _grouped(
        32, 8, num_layers=32, hidden_size=4096, ffn_hidden_size=14336,
        vocab_size=128256, seq_length=8192,
    ),
    "llama3-70b": _grouped(
        64, 8, num_layers=80, hidden_size=8192, ffn_hidden_size=28672,
        vocab_size=128256, seq_length=8192,
    ),
    "mixtral-8x7b": _grouped(
        32, 8, num_layers=32, hidden_size=4096, ffn_hidden_size=14336,
        vocab_size=32000, seq_length=4096,
        experts=Experts(layers=frozenset(range(1, 33)), count=8, topk=2, ffn_hidden_size=14336),
    ),
    "qwen3-30b-a3b": _grouped(
        32, 4, num_layers=48, hidden_size=2048, ffn_hidden_size=6144,
        vocab_size=151936, seq_length=4096,
        experts=Experts(layers=frozenset(range(1, 49)), count=128, topk=8, ffn_hidden_size=768),
    ),
    "deepseek-v3": Model(
        num_layers=61, hidden_size=7168, ffn_hidden_size=18432, num_attention_heads=128,
        attention=AttentionShape.latent(
            7168, 128, q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128,
        ),
        vocab_size=129280, seq_length=4096,
        experts=Experts(
            layers=frozenset(range(4, 62)), count=256, topk=8, ffn_hidden_size=2048, shared_ffn_hidden_size=2048,
        ),
    ),
}  # fmt: skip
"""The models by name. Sources: their config.json on Hugging Face."""

GIB = 2**30
ACCELERATORS = {
    "a100": Accelerator(
        peak_flops_per_s=312e12, memory_bytes=80 * GIB, memory_bytes_per_s=2.039e12,
        link_bytes_per_s=25e9, node_bytes_per_s=300e9,
    ),
    "h100": Accelerator(
        peak_flops_per_s=989e12, memory_bytes=80 * GIB, memory_bytes_per_s=3.35e12,
        link_bytes_per_s=50e9, node_bytes_per_s=450e9,
    ),
    "h200": Accelerator(
        peak_flops_per_s=989e12, memory_bytes=141 * GIB, memory_bytes_per_s=4.8e12,
        link_bytes_per_s=50e9, node_bytes_per_s=450e9,
    ),
    "b200": Accelerator(
        peak_flops_per_s=2250e12, memory_bytes=180 * GIB, memory_bytes_per_s=8e12,
        link_bytes_per_s=50e9, node_bytes_per_s=900e9,
    ),
    # A rack of 72 has 180 PFLOPS, 13.4 TB, and 576 TB/s.
    "gb200": Accelerator(
        peak_flops_per_s=2500e12, memory_bytes=186 * GIB, memory_bytes_per_s=8e12,
        link_bytes_per_s=50e9, node_bytes_per_s=900e9, rack_gpus=72,
    ),
}  # fmt: skip


def named(kind: str, name: str, known: Mapping[str, _Named]) -> _Named:
    """Return the entry of ``known`` that the flag ``--kind`` names. Raises ConfigError."""
    if name not in known:
        own = "--job with a launch line of it" if kind == "model" else "--fit"
        raise ConfigError(f"--{kind} {name} is unknown; use one of {', '.join(known)}, {own}, or --profile.")
    return known[name]
