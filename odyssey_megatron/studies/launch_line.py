"""The job that a launch line describes: its model, its parallel sizes, and Odyssey's settings. Nothing in it is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.doctor.flags import check_taken, looked_at, settings
from odyssey_megatron.doctor.launch_line import SAY_THEM, STARTED_WITH, choices_told, read_job, unread
from odyssey_megatron.doctor.launcher import nodes_and_gpus
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import Between, read_text
from odyssey_megatron.policy.costs.block_configs import (
    UnlikeLayers,
    hybrid_layers,
    kinds_of_ratios,
    unlike_layers,
)
from odyssey_megatron.policy.costs.sizes import AttentionShape, Experts, Precision, Recomputed
from odyssey_megatron.studies.expert_layers import MOST_LAYERS, layers_with_experts
from odyssey_megatron.studies.presets import Model
from odyssey_megatron.upstream import refusals, smaller
from odyssey_megatron.upstream.chunks import chunks_of

_SIZE = Between(1, 10**9, whole=True)
_WORDS = 128_256
"""Size of a vocabulary that is not known: Llama 3's."""
_IN_BF16 = "products take what they take in bf16, though the launch line has neither --bf16 nor --fp16"
_PRESUMED = "how many words the tokenizer has is not known, so that {:,} are presumed: --vocab-size says it"
_GPT2_WORDS = 50_257
"""Size of GPT-2's vocabulary, which is the usual one that has a file of merges."""
_SIZES_OF_CELLS = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
BESIDE_MODEL = frozenset(
    "attention_dropout hidden_dropout moe_token_dispatcher_type global_batch_size seq_length max_position_embeddings "
    "recompute_granularity recompute_method recompute_num_layers recompute_modules "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers".split()
)
"""Flags of Megatron's that say how a named model is trained, and not what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """What ``odyssey plan`` needs to know of a launch line, by Megatron's names."""

    model: Model | None
    """None if a profile gives the costs."""
    config: OdysseyConfig
    name: str = "this launch line"
    pipeline_model_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    sequence_parallel: bool = True
    use_distributed_optimizer: bool = False
    stage_layers: tuple[int, ...] = ()
    """Number of transformer layers of each stage; empty: as even as possible."""
    virtual_stages: int = 1
    """Number of Megatron's model chunks on each stage."""
    cluster: str = ""
    """As ``--cluster`` would have it, if it is known."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Destination -> value of its flags."""
    notes: tuple[str, ...] = ()
    """Sentences on what of the launch line is not in the plan."""
    of_estimate: tuple[str, ...] = ()
    """Sentences on what its costs rest on where they are estimated."""

    @property
    def sizes(self) -> dict[str, Any]:
        """The parallel sizes that make up a worker, by Megatron's names."""
        return {one: getattr(self, one) for one in _SIZES_OF_CELLS}

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer that has any; 0: none, or not known."""
        return self.model.experts.count if self.model and self.model.experts else 0

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Sentences on what would take other memory than is counted."""
        said = "--fp8-format is not counted: layers take the time and the memory that they take in bf16"
        return (said,) if self.given.get("fp8") else ()

    @property
    def kept(self) -> smaller.Kept:
        """Why a cell does not go on with fewer ranks."""
        if self.expert_model_parallel_size > 1 and not self.num_experts:
            return smaller.Kept("how many experts it has is not known", "", "")
        return smaller.of_flags({**self.given, **self.sizes, "num_experts": self.num_experts})


def read(
    script: Sequence[str],
    more: Sequence[str] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
    *,
    is_one: bool = True,
) -> LaunchLine:
    """Return what the arguments of ``pretrain_gpt.py`` describe.

    Defaults are those of megatron core_v0.16.1 training/arguments.py.

    Args:
        script: the arguments in the launch script, which may have flags of its own.
        more: arguments that follow them.
        environ: as in :func:`settings`.
        is_one: as in :func:`not_taken`.

    Raises:
        ConfigError: a size is missing, or cannot be known without running the script; or Megatron-LM refuses the line.
    """
    flags = [*script, *more]
    args, parser, _ = looked_at(flags, None)
    elsewhere = " ".join(unread(flags))
    line = _Line(vars(args), elsewhere)
    stages, layers = line.size("pipeline_model_parallel_size", 1), _num_layers(line)
    if layers > MOST_LAYERS:
        raise ConfigError(f"--num-layers {layers:,}: at most {MOST_LAYERS:,} are planned for.")
    config, unknown = settings(flags, environ)
    check_taken(flags, is_whole=not elsewhere, is_one=is_one)
    return LaunchLine(
        model=_model(line, layers, stages),
        pipeline_model_parallel_size=stages,
        tensor_model_parallel_size=line.size("tensor_model_parallel_size", 1),
        context_parallel_size=line.size("context_parallel_size", 1),
        expert_model_parallel_size=line.size("expert_model_parallel_size", 1),
        expert_tensor_parallel_size=line.maybe("expert_tensor_parallel_size"),
        micro_batch_size=line.size("micro_batch_size", 1),
        global_batch_size=line.maybe("global_batch_size"),
        sequence_parallel=line.has("sequence_parallel"),
        use_distributed_optimizer=line.has("use_distributed_optimizer"),
        stage_layers=_stage_layers(line, layers, stages),
        virtual_stages=max(len(_segments(line)), len(_chunks(line))) // stages
        or line.maybe("num_virtual_stages_per_pipeline_rank")
        or layers // (stages * line.size("num_layers_per_virtual_pipeline_stage", layers))
        or 1,
        config=config,
        given=vars(args),
        of_estimate=() if any(map(line.has, ("bf16", "fp16", "fp8"))) else (_IN_BF16,),
        notes=tuple(_notes(line, unknown, [one.named(parser) for one in refusals.refused(args, parser)])),
    )


def read_script(named: str, more: Sequence[str], usual: str) -> LaunchLine:
    """As :func:`read`, of the launch script or the case ``named``, with the GPUs that it starts its job on.

    Args:
        usual: what is taken of a script that does not say them, which is noted; empty: they do not matter.
    """
    found = read_job(named)
    line = replace(read(found.flags, more, found.environ, is_one=not found.choices), name=named)
    if found.choices:
        line = replace(line, notes=(*line.notes, *choices_told(found.choices), SAY_THEM))
    if (size := nodes_and_gpus(found.launcher)) is not None:
        return replace(line, cluster=f"{size[0]}x{size[1]}")
    if not usual:
        return line
    note = (
        f"on how many GPUs {named} starts its job is not known without running it: {usual}; --cluster says it"
    )
    return replace(line, notes=(*line.notes, note))


def of_named(
    name: str, model: Model | None, stages: int, config: OdysseyConfig, given: Mapping[str, Any]
) -> LaunchLine:
    """Return the launch line of a named model, with those of :data:`BESIDE_MODEL` that are given. Raises ConfigError.

    Args:
        model: None if a profile gives the costs.
        given: destination -> value of the flags.
    """
    line = _Line(given, "")
    if model is not None:
        model = replace(
            model,
            seq_length=line.size("seq_length", model.seq_length),
            recomputed=_recomputed(line, model.num_layers / stages),
        )
    return LaunchLine(
        model=model,
        name=name,
        pipeline_model_parallel_size=stages,
        stage_layers=_stage_layers(line, model.num_layers, stages) if model else (),
        global_batch_size=line.maybe("global_batch_size"),
        config=config,
        given=given,
    )


class _Line:
    """The values of flags, by destination."""

    def __init__(self, given: Mapping[str, Any], elsewhere: str):
        self._given = given
        self.elsewhere = elsewhere

    def has(self, name: str) -> bool:
        value = self._given.get(name)
        return value is not None and value is not False

    def maybe(self, name: str) -> int | None:
        """Return a whole number, or None if the flag is missing. Raises ConfigError."""
        value = self._given.get(name)
        if value is None:
            return None
        try:
            return int(_SIZE.read(str(value)))
        except ValueError as error:
            raise ConfigError(
                f"{_flag(name)} {str(value)[:40]}: {error}. What a script works out while it runs is not known: give "
                f"the flag to this command, too, or say what the script is started with: {STARTED_WITH}."
            ) from None

    def size(self, name: str, default: int | None = None) -> int:
        """Return a whole number. Raises ConfigError if the flag is missing and has no default."""
        value = self.maybe(name)
        if value is not None:
            return value
        if default is None:
            where = (
                f"; it may be in {self.elsewhere}, as only running it would tell" if self.elsewhere else ""
            )
            raise ConfigError(f"the launch line has no {_flag(name)}{where}. Give it to this command, too.")
        return default

    def share(self, name: str) -> float:
        """Return a number from 0 to 1; 0 if the flag is missing. Raises ConfigError."""
        try:
            return float(Between(0, 1).read(str(self._given.get(name) or 0)))
        except ValueError as error:
            raise ConfigError(f"{_flag(name)}: {error}.") from None

    def words(self, name: str) -> list[str]:
        """Return the values of a flag that may have several, or all of them in one word."""
        value = self._given.get(name) or []
        values = value if isinstance(value, list) else [value]
        return " ".join(map(str, values)).strip("[]").replace(",", " ").split()

    def text(self, name: str) -> str:
        return str(self._given[name]) if self.has(name) else ""


def _notes(line: _Line, unknown: Sequence[str], refused: Sequence[str]) -> list[str]:
    """Return what people should know of how ``line`` was read.

    Args:
        unknown: Odyssey's settings whose value is not known.
        refused: the flags that a job would refuse.
    """
    notes = [
        f"{one}: not known without running it, so that its default counts; give it to this command, too"
        for one in unknown
    ]
    if line.elsewhere:
        notes.append(
            f"flags in {line.elsewhere} do not count: only running the script would tell what they are"
        )
    notes += [f"a job would refuse {one}: odyssey doctor says why" for one in refused]
    notes += [_PRESUMED.format(_presumed(line))] * bool(_presumed(line))
    if line.text("recompute_method") == "block":
        notes.append(
            "--recompute-method block counts the layers of each model chunk, and here those of stages are counted: "
            "virtual stages, and layouts with shorter ones, run more again and keep less than is planned"
        )
    if line.has("pipeline_model_parallel_layout") and not _chunks(line):
        notes.append("--pipeline-model-parallel-layout is not known: stages are as even as can be")
    return notes


def _num_layers(line: _Line) -> int:
    """Return the number of layers. From core_v0.17.1 on a hybrid pattern may give it in place of the flag. Raises
    ConfigError.
    """
    return len("".join(_segments(line))) or line.size("num_layers")


def _segments(line: _Line) -> list[str]:
    """Return the layers of each chunk in a hybrid pattern; a single entry if the pattern is not divided."""
    pattern = line.text("hybrid_layer_pattern") or line.text("hybrid_override_pattern")
    return pattern.partition("/")[0].split("|")


def _kinds(line: _Line) -> str:
    """Return the letters of a hybrid model's layers, by its pattern or its ratios; empty for other models. Raises
    ConfigError.
    """
    ratios = line.share("hybrid_attention_ratio"), line.share("hybrid_mlp_ratio")
    kinds = "".join(_segments(line))
    if not kinds and (line.has("spec") or any(ratios)):
        return kinds_of_ratios(_num_layers(line), *ratios)
    return kinds


def _chunks(line: _Line) -> list[str]:
    """Return the layers of each chunk, if they are known."""
    text = line.text("pipeline_model_parallel_layout")
    return chunks_of(text) if text else []


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _model(line: _Line, layers: int, stages: int) -> Model:
    hidden, is_gated = line.size("hidden_size"), line.has("swiglu")
    # A gated MLP has two thirds of the units, in whole 64s, so that it has as many weights.
    ffn = line.size("ffn_hidden_size", 4 * hidden * 2 // 3 // 64 * 64 if is_gated else 4 * hidden)
    return Model(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        attention=_attention(line, hidden),
        vocab_size=_vocab_size(line),
        seq_length=line.size("seq_length"),
        precision=_precision(line),
        is_gated=is_gated,
        is_tied=not line.has("untie_embeddings_and_output_weights"),
        recomputed=_recomputed(line, layers / stages),
        experts=_experts(line, layers, ffn),
        mtp_num_layers=line.maybe("mtp_num_layers") or 0,
        unlike=_unlike(line, layers, hidden, ffn),
    )


def _recomputed(line: _Line, layers_of_stage: float) -> Recomputed:
    # core_v0.16.1 core/transformer/transformer_config.py: it stands for selective recomputation of these.
    is_short = line.has("moe_layer_recompute")
    return Recomputed.by_flags(
        "selective" if is_short else line.text("recompute_granularity"),
        line.text("recompute_method"),
        line.maybe("recompute_num_layers"),
        layers_of_stage,
        [*(line.words("recompute_modules") or ["core_attn"]), *["moe"] * is_short],
    )


def _precision(line: _Line) -> Precision:
    kept = [line.text(name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    is_aware = line.has("use_precision_aware_optimizer")
    return Precision(
        dtype_bytes=2 if line.has("bf16") or line.has("fp16") else 4,
        gradient_bytes=2 if line.has("grad_reduce_in_bf16") or line.text("main_grads_dtype") == "bf16" else 4,
        moments_bytes=sum(2 if one == "bf16" else 4 for one in kept) if is_aware else None,
    )


def _state_space(line: _Line, hidden: int) -> AttentionShape:
    return AttentionShape.state_space(
        hidden,
        heads=line.maybe("mamba_num_heads"),
        head_dim=line.size("mamba_head_dim", 64),
        groups=line.size("mamba_num_groups", 8),
        states=line.size("mamba_state_dim", 128),
        seq_length=line.size("seq_length"),
    )


def _unlike(line: _Line, layers: int, hidden: int, ffn: int) -> UnlikeLayers:
    """Return layers that are not alike, by the launch line's file or hybrid pattern. Raises ConfigError."""
    if kinds := _kinds(line):
        return hybrid_layers(kinds, _attention(line, hidden), _state_space(line, hidden), ffn)
    path, text = (
        line.text("heterogeneous_layers_config_path"),
        line.text("heterogeneous_layers_config_encoded_json"),
    )
    if not path and not text:
        return ()
    try:
        text = text or read_text(path)
    except ValueError as error:
        raise ConfigError(
            f"--heterogeneous-layers-config-path {path}: {error}. Give this command a path of the file that it can "
            "read, too."
        ) from None
    heads = line.size("num_attention_heads")
    return unlike_layers(
        text,
        num_layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_channels=line.size("kv_channels", max(1, hidden // heads)),
        is_gated=line.has("swiglu"),
    )


def _attention(line: _Line, hidden: int) -> AttentionShape:
    heads = line.size("num_attention_heads")
    if line.has("multi_latent_attention"):
        return AttentionShape.latent(
            hidden,
            heads,
            q_lora_rank=line.maybe("q_lora_rank"),
            kv_lora_rank=line.size("kv_lora_rank", 32),
            qk_head_dim=line.size("qk_head_dim", 128),
            qk_pos_emb_head_dim=line.size("qk_pos_emb_head_dim", 64),
            v_head_dim=line.size("v_head_dim", 128),
        )
    groups = line.size("num_query_groups", 1) if line.has("group_query_attention") else heads
    return AttentionShape.grouped(hidden, heads, groups, line.size("kv_channels", max(1, hidden // heads)))


def _presumed(line: _Line) -> int:
    """Return the size of the vocabulary that is presumed where only the tokenizer has it; 0: it is not presumed."""
    if line.has("padded_vocab_size") or line.has("vocab_size"):
        return 0
    is_gpt2 = line.text("tokenizer_type") in ("", "GPT2BPETokenizer") and not line.has("tokenizer_model")
    if is_gpt2 and line.has("vocab_file") and line.has("merge_file"):
        return _GPT2_WORDS
    return _WORDS if any(map(line.has, ("tokenizer_type", "tokenizer_model", "vocab_file"))) else 0


def _vocab_size(line: _Line) -> int:
    """Return the padded size, which the embedding has. Raises ConfigError."""
    padded = line.maybe("padded_vocab_size")
    if padded is not None:
        return padded
    size = _presumed(line) or line.size("vocab_size")
    multiple = line.size("make_vocab_size_divisible_by", 128) * line.size("tensor_model_parallel_size", 1)
    return -(-size // multiple) * multiple


def _experts(line: _Line, layers: int, ffn: int) -> Experts | None:
    count = line.maybe("num_experts")
    if count is None:
        return None
    return Experts(
        layers=frozenset(layers_with_experts(_frequency(line), layers)),
        count=count,
        topk=line.size("moe_router_topk", 2),
        ffn_hidden_size=line.size("moe_ffn_hidden_size", ffn),
        shared_ffn_hidden_size=line.maybe("moe_shared_expert_intermediate_size") or 0,
    )


def _frequency(line: _Line) -> str:
    """Return the value of ``--moe-layer-freq``, or the one that stands for a hybrid pattern, which has a letter for
    experts.
    """
    if kinds := _kinds(line):
        return str([int(kind == "E") for kind in kinds])
    return line.text("moe_layer_freq") or "1"


def _stage_layers(line: _Line, layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of transformer layers of each stage; empty if they are as even as possible.

    They follow from ``--pipeline-model-parallel-layout``, from the ends of stages in a hybrid pattern, or from
    ``--decoder-first-`` and ``-last-pipeline-num-layers`` and ``--account-for-…-in-pipeline-split``.

    Raises ConfigError.
    """
    if chunks := _chunks(line):
        counts = [chunk.count("t") for chunk in chunks]
        if len(counts) % stages or sum(counts) != layers:
            raise ConfigError(
                f"--pipeline-model-parallel-layout has {sum(counts)} layers in {len(counts)} chunks, and there are "
                f"{layers} layers and {stages} stages, each with equally many chunks."
            )
    else:
        counts = [len(one) for one in _segments(line)]
    if len(counts) > 1 and not len(counts) % stages:
        counts = [sum(counts[stage::stages]) for stage in range(stages)]
        # Megatron may have a stage without a transformer layer; a plan cannot.
        return tuple(counts) if all(counts) else ()
    first, last = (
        line.maybe("decoder_first_pipeline_num_layers"),
        line.maybe("decoder_last_pipeline_num_layers"),
    )
    embedding = int(line.has("account_for_embedding_in_pipeline_split"))
    loss = int(line.has("account_for_loss_in_pipeline_split"))
    if stages < 2 or not (first or last or embedding or loss):
        return ()
    given = {0: first, stages - 1: last}
    rest = [stage for stage in range(stages) if not given.get(stage)]
    left = layers + embedding + loss - sum(one or 0 for one in given.values())
    if (left % len(rest) if rest else left) or left < 0:
        raise ConfigError(
            f"{layers} layers in {stages} stages, of which the first has {first or 'as many as others'} and the last "
            f"{last or 'as many as others'}: the others cannot have equally many. Change --num-layers or the "
            "--decoder-…-pipeline-num-layers."
        )
    counts = [given.get(stage) or left // len(rest) for stage in range(stages)]
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts) if all(counts) else ()
