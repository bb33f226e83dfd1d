"""Flags that Megatron-LM takes one by one, and refuses together: when it validates them, or in its first step.

Sources: megatron core_v0.16.1 to core_v0.19.0 training/arguments.py, core/transformer/transformer_config.py,
core/num_microbatches_calculator.py, core/transformer/attention.py, core/transformer/moe/moe_utils.py and
core/tensor_parallel/mappings.py. What one of these versions takes is not refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.job import check_world
from odyssey_megatron.errors import ConfigError

_READ_ELSEWHERE = ("use_checkpoint_args", "use_mp_args_from_checkpoint_args", "yaml_cfg")
"""Flags with which others do not count as they are given."""
_HYBRID = (
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "hybrid_attention_ratio",
    "hybrid_mlp_ratio",
    "spec",
)
_UNLIKE_LAYERS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
_UNLIKE_SAMPLES = (
    "sft",
    "variable_seq_lengths",
    "hybrid_context_parallel",
    "dynamic_context_parallel",
    "dataloader_inter_document_masking",
)
"""Flags with which a sample may have another length than ``--seq-length``."""
_OTHER_BATCHES = ("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed")
_Found = Iterator[tuple[str, str]]


class _Flags:
    """The flags that are given, by destination."""

    def __init__(self, given: Mapping[str, Any], is_whole: bool) -> None:
        self._given = given
        self._is_whole = is_whole and not any(map(given.get, _READ_ELSEWHERE))

    def size(self, name: str, usual: int | None = None) -> int | None:
        """Return a whole number above 0; ``usual`` if it is not given; None: not known."""
        if name not in self._given:
            return usual if self._is_whole else None
        value = self._given[name]
        return value if isinstance(value, int) and value > 0 else None

    def has(self, name: str) -> bool:
        return bool(self._given.get(name))

    def is_one(self, name: str, value: str) -> bool:
        return bool(self._given.get(name) == value)

    def lacks(self, names: Iterable[str]) -> bool:
        """Whether none of ``names`` is given, for sure."""
        return self._is_whole and not any(map(self.has, names))


def broken(given: Mapping[str, Any], *, is_whole: bool) -> dict[str, str]:
    """Return flag -> what Megatron-LM would end a job with, as the flag does not go with others.

    Args:
        given: destination -> value of the flags of a launch line; only running a script may tell what a value is.
        is_whole: whether there are no others, so that defaults hold.
    """
    flags = _Flags(given, is_whole)
    if any(map(flags.has, _READ_ELSEWHERE)):
        return {}
    found = dict[str, str]()
    for check in (_positions, _sequence, _heads, _query_groups, _layers, _experts, _recomputed):
        found |= check(flags)
    return found


def broken_on(given: Mapping[str, Any], gpus: int, *, is_whole: bool) -> str:
    """Return what does not go with the number of GPUs; empty: nothing. The arguments are :func:`broken`'s."""
    flags = _Flags(given, is_whole)
    tp, cp, pp, ep = (
        flags.size(f"{name}_parallel_size", 1)
        for name in ("tensor_model", "context", "pipeline_model", "expert_model")
    )
    etp = flags.size("expert_tensor_parallel_size", tp)
    if not (tp and cp and pp and ep and etp):
        return ""
    try:
        check_world(gpus, pp, Cell.of(0, tensor=tp, context=cp, expert=ep, expert_tensor=etp))
    except ConfigError as error:
        return str(error)
    batch, each, dp = flags.size("global_batch_size"), flags.size("micro_batch_size"), gpus // (tp * cp * pp)
    return uneven_batch(batch, each, dp) if batch and each and flags.lacks(_OTHER_BATCHES) else ""


def uneven_batch(batch: int, each: int, replicas: int) -> str:
    """Return what is wrong with a global batch size for ``replicas`` with microbatches of ``each``; empty: nothing."""
    if not batch % (each * replicas):
        return ""
    return (
        f"--global-batch-size {batch} is not divisible by {each * replicas}, --micro-batch-size {each} times "
        f"{replicas} data-parallel replicas: give a multiple, or change the number of GPUs or the parallel sizes."
    )


def _positions(flags: _Flags) -> _Found:
    most, length = flags.size("max_position_embeddings"), flags.size("seq_length")
    if most and length and most < length:
        yield (
            "--max-position-embeddings",
            f"--max-position-embeddings {most} is below --seq-length {length}: give at least {length}.",
        )


def _sequence(flags: _Flags) -> _Found:
    length, tp = flags.size("seq_length"), flags.size("tensor_model_parallel_size", 1)
    cp = flags.size("context_parallel_size", 1)
    if not (length and cp):
        return
    if cp > 1 and length % (2 * cp):
        yield (
            "--seq-length",
            f"--seq-length {length} is not divisible by {2 * cp}, twice --context-parallel-size: give a multiple.",
        )
    elif flags.has("sequence_parallel") and tp and length // cp % tp and flags.lacks(_UNLIKE_SAMPLES):
        of_rank = f", of which a context-parallel rank has {length // cp}," if cp > 1 else ""
        yield (
            "--seq-length",
            f"--seq-length {length}{of_rank} is not divisible by --tensor-model-parallel-size {tp}, as "
            "--sequence-parallel needs it: give a multiple.",
        )


def _heads(flags: _Flags) -> _Found:
    heads, tp = flags.size("num_attention_heads"), flags.size("tensor_model_parallel_size", 1)
    if heads and tp and heads % tp:
        yield (
            "--num-attention-heads",
            f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size {tp}: give a divisor of "
            f"{heads} for the latter.",
        )


def _query_groups(flags: _Flags) -> _Found:
    groups, tp = flags.size("num_query_groups", 1), flags.size("tensor_model_parallel_size", 1)
    if not flags.has("group_query_attention") or not groups:
        return
    heads, name = flags.size("num_attention_heads"), "--num-query-groups"
    if tp and groups % tp and tp % groups:
        yield (
            name,
            f"{name} {groups} is neither a multiple nor a divisor of --tensor-model-parallel-size {tp}: give one that "
            "is.",
        )
    elif heads and heads % groups and flags.lacks(("multi_latent_attention", *_HYBRID, *_UNLIKE_LAYERS)):
        yield (
            name,
            f"{name} {groups} does not divide --num-attention-heads {heads}: give a divisor of {heads}.",
        )


def _layers(flags: _Flags) -> _Found:
    layers, pp = flags.size("num_layers"), flags.size("pipeline_model_parallel_size", 1)
    if not (layers and pp and flags.lacks((*_UNEVEN, *_HYBRID))):
        return
    counted = ("embedding", "loss")
    more = sum(flags.has(f"account_for_{one}_in_pipeline_split") for one in counted)
    if (layers + more) % pp:
        beside = f" and {more} for embedding or loss" if more else ""
        yield (
            "--num-layers",
            f"--num-layers {layers}{beside} cannot be divided by --pipeline-model-parallel-size {pp}: change one of "
            "them, or say what stages have with --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers.",
        )


def _experts(flags: _Flags) -> _Found:
    ep, topk = flags.size("expert_model_parallel_size", 1), flags.size("moe_router_topk", 2)
    spread = f"--expert-model-parallel-size {ep}"
    if ep and ep > 1 and flags.lacks(("num_experts",)):
        yield (
            "--expert-model-parallel-size",
            f"{spread}: there are no experts. Give --num-experts, or leave it out.",
        )
    experts = flags.size("num_experts")
    if not experts:
        return
    if ep and experts % ep:
        yield (
            "--num-experts",
            f"--num-experts {experts} is not divisible by {spread}: give a multiple of {ep}.",
        )
    if topk and topk > experts and flags.lacks(_HYBRID):
        yield (
            "--moe-router-topk",
            f"--moe-router-topk {topk} is more than --num-experts {experts}: give at most {experts}.",
        )


def _recomputed(flags: _Flags) -> _Found:
    others = ("recompute_method", "recompute_num_layers")
    if not flags.is_one("recompute_granularity", "full") or flags.has("recompute_activations"):
        return
    missing = ["--" + one.replace("_", "-") for one in others if flags.lacks((one,))]
    if missing:
        yield (
            "--recompute-granularity",
            f"--recompute-granularity full needs {' and '.join(missing)}: uniform and 1 run each layer again.",
        )
