"""Which of Megatron-LM's flags cannot work under failure, and what to do instead. Needs neither torch nor megatron.

They are known by their destination in the parsed arguments, whatever a version calls the flag, and looked at twice: as
the user gave them, since Megatron's validation takes some of them back, and as validation has left them, since it
derives others. What is decided by a value has a predicate; the others are refused if they are set.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.upstream.flags import AS_ODYSSEY_DOES, MOOT, MUON, WORKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """Megatron's own arguments, without those of the user's script; nothing of them: they are not known yet."""

    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Destination -> how it is spelled."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""

    @classmethod
    def of(cls, parser: argparse.ArgumentParser, version: str) -> Parser:
        """What ``parser`` knows by now."""
        actions = [one for one in parser._actions if one.default != argparse.SUPPRESS]
        flags: dict[str, list[str]] = {}
        for one in actions:
            flags.setdefault(one.dest, []).extend(one.option_strings)
        return cls(flags=flags, defaults={one.dest: one.default for one in actions}, version=version)

    def given(self, args: Any) -> Iterator[str]:
        """The destinations that are not what they are without their flags."""
        for name, default in self.defaults.items():
            if getattr(args, name, default) != default:
                yield name

    def flag(self, name: str) -> str:
        """How destination ``name`` is spelled."""
        return next(iter(self.flags.get(name, ())), "--" + name.replace("_", "-"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An argument that would go wrong under failure, or silently do nothing that its user relies on."""

    dest: str
    remedy: str
    flag: str
    """As users know it."""
    refuses: Callable[[Any, Any], bool] | None
    """Whether it is this value, of these arguments, that cannot work. None: any but the default."""

    def given(self, args: Any, parser: Parser) -> bool:
        """Whether ``args`` have it, set by hand or by Megatron's validation."""
        value = getattr(args, self.dest, None)
        if self.refuses is not None:
            return self.refuses(value, args)
        return bool(value) and value != parser.defaults.get(self.dest)


STATELESS = "tensorwise", "blockwise", "mxfp8"
"""The recipes of fp8 by which a tensor is scaled by what is in it, and nothing is kept for the next one."""
_SCALED = "fp16", "torch.float16", "fp8", "torch.uint8"
"""As flags, and as Megatron's validation leaves them."""
_LEAVE_OUT = "Leave it out."
_QUANTIZED = "The scales of quantized tensors would not move with a layer. Use --bf16 alone."
_ALIKE = "Only layers that are alike are planned for."
_HOST = "Odyssey moves a layer's tensors from where it put them. Leave it out."
_RERUN = "Odyssey repeats a step by itself, after a failure only. Leave it out."
_ONE_RANK = "It would be that of one rank's layers. Leave it out."
_GPUS = "It compares GPUs over groups that Odyssey makes anew. Leave it out."
_MODELOPT = "Model Optimizer changes the model behind its stages. Leave it out."
_UNTRIED = "Nobody has tried it under failure. Leave it out."
_ALONE = "Leave out --odyssey."
_PACKED_ALONE = "Packed sequences are not tried with hybrid models."
_STACKS = "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
_KINDS = "M*-E"
_HYBRID = (
    f"Of a hybrid pattern the layers {', '.join(_KINDS)} have been tried, and ends of stages; no multi-token "
    f"prediction (/). Use these, with --spec {_STACKS}."
)


def _is_hybrid(args: Any) -> bool:
    """Whether ``--spec`` names a stack of Megatron's own; a launch line may have more than its first word."""
    spec = getattr(args, "spec", None)
    words = spec if isinstance(spec, list) else [str(spec)]
    module = words[0].strip("[]").split()[0] if words and words[0].strip("[] ") else ""
    return module.startswith(("megatron.core.models.mamba.", "megatron.core.models.hybrid."))


def _no_known_pattern(value: Any, args: Any) -> bool:
    return value is not None and not (_is_hybrid(args) and {*str(value)} <= {*_KINDS, "|"})


_WHOLE_MOMENTUM = "with Muon each holder of a layer keeps all of its optimizer state"


def _not_none(value: Any, args: Any) -> bool:
    return value is not None


def _above_one(value: Any, args: Any) -> bool:
    return (value or 1) > 1


def _none_of(*usual: Any) -> Callable[[Any, Any], bool]:
    return lambda value, args: value not in (None, *usual)


def _any_but(*usual: str) -> Callable[[Any, Any], bool]:
    """Of a list, or one value alone."""
    return lambda value, args: not {*([value] if isinstance(value, str) else value or ())} <= {*usual}


def _packed_with_others(value: Any, args: Any) -> bool:
    return bool(value) and _is_hybrid(args)


def _with_muon(args: Any) -> bool:
    return getattr(args, "optimizer", None) in MUON


def _unlike(other: str) -> Callable[[Any, Any], bool]:
    return lambda value, args: value not in (None, getattr(args, other, None))


_ROWS: tuple[tuple[str, str] | tuple[str, str, Callable[[Any, Any], bool]], ...] = (
    ("yaml_cfg", "Give the model by flags."),
    ("fp8_recipe", "Delayed scaling goes by what each rank has seen before. Use tensorwise, blockwise or mxfp8.",
     lambda value, args: getattr(args, "fp8", None) is not None and value not in STATELESS),
    ("fp8_output_proj", _UNTRIED),
    ("fp8_quantizer_factory", _UNTRIED, _not_none),
    ("fp4", _QUANTIZED, _not_none),
    ("te_precision_config_file", _QUANTIZED, _not_none),
    ("kitchen_config_file", _QUANTIZED, _not_none),
    ("kitchen_recipe_number", _QUANTIZED, _not_none),
    ("use_kitchen_attention", _UNTRIED),
    ("symmetric_ar_type", "Its buffers belong to the ranks that the job started with. Leave it out."),
    ("use_grouped_gemm_for_dense_mlp", _UNTRIED),
    ("mla_down_proj_fusion", _UNTRIED),
    ("fused_residual_rmsnorm", _UNTRIED),
    ("batch_invariant_mode", _UNTRIED),
    ("fp32_residual_connection", "Messages have the type of the parameters. Leave it out."),
    ("distribute_saved_activations", _UNTRIED),
    ("hybrid_context_parallel", _LEAVE_OUT),
    ("expert_tensor_parallel_size",
     "Without expert parallelism Megatron does not sum the gradients of experts over all who have them then. Use that "
     "of tensor parallelism, or --expert-model-parallel-size above 1.",
     lambda value, args: bool(getattr(args, "num_experts", None))
     and not _above_one(getattr(args, "expert_model_parallel_size", None), args)
     and _unlike("tensor_model_parallel_size")(value, args)),
    ("expert_tensor_parallel_num_weight_shards", "Use that of tensor parallelism.",
     lambda value, args: value is not None
     and value > (getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size)),
    ("moe_router_load_balancing_type",
     "The loss of a microbatch would depend on which others ran before it, and where. Use aux_loss, seq_aux_loss, "
     "sinkhorn or none.", _any_but("aux_loss", "seq_aux_loss", "sinkhorn", "none")),
    ("moe_use_upcycling", _UNTRIED),
    ("moe_use_legacy_grouped_gemm", _UNTRIED),
    ("moe_enable_routing_replay", _UNTRIED),
    ("moe_router_force_load_balancing", "It draws other numbers on each rank. Leave it out."),
    ("moe_router_force_biased", "It draws its numbers once, on each rank. Leave it out.", _not_none),
    ("moe_latent_size", _UNTRIED),
    ("moe_paged_stash", _UNTRIED),
    ("moe_expert_rank_capacity_factor", _UNTRIED),
    ("moe_single_grouped_weight", _UNTRIED),
    ("moe_single_grouped_bias", _UNTRIED),
    ("moe_mlp_glu_interleave_size", _UNTRIED),
    ("moe_shared_expert_glu_interleave_size", _UNTRIED),
    ("use_grouped_gemm_for_shared_expert", _UNTRIED),
    ("save_tokens_per_expert_interval", _ONE_RANK),
    ("moe_routing_trace_path", _ONE_RANK),
    ("mtp_standalone", "Its blocks are part of the head. Leave it out."),
    ("mtp_use_repeated_layer", _UNTRIED),
    ("mtp_detach_heads", _UNTRIED),
    ("position_embedding_type", "Use rope, yarn, learned_absolute or none.",
     _none_of("rope", "yarn", "learned_absolute", "none")),
    ("hybrid_layer_pattern", _HYBRID, _no_known_pattern),
    ("hybrid_override_pattern", _HYBRID, _no_known_pattern),
    ("mtp_hybrid_override_pattern", _HYBRID),
    ("is_hybrid_model", f"Hybrid models are given with --spec, one of Megatron's own: {_STACKS}.",
     lambda value, args: bool(value) and not _is_hybrid(args)),
    ("linear_attention_freq", _ALIKE),
    ("experimental_attention_variant", _ALIKE),
    ("spec", f"Of layers that it names those of Megatron's own hybrid models have been tried: {_STACKS}. Use these, or "
     "leave it out.", lambda value, args: value is not None and not _is_hybrid(args)),
    ("tensor_parallel_num_weight_shards", "Use that of tensor parallelism.",
     lambda value, args: value is not None and value > args.tensor_model_parallel_size),
    ("freeze_all_layers", _LEAVE_OUT),
    ("perform_initialization", "Holders of a layer would begin with different weights. Leave it out.",
     lambda value, args: value is False),
    ("init_model_with_meta_device", _UNTRIED),
    ("qk_clip", "It would look at one rank's layers. Leave it out."),
    ("logits_save_dir", _LEAVE_OUT),
    ("logits_load_dir", _LEAVE_OUT),
    ("export_kd_cfg", _MODELOPT),
    ("export_kd_teacher_load", _MODELOPT),
    ("export_quant_cfg", _MODELOPT),
    ("export_offline_model", _MODELOPT),
    ("export_te_mcore_model", _MODELOPT),
    ("export_legacy_megatron", _MODELOPT),
    ("modelopt_enabled", _MODELOPT),
    ("enable_gpt_oss", _MODELOPT),
    ("use_megatron_fsdp", _LEAVE_OUT),
    ("use_torch_fsdp2", _LEAVE_OUT),
    ("use_legacy_models", _LEAVE_OUT),
    ("cpu_offloading_num_layers", _HOST),
    ("fine_grained_activation_offloading", _HOST),
    ("optimizer_cpu_offload", _HOST),
    ("optimizer", "Use adam, sgd or muon.", _none_of("adam", "sgd", *MUON)),
    ("muon_tp_mode", "The ranks of a cell would exchange messages in the middle of an update. Use blockwise.",
     lambda value, args: _with_muon(args) and value not in (None, "blockwise")
     and _above_one(getattr(args, "tensor_model_parallel_size", None), args)),
    ("muon_scalar_optimizer", "Use adam.",
     lambda value, args: _with_muon(args) and value not in (None, "adam")),
    ("use_precision_aware_optimizer",
     "As in Megatron-LM it is for --optimizer adam with --use-distributed-optimizer. Use these, or leave it out.",
     lambda value, args: bool(value) and not (
         getattr(args, "optimizer", "adam") == "adam" and getattr(args, "use_distributed_optimizer", False))),
    ("main_params_dtype", "Its scales, one for each tensor, would not move with a layer. Use fp32.",
     lambda value, args: str(value) in _SCALED),
    ("exp_avg_dtype", "Its scales, one for each tensor, would not move with a layer. Use fp32 or bf16.",
     lambda value, args: str(value) in _SCALED),
    ("exp_avg_sq_dtype", "Its scales, one for each tensor, would not move with a layer. Use fp32 or bf16.",
     lambda value, args: str(value) in _SCALED),
    ("ddp_param_name_patterns_for_fp32_local_accumulation", _UNTRIED),
    ("dump_param_to_param_group_map", _ONE_RANK),
    ("check_for_large_grads", "Its check is of Megatron's own reduction. Leave it out."),
    ("result_rejected_tracker_filename", _RERUN),
    ("check_for_spiky_loss", _RERUN),
    ("decrease_batch_size_if_needed", "Give sizes that all replicas can share where they grow.",
     lambda value, args: bool(value) and bool(
         getattr(args, "rampup_batch_size", None) or getattr(args, "step_batch_size_schedule", None))),
    ("eval_micro_batch_size", "Evaluations run in microbatches of training's size, in which experts drop other tokens. "
     "Use that of training.",
     lambda value, args: _unlike("micro_batch_size")(value, args)
     and getattr(args, "moe_expert_capacity_factor", None) is not None),
    ("dataloader_inter_document_masking", f"{_PACKED_ALONE} Leave it out.", _packed_with_others),
    ("dataloader_type", "Samples are found by their global number. Use single or cyclic.",
     _none_of("single", "cyclic")),
    ("non_persistent_ckpt_type", "Use global.", lambda value, args: value == "local"),
    ("ckpt_convert_format", "Convert without --odyssey."),
    ("ckpt_fully_parallel_save_process_group", "Use dp.", _none_of("dp")),
    ("ckpt_fully_parallel_load_process_group", "Use dp.", _none_of("dp")),
    ("dist_ckpt_save_pre_mcore_014", _UNTRIED),
    ("override_ckpt_iteration", _UNTRIED, _not_none),
    ("load_main_params_from_ckpt", _UNTRIED),
    ("use_mp_args_from_checkpoint_args", "Give the sizes of the job by flags."),
    ("inprocess_restart", "It restarts what Odyssey keeps alive. Leave it out."),
    ("enable_ft_package", "Odyssey notices failures itself. Leave it out."),
    ("fault_injector_ranks", "Use --odyssey-inject, or odyssey inject."),
    ("fault_injector_num_ranks", "Use --odyssey-inject, or odyssey inject."),
    ("adlr_autoresume", _UNTRIED),
    ("distributed_timeout_seconds_after_init", "Use --distributed-timeout-minutes, or --odyssey-op-timeout-s."),
    ("fake_process_group", _ALONE),
    ("lazy_mpu_init", _LEAVE_OUT),
    ("skip_train", "An evaluation alone has nothing to recover. Leave out --odyssey."),
    ("perform_rl_step", _ALONE),
    ("sft", f"{_PACKED_ALONE} Its samples do not make larger batches, and have no masks. Use GPT models, "
     "--micro-batch-size 1, and --no-create-attention-mask-in-dataloader.",
     lambda value, args: bool(value) and (
         _packed_with_others(value, args) or _above_one(getattr(args, "micro_batch_size", None), args)
         or getattr(args, "create_attention_mask_in_dataloader", True))),
    ("save_wgrads_interval", _LEAVE_OUT),
    ("save_dgrads_interval", _LEAVE_OUT),
    ("save_params_interval", _LEAVE_OUT),
    ("save_activations_interval", _LEAVE_OUT),
    ("log_energy", _GPUS),
    ("log_straggler", _GPUS),
    ("gpu_sniff_test_interval", _GPUS),
    ("run_workload_inspector_server", _GPUS),
)  # fmt: skip
_SAID = {
    "fp4": "--fp4-format",
    "perform_initialization": "--no-initialization",
    "non_persistent_ckpt_type": "--non-persistent-ckpt-type local",
}
"""Where a flag is not called like its destination."""
REFUSALS = tuple(
    Refusal(
        dest=dest,
        remedy=remedy,
        flag=_SAID.get(dest, "--" + dest.replace("_", "-")),
        refuses=more[0] if more else None,
    )
    for dest, remedy, *more in _ROWS
)
"""The table in docs/flags.md is made of these."""
REFUSED = frozenset(one.dest for one in REFUSALS)


def refused(args: Any, parser: Parser) -> Iterator[Refusal]:
    """The refusals that ``args`` meet with, before Megatron's validation or after it."""
    return (one for one in REFUSALS if one.given(args, parser))


def unknown(args: Any, parser: Parser, accepted: Collection[str] = ()) -> Iterator[str]:
    """The flags of ``args``, as the user gave them, that are Megatron's and on none of the lists."""
    for dest in parser.given(args):
        if dest not in WORKS and dest not in MOOT and dest not in REFUSED:
            flag = parser.flag(dest)
            if flag.removeprefix("--") not in accepted:
                yield flag


def moot(args: Any, parser: Parser) -> Iterator[tuple[str, str]]:
    """The flags of ``args``, as the user gave them, that change nothing, each with the reason."""
    for dest in parser.given(args):
        if dest in MOOT and getattr(args, dest) not in AS_ODYSSEY_DOES.get(dest, ()):
            yield parser.flag(dest), MOOT[dest]


def ignored(args: Any, parser: Parser) -> Iterator[tuple[str, str]]:
    """As :func:`moot`, without what plain Megatron-LM would not read either: it sets some of that itself."""
    yield from ((flag, why) for flag, why in moot(args, parser) if not why.startswith("read "))
    if _with_muon(args):
        if args.optimizer == "dist_muon":
            yield "--optimizer dist_muon", _WHOLE_MOMENTUM
        elif getattr(args, "use_distributed_optimizer", False):
            yield "--use-distributed-optimizer", _WHOLE_MOMENTUM


def reasons(
    args: Any, parser: Parser, accepted: Collection[str] | None = None, *, strict: bool = False
) -> dict[str, str]:
    """What is said of each flag that cannot work: its name first, the remedy last.

    Args:
        accepted: of those that Odyssey does not know, the ones that the user vouches for; None: Megatron has derived
            values of its own by now, and nothing is said of unknown ones.
        strict: also of each that would be ignored.
    """
    lines = {}
    for one in refused(args, parser):
        value = getattr(args, one.dest, None)
        shown = one.flag if value in (None, True, False) or " " in one.flag else f"{one.flag} {value}"
        lines[one.flag] = f"{shown} does not work with --odyssey yet. {one.remedy}"
    if accepted is not None:
        lines |= {
            flag: f"{flag} is not known to Odyssey, though megatron-core {parser.version} has it: it may go wrong "
            f"under failure. Leave it out, or vouch for it with --odyssey-accept {flag.removeprefix('--')}."
            for flag in unknown(args, parser, accepted)
        }
    if strict:
        lines |= {
            flag: f"{flag} changes nothing with --odyssey: {why}. Leave it out, or leave out --odyssey-strict."
            for flag, why in ignored(args, parser)
        }
    return lines


def check(
    args: Any, parser: Parser, accepted: Collection[str] | None = None, *, strict: bool = False
) -> None:
    """Raises ConfigError that names all flags that cannot work, before any GPU time is spent. As :func:`reasons`."""
    lines = list(reasons(args, parser, accepted, strict=strict).values())
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError(f"{len(lines)} of the job's flags cannot be used:\n" + "\n".join(lines))


def parsed(flags: Sequence[str], known: Mapping[str, tuple[str, Any]]) -> tuple[SimpleNamespace, list[str]]:
    """A launch line as far as refusals look at it, and its flags that are not Megatron's.

    Args:
        known: flag -> its destination, and the value that it sets if it takes none.
    """
    values: dict[str, Any] = {}
    strange = []
    for flag, after in zip(flags, [*flags[1:], "--"], strict=False):
        name, equals, given = flag.partition("=")
        if not name.startswith("--"):
            continue
        if name not in known:
            strange.append(name)
            continue
        dest, const = known[name]
        value = given if equals else const if const is not None or after.startswith("--") else after
        values[dest] = int(value) if isinstance(value, str) and value.isdigit() else value
    usual: dict[str, Any] = {"tensor_model_parallel_size": 1}
    return SimpleNamespace(**usual | values), strange
