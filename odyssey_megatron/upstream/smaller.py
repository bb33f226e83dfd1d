"""Why what is left of a broken cell does or does not go on as a smaller one, by Megatron's configuration.

It needs neither torch nor Megatron: 'odyssey plan' and the doctor ask it of a launch line (:func:`of_flags`), and a job
of the configuration that Megatron has made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from odyssey_megatron.upstream.flags import MUON

_Reasons = tuple[tuple[str, Callable[[Any], object]], ...]

_SINGLE = "it has neither tensor, context nor expert parallelism"
_KEPT_WHOLE: _Reasons = (
    (
        _SINGLE,
        lambda config: (
            config.tensor_model_parallel_size == config.context_parallel_size == 1 and not _has_gangs(config)
        ),
    ),
    ("it computes in 8 bits", lambda config: getattr(config, "fp8", None)),
    (
        "its experts are cut over other ranks than its layers (--expert-tensor-parallel-size)",
        lambda config: (
            _has_gangs(config)
            and config.expert_tensor_parallel_size not in (None, config.tensor_model_parallel_size)
        ),
    ),
    (
        "its experts are one tensor (moe_use_legacy_grouped_gemm)",
        lambda config: _has_gangs(config) and getattr(config, "moe_use_legacy_grouped_gemm", False),
    ),
)

_SEQUENCES_KEPT: _Reasons = (
    # Megatron weights an auxiliary loss by the tokens of one rank (megatron core_v0.16.1 transformer/moe/router.py,
    # ``attach_and_log_load_balancing_loss``), and experts with a capacity drop tokens rank by rank.
    ("its layers have experts", lambda config: config.num_moe_experts),
    ("it predicts several tokens (--mtp-num-layers)", lambda config: config.mtp_num_layers),
    ("its forward draws numbers (dropout)", lambda config: config.attention_dropout or config.hidden_dropout),
)
"""Reasons against a rank with several parts of a sequence, or of a layer. They do not apply to lanes, each of which has
a whole microbatch.
"""

_SHARDS_KEPT: _Reasons = (
    # There each tensor-parallel rank adds to the gradient of the keys' positions what its own heads give (megatron
    # core_v0.16.1 transformer/multi_latent_attention.py, ``get_query_key_value_tensors``): their copies come apart.
    (
        "it has multi-latent attention without --sequence-parallel",
        lambda config: (
            getattr(config, "multi_latent_attention", False)
            and config.tensor_model_parallel_size > 1
            and not config.sequence_parallel
        ),
    ),
    (
        "its softmax has an offset for each head",
        lambda config: getattr(config, "softmax_type", "vanilla") != "vanilla",
    ),
    (
        "its layers are not all alike (heterogeneous_block_specs)",
        lambda config: getattr(config, "heterogeneous_block_specs", False),
    ),
    ("Megatron is told not to initialize weights", lambda config: not config.perform_initialization),
)

_EVEN_GANGS: _Reasons = (
    ("it has no more experts than ranks", lambda config: _experts_of_one(config) < 2),
    # A rank without a lane in a turn computes logits, too, from what no expert has added to: they are not the job's.
    ("it logs, or clips by, attention logits", lambda config: _looks_at_logits(config)),
)


class Kept(NamedTuple):
    """Why a cell cannot go on with fewer ranks; empty strings: it can."""

    whole: str
    """The reason against any smaller number of ranks."""
    shards: str
    """The reason against fewer tensor-parallel ranks, each of which would have more of a layer."""
    even: str
    """The reason against numbers of a gang's ranks that do not divide a whole one's."""

    @property
    def is_single(self) -> bool:
        """Whether a cell has a single rank."""
        return self.whole == _SINGLE


def kept_whole(
    config: Any,
    *,
    optimizer: str = "adam",
    is_packed: bool = False,
    is_hybrid: bool = False,
) -> Kept:
    """Why a cell of this model, with Megatron's ``config``, cannot become smaller.

    Args:
        optimizer: Megatron's name of it.
        is_packed: see ``ModelSpec``.
        is_hybrid: whether its layers are of several kinds.
    """
    whole, shards = _first(_KEPT_WHOLE, config), _first(_SHARDS_KEPT, config)
    has_lanes = _has_gangs(config) and config.context_parallel_size == 1
    if not whole and not has_lanes:
        whole = "its sequences are packed" if is_packed else _first(_SEQUENCES_KEPT, config)
    if not whole and is_hybrid:
        whole = "it is a hybrid model"
    if optimizer in MUON:
        shards = "Muon goes by the matrix that each rank of a whole cell has"
    if not whole and not has_lanes and config.context_parallel_size == 1:
        whole = shards
    return Kept(whole, shards, _why_even(config) if has_lanes else "")


def _has_gangs(config: Any) -> bool:
    return bool(config.num_moe_experts) and config.expert_model_parallel_size > 1


def _why_even(config: Any) -> str:
    why = why_even(config)
    return _first(_EVEN_GANGS, config) or (f"it has {why}" if why else "")


def why_even(config: Any) -> str:
    """The setting that requires the same number of experts on all ranks of a gang; empty: none does."""
    if config.moe_pad_expert_input_to_capacity:
        return "experts that are filled up to their capacity (moe_pad_expert_input_to_capacity)"
    if config.moe_token_dispatcher_type not in ("allgather", "alltoall"):
        return f"moe_token_dispatcher_type {config.moe_token_dispatcher_type}"
    return ""


def _experts_of_one(config: Any) -> int:
    return int(config.num_moe_experts // config.expert_model_parallel_size)


def _looks_at_logits(config: Any) -> bool:
    return getattr(config, "log_max_attention_logit", False) or getattr(config, "qk_clip", False)


def _first(reasons: _Reasons, config: Any) -> str:
    return next((why for why, holds in reasons if holds(config)), "")


def of_flags(given: Mapping[str, Any]) -> Kept:
    """:func:`kept_whole` by the flags of a launch line.

    Flags that are missing have the defaults of megatron core_v0.16.1 training/arguments.py.

    Args:
        given: destination -> value, of the flags that are on the line.
    """
    has = {name for name, value in given.items() if value is not None and value is not False}
    config = SimpleNamespace(
        **{name: name in has for name in _SWITCHES},
        **{name: given[name] if name in has else default for name, default in _WORDS.items()},
        **{name: _number(given.get(name), default) for name, default in _NUMBERS.items()},
        num_moe_experts=_number(given.get("num_experts"), 0),
        heterogeneous_block_specs=any(name.startswith("heterogeneous_layers_config") for name in has),
        perform_initialization=given.get("perform_initialization") is not False,
    )
    return kept_whole(
        config,
        optimizer=str(given.get("optimizer") or "adam"),
        is_packed=bool({"sft", "dataloader_inter_document_masking"} & has),
        is_hybrid=bool({"hybrid_layer_pattern", "hybrid_override_pattern"} & has),
    )


_SWITCHES = (
    "sequence_parallel",
    "multi_latent_attention",
    "moe_use_legacy_grouped_gemm",
    "moe_pad_expert_input_to_capacity",
    "log_max_attention_logit",
    "qk_clip",
)
_WORDS = {
    "fp8": None,
    "softmax_type": "vanilla",
    "moe_token_dispatcher_type": "allgather",
}
_NUMBERS = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "mtp_num_layers": 0,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
}


def _number(text: Any, default: float | None) -> Any:
    """Return ``text`` as a number; ``default`` if it is missing, or if only running the script would tell."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return default
    return int(value) if value.is_integer() else value
