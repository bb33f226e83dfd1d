"""Models and accelerators by name, for asking before there is a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.policy.profile import Profile, estimated_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer with SwiGLU, as its published configuration has it."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    seq_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU. Peaks are the vendor's data sheet (dense bf16); the achieved share is ``EFFICIENCY``."""

    peak_flops_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    """Between nodes, for one GPU: its network card."""


EFFICIENCY = 0.45
"""Share of the peak that a well-tuned Megatron job reaches inside a layer (model FLOPs utilisation)."""

MODELS = {
    "llama2-7b": Model(
        num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, num_query_groups=32,
        vocab_size=32000, seq_length=4096,
    ),
    "llama2-13b": Model(
        num_layers=40, hidden_size=5120, ffn_hidden_size=13824, num_attention_heads=40, num_query_groups=40,
        vocab_size=32000, seq_length=4096,
    ),
    "llama2-70b": Model(
        num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, num_query_groups=8,
        vocab_size=32000, seq_length=4096,
    ),
    "llama3-8b": Model(
        num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
        vocab_size=128256, seq_length=8192,
    ),
    "llama3-70b": Model(
        num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, num_query_groups=8,
        vocab_size=128256, seq_length=8192,
    ),
}  # fmt: skip

GIB = 2**30
ACCELERATORS = {
    "a100": Accelerator(peak_flops_per_s=312e12, memory_bytes=80 * GIB, link_bytes_per_s=25e9),
    "h100": Accelerator(peak_flops_per_s=989e12, memory_bytes=80 * GIB, link_bytes_per_s=50e9),
    "h200": Accelerator(peak_flops_per_s=989e12, memory_bytes=141 * GIB, link_bytes_per_s=50e9),
    "b200": Accelerator(peak_flops_per_s=2250e12, memory_bytes=180 * GIB, link_bytes_per_s=50e9),
}


def preset_profile(
    model: str,
    accelerator: str,
    *,
    tensor_parallel_size: int = 1,
    context_parallel_size: int = 1,
    micro_batch_size: int = 1,
) -> Profile:
    """The estimated profile of a named model on a named accelerator; nine tenths of the memory may be used.

    Raises:
        ConfigError: unknown name; lists the known ones.
    """
    for kind, name, known in (("model", model, MODELS), ("accelerator", accelerator, ACCELERATORS)):
        if name not in known:
            raise ConfigError(f"--{kind} {name} is unknown; use one of {', '.join(known)}, or --profile.")
    shape, device = MODELS[model], ACCELERATORS[accelerator]
    return estimated_profile(
        num_transformer_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        seq_length=shape.seq_length,
        micro_batch_size=micro_batch_size,
        vocab_size=shape.vocab_size,
        flops_per_s=device.peak_flops_per_s * EFFICIENCY,
        link_bytes_per_s=device.link_bytes_per_s * tensor_parallel_size,
        memory_bytes=device.memory_bytes * 9 // 10,
        tensor_parallel_size=tensor_parallel_size,
        context_parallel_size=context_parallel_size,
    )
