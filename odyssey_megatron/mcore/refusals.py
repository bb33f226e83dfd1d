"""Which of Megatron-LM's flags cannot work under failure, and what to do instead. Needs neither torch nor megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from odyssey_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A flag that would go wrong under failure, or silently do nothing."""

    flag: str
    given: Callable[[Any], bool]
    """Whether the parsed arguments have it."""
    remedy: str


def _set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, 1) or 1) > 1


def _differs(name: str, usual: str) -> Callable[[Any], bool]:
    return lambda args: getattr(args, name, None) not in (None, getattr(args, usual, None))


def _not_none(*names: str) -> Callable[[Any], bool]:
    return lambda args: any(getattr(args, name, None) is not None for name in names)


_LEAVE_OUT = "Leave it out."
_DEFERRED = "Odyssey's own schedule runs weight gradients later. Leave it out."
_QUANTIZED = "The scales of quantized tensors would not move with a layer. Use --bf16 alone."
REFUSALS = tuple(
    Refusal(flag=flag, given=given, remedy=remedy)
    for flag, given, remedy in (
        ("--yaml-cfg", _set("yaml_cfg"), "Give the model by flags."),
        ("--fp16", _set("fp16"), "Its loss scale would have to be agreed on over generations. Use --bf16."),
        # Megatron's parser calls them fp8 and fp4, a launch line as it stands by their flags.
        ("--fp8-format", _not_none("fp8", "fp8_format"), _QUANTIZED),
        ("--fp4-format", _not_none("fp4", "fp4_format"), _QUANTIZED),
        ("--te-precision-config-file", _not_none("te_precision_config_file"), _QUANTIZED),
        ("--kitchen-config-file", _not_none("kitchen_config_file"), _QUANTIZED),
        ("--kitchen-recipe-number", _not_none("kitchen_recipe_number"), _QUANTIZED),
        ("--tp-comm-overlap", _set("tp_comm_overlap"),
         "Its buffers belong to the ranks that the job started with. Leave it out."),
        ("--defer-embedding-wgrad-compute", _set("defer_embedding_wgrad_compute"), _DEFERRED),
        ("--delay-wgrad-compute", _set("delay_wgrad_compute"), _DEFERRED),
        ("--context-parallel-size", _above_one("context_parallel_size"), "Use 1."),
        ("--expert-model-parallel-size", _above_one("expert_model_parallel_size"), "Use 1."),
        ("--num-experts", _set("num_experts"), "Train a dense model."),
        ("--mtp-num-layers", _set("mtp_num_layers"), _LEAVE_OUT),
        ("tied embeddings (no --untie-embeddings-and-output-weights)",
         lambda args: not getattr(args, "untie_embeddings_and_output_weights", False),
         "One weight would have two places in the pipeline. Add --untie-embeddings-and-output-weights."),
        ("--num-layers-per-virtual-pipeline-stage", _set("num_layers_per_virtual_pipeline_stage"),
         "Odyssey's own schedule fills the bubbles. Leave it out."),
        ("--num-virtual-stages-per-pipeline-rank", _set("num_virtual_stages_per_pipeline_rank"),
         "Odyssey's own schedule fills the bubbles. Leave it out."),
        ("--pipeline-model-parallel-layout", _set("pipeline_model_parallel_layout"),
         "The plan chooses the layers of each stage. Leave it out."),
        ("--hybrid-layer-pattern", _set("hybrid_layer_pattern"), "Only layers that are alike are planned for."),
        ("--heterogeneous-layers-config-path", _set("heterogeneous_layers_config_path"),
         "Only layers that are alike are planned for."),
        ("--tensor-parallel-num-weight-shards",
         lambda args: (getattr(args, "tensor_parallel_num_weight_shards", 1) or 1) > args.tensor_model_parallel_size,
         "Use that of tensor parallelism."),
        ("--freeze-all-layers", _set("freeze_all_layers"), _LEAVE_OUT),
        ("--use-mup", _set("use_mup"), _LEAVE_OUT),
        ("--qk-clip", _set("qk_clip"), "It would look at one rank's layers. Leave it out."),
        ("--log-max-attention-logit", _set("log_max_attention_logit"), "It would be that of one rank's layers. Leave "
         "it out."),
        ("--logits-save-dir", _set("logits_save_dir"), _LEAVE_OUT),
        ("--logits-load-dir", _set("logits_load_dir"), _LEAVE_OUT),
        ("--use-megatron-fsdp", _set("use_megatron_fsdp"), _LEAVE_OUT),
        ("--use-torch-fsdp2", _set("use_torch_fsdp2"), _LEAVE_OUT),
        ("--use-legacy-models", _set("use_legacy_models"), _LEAVE_OUT),
        ("--cuda-graph-impl", lambda args: getattr(args, "cuda_graph_impl", "none") not in (None, "none"), _LEAVE_OUT),
        ("--use-precision-aware-optimizer", _set("use_precision_aware_optimizer"),
         "Its states are those of Megatron's distributed optimizer, whose place Odyssey takes. Leave it out."),
        ("--num-distributed-optimizer-instances", _above_one("num_distributed_optimizer_instances"),
         "Odyssey shares out optimizer states itself. Leave it out."),
        ("--optimizer-cuda-graph", _set("optimizer_cuda_graph"), _LEAVE_OUT),
        ("--rampup-batch-size", _set("rampup_batch_size"),
         "The plan is made for one global batch size. Start with the full batch."),
        ("--step-batch-size-schedule", _set("step_batch_size_schedule"),
         "The plan is made for one global batch size. Start with the full batch."),
        ("--eval-global-batch-size", _differs("eval_global_batch_size", "global_batch_size"), "Use that of training."),
        ("--eval-micro-batch-size", _differs("eval_micro_batch_size", "micro_batch_size"), "Use that of training."),
        ("--dataloader-inter-document-masking", _set("dataloader_inter_document_masking"), _LEAVE_OUT),
        ("--iterations-to-skip", _set("iterations_to_skip"), _LEAVE_OUT),
        ("--dataloader-type", lambda args: getattr(args, "dataloader_type", None) not in (None, "single"),
         "Samples are found by their global number. Use 'single'."),
        ("--full-validation", _set("full_validation"), "Set --eval-iters instead."),
        ("--multiple-validation-sets", _set("multiple_validation_sets"), _LEAVE_OUT),
        ("--async-save", _set("async_save"), "A failure during a save repeats the save. Leave it out."),
        ("--ckpt-format", lambda args: bool(args.save or args.load) and args.ckpt_format != "torch_dist",
         "Only torch_dist checkpoints fit every layout. Use --ckpt-format torch_dist."),
        ("--non-persistent-ckpt-type local", lambda args: getattr(args, "non_persistent_ckpt_type", None) == "local",
         "Use global."),
        ("--ckpt-convert-format", _set("ckpt_convert_format"), "Convert without --odyssey."),
        ("--inprocess-restart", _set("inprocess_restart"), "It restarts what Odyssey keeps alive. Leave it out."),
        ("--enable-ft-package", _set("enable_ft_package"), "Odyssey notices failures itself. Leave it out."),
        ("--skip-train", _set("skip_train"), "An evaluation alone has nothing to recover. Leave out --odyssey."),
        ("--perform-rl-step", _set("perform_rl_step"), "Leave out --odyssey."),
        ("--sft", _set("sft"), "Leave out --odyssey."),
        ("--save-wgrads-interval", _set("save_wgrads_interval"), _LEAVE_OUT),
        ("--save-dgrads-interval", _set("save_dgrads_interval"), _LEAVE_OUT),
        ("--save-params-interval", _set("save_params_interval"), _LEAVE_OUT),
        ("--save-activations-interval", _set("save_activations_interval"), _LEAVE_OUT),
        ("--optimizer", lambda args: args.optimizer not in ("adam", "sgd"), "Use adam or sgd."),
    )
)  # fmt: skip
"""The README's table is made of these."""


def refused(args: Any) -> Iterator[str]:
    """What is said of each flag that cannot work."""
    for one in REFUSALS:
        if one.given(args):
            value = getattr(args, one.flag.removeprefix("--").replace("-", "_"), None)
            shown = one.flag if value in (None, True) else f"{one.flag} {value}"
            yield f"{shown} does not work with --odyssey yet. {one.remedy}"


def check(args: Any) -> None:
    """Raises ConfigError for the first flag that cannot work, before any GPU time is spent."""
    for message in refused(args):
        raise ConfigError(message)


def parsed(flags: Sequence[str]) -> SimpleNamespace:
    """A launch line as far as refusals look at it. Megatron's own parser needs Megatron, and defaults of a version."""
    values: dict[str, Any] = {}
    for flag, after in zip(flags, [*flags[1:], "--"], strict=False):
        name, equals, value = flag.partition("=")
        if name.startswith("--"):
            shown = value if equals else True if after.startswith("--") else after
            dest = name.removeprefix("--").replace("-", "_")
            values[dest] = int(shown) if str(shown).isdigit() else shown
    # Without a model on the line nothing is said about its embeddings.
    usual: dict[str, Any] = {"save": None, "load": None, "ckpt_format": "torch_dist", "optimizer": "adam"}
    usual |= {
        "tensor_model_parallel_size": 1,
        "untie_embeddings_and_output_weights": "num_layers" not in values,
    }
    return SimpleNamespace(**usual | values)
