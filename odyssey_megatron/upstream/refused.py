"""For each refused flag of Megatron-LM's: why, from which version on it could work, and what to do instead.

Flags are grouped by the first version that has what they would need; from that version on only Odyssey's own work is
missing. What Odyssey does itself, or what leaves nothing to recover, is refused for good. Needs neither torch nor
megatron.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from odyssey_megatron.upstream.chunks import chunks_of
from odyssey_megatron.upstream.flags import MUON

STATELESS = "tensorwise", "blockwise", "mxfp8"
"""The fp8 recipes that scale a tensor by its contents alone, and keep nothing for the next one."""
_SCALED = "fp16", "torch.float16", "fp8", "torch.uint8"
"""Types with scales, as flags, and as Megatron's validation leaves them."""
_LEAVE_OUT = "Leave it out."
_KINDS = "M*-E"
_NO_SPEC = "Hybrid models are given with --spec, and it must be one of Megatron's own."
_STACKS = "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"

Decides = Callable[[Any, Any], bool]
"""(its value, all arguments) -> whether that value cannot work."""
Row = tuple[str, str, str, str, Decides | None]
"""Destination, why, since, remedy, and what decides; None: any value but the default is refused."""


def is_hybrid(args: Any) -> bool:
    """Whether ``--spec`` names one of Megatron's own hybrid stacks; only the first word of its value counts."""
    spec = getattr(args, "spec", None)
    words = spec if isinstance(spec, list) else [str(spec)]
    module = words[0].strip("[]").split()[0] if words and words[0].strip("[] ") else ""
    return module.startswith(("megatron.core.models.mamba.", "megatron.core.models.hybrid."))


def with_muon(args: Any) -> bool:
    """Whether Muon steps the matrices."""
    return getattr(args, "optimizer", None) in MUON


def _no_known_pattern(value: Any, args: Any) -> bool:
    return value is not None and not {*str(value)} <= {*_KINDS, "|"}


def _known_pattern_without_spec(value: Any, args: Any) -> bool:
    return value is not None and not (_no_known_pattern(value, args) or is_hybrid(args))


def _not_none(value: Any, args: Any) -> bool:
    return value is not None


def _number(value: Any, otherwise: float) -> float:
    """``value``, or ``otherwise`` if it is not given, or a variable of a launch script whose value is unknown."""
    return value if isinstance(value, int) else otherwise


def _above_one(value: Any, args: Any) -> bool:
    return _number(value, 1) > 1


def _none_of(*usual: Any) -> Decides:
    return lambda value, args: value not in (None, *usual)


def _any_but(*usual: str) -> Decides:
    """Decides whether a list, or a single value, has any other element than ``usual``."""
    return lambda value, args: not {*([value] if isinstance(value, str) else value or ())} <= {*usual}


def _packed_with_others(value: Any, args: Any) -> bool:
    return bool(value) and is_hybrid(args)


def _unlike(other: str) -> Decides:
    return lambda value, args: value not in (None, getattr(args, other, None))


def _in_16_bits_or_fewer(value: Any, args: Any) -> bool:
    return str(value) in _SCALED


def _words_unknown(value: Any, args: Any) -> bool:
    """Whether nothing says the size of the embedding. A checkpoint may, whose arguments are read later."""
    given = getattr(args, "padded_vocab_size", None) is not None or getattr(
        args, "use_checkpoint_args", False
    )
    return value is False and not given


def _more_stages_than_layers(value: Any, args: Any) -> bool:
    return _number(value, 1) > _number(getattr(args, "num_layers", None), math.inf)


def _mtp_apart_from_loss(value: Any, args: Any) -> bool:
    return any("m" in chunk and "L" not in chunk for chunk in chunks_of(str(value or "")))


def _more_shards_than(*sizes: str) -> Decides:
    """Decides whether the value is larger than the first of ``sizes`` that is given."""

    def decides(value: Any, args: Any) -> bool:
        ranks = next(filter(None, (getattr(args, one, None) for one in sizes)), None)
        return _number(value, 0) > _number(ranks, math.inf)

    return decides


def _mlp_with_biases(value: Any, args: Any) -> bool:
    """Whether an MLP with biases is recomputed by megatron.core's own ``checkpoint``; fp8 and fp4 use Transformer
    Engine's.
    """
    return (
        "mlp" in (value or ())
        and getattr(args, "recompute_granularity", None) == "selective"
        and getattr(args, "add_bias_linear", True)
        and not (getattr(args, "fp8", None) or getattr(args, "fp4", None))
    )


_Given = tuple[str, str, str] | tuple[str, str, str, Decides]
"""One or several destinations, why, remedy, and optionally what decides."""


def _since(version: str, *given: _Given) -> Iterator[Row]:
    for names, why, remedy, *decides in given:
        for name in names.split():
            yield name, why, version, remedy, decides[0] if decides else None


_16 = _since(
    "core_v0.16.1",
    ("fp8_recipe",
     "Delayed scaling, which --fp8-format has without this flag, goes by a history of what each rank has seen, which "
     "Transformer Engine keeps in each module (extra_state). That history would have to move with its layer, and "
     "holders would have to agree on it.",
     "Use tensorwise, blockwise or mxfp8.",
     lambda value, args: getattr(args, "fp8", None) is not None and value not in STATELESS),
    ("fp8_quantizer_factory", "Odyssey cannot see whether a custom function keeps state from step to step.",
     "Use one of the recipes.", _not_none),
    ("te_precision_config_file kitchen_config_file kitchen_recipe_number",
     "The file may give a layer a recipe whose scales would not move with the layer, and Odyssey does not read it.",
     "Use --bf16 alone, or --fp8-format.", _not_none),
    ("symmetric_ar_type", "Its buffers belong to the ranks that the job started with, and a recovery would have to "
     "make new ones.", _LEAVE_OUT),
    ("batch_invariant_mode", "It replaces torch's matrix products by kernels whose weight gradients would have to "
     "run apart, and these kernels need a GPU to be tried.", _LEAVE_OUT),
    ("fp32_residual_connection", "Messages between stages have the type of the parameters.", _LEAVE_OUT),
    ("distribute_saved_activations", "It splits what a layer saves for the backward over tensor-parallel ranks, and "
     "plans count memory without that.", "Use --sequence-parallel, which does the same for all activations."),
    ("hybrid_context_parallel", "It changes the groups of context-parallel ranks from sample to sample, and a cell "
     "has the same groups for all samples.", "Use --context-parallel-size."),
    ("pipeline_model_parallel_size",
     "With Odyssey each stage has at least one transformer layer; in Megatron a stage may have the embedding or the "
     "head alone.",
     "Use at most as many stages as layers.", _more_stages_than_layers),
    ("expert_tensor_parallel_size",
     "Without expert parallelism Megatron does not sum the gradients of experts over all ranks that have them.",
     "Use the size of tensor parallelism, or --expert-model-parallel-size above 1.",
     lambda value, args: bool(getattr(args, "num_experts", None))
     and getattr(args, "expert_model_parallel_size", None) in (None, 1)
     and _unlike("tensor_model_parallel_size")(value, args)),
    ("moe_router_load_balancing_type",
     "The loss of a microbatch would depend on which others ran before it, and where.",
     "Use aux_loss, seq_aux_loss, sinkhorn or none.", _any_but("aux_loss", "seq_aux_loss", "sinkhorn", "none")),
    ("moe_use_upcycling", "It builds a dense model first, and saves a checkpoint before it trains.",
     "Do that once without --odyssey, and go on from that checkpoint."),
    ("moe_enable_routing_replay", "It replays the choices of routers in the order in which microbatches run, and a "
     "recovery changes that order.",
     _LEAVE_OUT),
    ("moe_latent_size", "Only Transformer Engine has its projections, so it needs a GPU to be tried.",
     _LEAVE_OUT),
    ("mtp_standalone", "With Odyssey the blocks of multi-token prediction are part of the head, and have no stage of "
     "their own.", _LEAVE_OUT),
    ("pipeline_model_parallel_layout",
     "With Odyssey the blocks of multi-token prediction (m) are part of the head, and go with the loss (L).",
     "Put m into the chunk of L.", _mtp_apart_from_loss),
    ("position_embedding_type", "Relative positions need a table in the first layer of each stage, and mrope is for "
     "multimodal models.", "Use rope, yarn, learned_absolute or none.",
     _none_of("rope", "yarn", "learned_absolute", "none")),
    ("hybrid_override_pattern",
     f"Of hybrid patterns only the layers {', '.join(_KINDS)} and ends of stages (|) have been tried, and neither "
     "multi-token prediction (/) nor other layers.", f"Use these, with --spec {_STACKS}.", _no_known_pattern),
    ("hybrid_override_pattern", _NO_SPEC, f"Use --spec {_STACKS}.", _known_pattern_without_spec),
    ("is_hybrid_model", _NO_SPEC,
     f"Use --spec {_STACKS}.",
     lambda value, args: bool(value) and not is_hybrid(args)),
    ("linear_attention_freq experimental_attention_variant",
     "Gated delta nets and sparse attention have other parts and costs than attention, and kernels that need a GPU "
     "to be tried.", "Use attention, or a hybrid pattern."),
    ("spec", "Only the specs of Megatron's own hybrid models have been tried.",
     f"Use {_STACKS}, or leave it out.", lambda value, args: value is not None and not is_hybrid(args)),
    ("qk_clip", "It clips by the largest logits of one rank's layers, after the optimizer's step.", _LEAVE_OUT),
    ("export_kd_cfg export_kd_teacher_load export_quant_cfg export_offline_model export_te_mcore_model "
     "export_legacy_megatron modelopt_enabled enable_gpt_oss",
     "Model Optimizer changes the model after its stages are built, or builds a teacher beside it.", _LEAVE_OUT),
    ("use_megatron_fsdp use_torch_fsdp2",
     "It splits weights over ranks itself. Odyssey holds and moves whole layers, and splits only their optimizer "
     "state.", "Use --use-distributed-optimizer."),
    ("cpu_offloading_num_layers fine_grained_activation_offloading",
     "An interrupted step finds and counts what it has kept of a microbatch on the device only.", "Use recomputation."),
    ("optimizer_cpu_offload", "Odyssey moves a layer's optimizer state itself, from where it has put it.",
     "Use --odyssey-spare-state host, which keeps the second copy there."),
    ("optimizer", "A holder must be able to step a layer by its gradients alone, which has been tried with adam, sgd "
     "and muon only.",
     "Use adam, sgd or muon.", _none_of("adam", "sgd", *MUON)),
    ("muon_tp_mode", "The ranks of a cell would exchange messages in the middle of an update.", "Use blockwise.",
     lambda value, args: with_muon(args) and value not in (None, "blockwise")
     and _above_one(getattr(args, "tensor_model_parallel_size", None), args)),
    ("main_params_dtype", "This type has a scale for each tensor, which would not move with its layer.", "Use fp32.",
     _in_16_bits_or_fewer),
    ("exp_avg_dtype exp_avg_sq_dtype", "This type has a scale for each tensor, which would not move with its layer.",
     "Use fp32 or bf16.", _in_16_bits_or_fewer),
    ("dump_param_to_param_group_map", "The file would have the layers of one rank only.", _LEAVE_OUT),
    ("check_for_large_grads", "It checks Megatron's own reduction of gradients, which Odyssey's takes the place of.",
     _LEAVE_OUT),
    ("result_rejected_tracker_filename check_for_spiky_loss",
     "It belongs to Megatron's repeated steps, and Odyssey repeats a step after a failure only.", _LEAVE_OUT),
    ("decrease_batch_size_if_needed", "The plan is made for the largest batch, and smaller batches run a part of it.",
     "Give batch sizes that all replicas can share.",
     lambda value, args: bool(value) and bool(
         getattr(args, "rampup_batch_size", None) or getattr(args, "step_batch_size_schedule", None))),
    ("dataloader_type", "Odyssey finds each sample by its global number, wherever it is computed.",
     "Use single or cyclic.", _none_of("single", "cyclic")),
    ("non_persistent_ckpt_type", "A local checkpoint has the layers of one rank, and layers move between ranks.",
     "Use global.", lambda value, args: value == "local"),
    ("dist_ckpt_save_pre_mcore_014", "Odyssey saves in the format of the version that runs.", _LEAVE_OUT),
    ("load_main_params_from_ckpt", "A checkpoint without optimizer state is read into the model's type first.",
     "Leave it out, or load the optimizer's state as well."),
    ("use_mp_args_from_checkpoint_args", "Odyssey plans the job by its flags, before it opens a checkpoint.",
     "Give the parallel sizes by flags."),
    ("distributed_timeout_seconds_after_init", "It sets the limit of groups that Odyssey makes anew in each "
     "generation.",
     "Use --distributed-timeout-minutes, or --odyssey-op-timeout-s."),
    ("sft", "Packed sequences have not been tried with hybrid models. Samples of --sft cannot be put into larger "
     "microbatches, and have no masks.",
     "Use GPT models, --micro-batch-size 1, and --no-create-attention-mask-in-dataloader.",
     lambda value, args: bool(value) and (
         _packed_with_others(value, args) or _above_one(getattr(args, "micro_batch_size", None), args)
         or getattr(args, "create_attention_mask_in_dataloader", True))),
    ("save_wgrads_interval save_dgrads_interval", "The files would have the gradients of one rank's layers only, in "
     "the order of its schedule.", _LEAVE_OUT),
    ("log_energy log_straggler run_workload_inspector_server", "It compares GPUs over Megatron's own groups, and "
     "Odyssey makes new groups after a failure.",
     "Leave it out; odyssey top names slow ranks."),
)  # fmt: skip
_TE = _since(
    "core_v0.16.1 with Transformer Engine 2.7",
    ("fp4", "Each rank rounds weights in fp4 by random numbers of its own, so holders of a layer would differ.",
     "Use --bf16, or --fp8-format with tensorwise, blockwise or mxfp8.", _not_none),
)  # fmt: skip
_17 = _since(
    "core_v0.17.1",
    ("mla_down_proj_fusion fused_residual_rmsnorm",
     "It fuses modules of Transformer Engine whose weight gradients would have to run apart, and needs a GPU to be "
     "tried.", _LEAVE_OUT),
    ("moe_router_force_biased", "Below 0 each rank draws its random numbers once; above 0 each tensor-parallel rank "
     "draws others.", "Use --moe-router-force-load-balancing.", _not_none),
    ("mtp_use_repeated_layer", "Odyssey would count a block that runs several times for a microbatch as run once.",
     _LEAVE_OUT),
    ("hybrid_layer_pattern",
     f"Of hybrid patterns only the layers {', '.join(_KINDS)} and ends of stages (|) have been tried, and neither "
     "multi-token prediction (/) nor other layers.", f"Use these, with --spec {_STACKS}.", _no_known_pattern),
    ("hybrid_layer_pattern", _NO_SPEC, f"Use --spec {_STACKS}.", _known_pattern_without_spec),
    ("mtp_hybrid_override_pattern", "Multi-token prediction has been tried with blocks of attention only.", _LEAVE_OUT),
    ("muon_scalar_optimizer", "For parameters that Muon does not step, only Adam has been tried.", "Use adam.",
     lambda value, args: with_muon(args) and value not in (None, "adam")),
    ("ddp_param_name_patterns_for_fp32_local_accumulation",
     "The gradients of a layer are one piece of memory, of one type.", "Use --accumulate-allreduce-grads-in-fp32."),
    ("ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group",
     "Odyssey shares out what to write over the holders of each layer.", "Use dp.", _none_of("dp")),
)  # fmt: skip
_18 = _since(
    "core_v0.18.2",
    ("fp8_output_proj", "It makes the head's product a module of Transformer Engine whose weight gradient would have "
     "to run apart, and needs a GPU to be tried.", _LEAVE_OUT),
    ("use_grouped_gemm_for_dense_mlp moe_single_grouped_weight moe_single_grouped_bias moe_mlp_glu_interleave_size",
     "It uses fused kernels of Transformer Engine for Blackwell, and needs such a GPU to be tried.", _LEAVE_OUT),
    ("moe_paged_stash moe_expert_rank_capacity_factor",
     "Its buffers belong to the ranks that the job started with, and Megatron repeats steps that overflow them.",
     _LEAVE_OUT),
    ("save_tokens_per_expert_interval save_params_interval save_activations_interval",
     "The files would have the layers of one rank only.", _LEAVE_OUT),
    ("eval_micro_batch_size", "Odyssey evaluates in microbatches of the training size, in which experts with a "
     "capacity drop other tokens.",
     "Use the size of training.",
     lambda value, args: _unlike("micro_batch_size")(value, args)
     and getattr(args, "moe_expert_capacity_factor", None) is not None),
    ("gpu_sniff_test_interval", "It compares GPUs over Megatron's own groups, and Odyssey makes new groups after a "
     "failure.",
     "Leave it out; odyssey top names slow ranks."),
)  # fmt: skip
_19 = _since(
    "core_v0.19.0",
    ("moe_shared_expert_glu_interleave_size use_grouped_gemm_for_shared_expert",
     "It uses fused kernels of Transformer Engine for Blackwell, and needs such a GPU to be tried.", _LEAVE_OUT),
    ("expert_tensor_parallel_num_weight_shards",
     "It spreads weights over more ranks than compute with them, by groups that Odyssey does not make.",
     "Use the size of tensor parallelism.",
     _more_shards_than("expert_tensor_parallel_size", "tensor_model_parallel_size")),
    ("tensor_parallel_num_weight_shards",
     "It spreads weights over more ranks than compute with them, by groups that Odyssey does not make.",
     "Use the size of tensor parallelism.",
     _more_shards_than("tensor_model_parallel_size")),
    ("moe_routing_trace_path", "The file would have the layers of one rank only.", _LEAVE_OUT),
    ("mtp_detach_heads", "It clips the gradients of these blocks by a norm of their own, and the agreement on a step "
     "carries one norm.", _LEAVE_OUT),
    ("logits_save_dir logits_load_dir",
     "Its hooks sit on the last part of the model of one rank, which a recovery may build elsewhere.", _LEAVE_OUT),
    ("dataloader_inter_document_masking", "Packed sequences have not been tried with hybrid models.", _LEAVE_OUT,
     _packed_with_others),
    ("override_ckpt_iteration", "Odyssey finds the samples of a step by the step's number, which the checkpoint has.",
     "Use --finetune, or --iterations-to-skip.", _not_none),
)  # fmt: skip
_NEVER = _since(
    "",
    ("yaml_cfg", "Odyssey does not read the file, whose values would take the place of the flags.",
     "Give the model by flags."),
    ("recompute_modules", "With mlp among them and biases in linear layers Megatron-LM's own backward never ends: "
     "the last bias is part of what is recomputed, and its gradient leads back to the recomputation.",
     "Leave mlp out of it, or use --disable-bias-linear.", _mlp_with_biases),
    ("config_logger_dir", "Megatron-LM's own writer of configurations ends the job when the model is built, as it "
     "cannot copy the process groups that are among them.", _LEAVE_OUT),
    ("use_kitchen_attention", "It needs a package that NVIDIA does not publish.", _LEAVE_OUT),
    ("adlr_autoresume", "It needs a package that NVIDIA does not publish.",
     "Use --exit-signal-handler, or --exit-duration-in-mins."),
    ("moe_use_legacy_grouped_gemm use_legacy_models",
     "Later versions of Megatron-LM do not have it any more.", "Leave it out, and use what has replaced it there."),
    ("moe_grouped_gemm", "With --transformer-impl local core_v0.16.1 keeps all experts of a rank in one tensor, "
     "which cannot be dealt out to other ranks. Later versions ignore the flag there, and it is not refused.",
     "Leave it out, or use Transformer Engine's layers.",
     lambda value, args: bool(value) and getattr(args, "transformer_impl", None) == "local"),
    ("pad_vocab_size", "Without --padded-vocab-size Megatron-LM does not know how many words the embedding has, and "
     "ends, too.", "Leave it out, or give --padded-vocab-size.", _words_unknown),
    ("init_model_with_meta_device", "It is for FSDP. Without that, weights stay uninitialized until a checkpoint is "
     "read, and so would a layer that a recovery builds.", _LEAVE_OUT),
    ("freeze_all_layers skip_train", "The job trains nothing, so there is nothing to recover.",
     "Leave out --odyssey."),
    ("perform_initialization", "The holders of a layer would begin with different weights.", _LEAVE_OUT,
     lambda value, args: value is False),
    ("lazy_mpu_init", "It leaves the process groups to a program around Megatron-LM, and Odyssey makes them itself.",
     _LEAVE_OUT),
    ("use_precision_aware_optimizer", "As in Megatron-LM, it needs --optimizer adam and --use-distributed-optimizer.",
     "Use these, or leave it out.",
     lambda value, args: bool(value) and not (
         getattr(args, "optimizer", "adam") == "adam" and getattr(args, "use_distributed_optimizer", False))),
    ("ckpt_convert_format", "A job that converts a checkpoint does not train.", "Convert without --odyssey."),
    ("inprocess_restart", "It restarts the processes that Odyssey keeps alive.", _LEAVE_OUT),
    ("enable_ft_package", "Odyssey notices failures itself.", _LEAVE_OUT),
    ("fault_injector_ranks fault_injector_num_ranks", "Odyssey injects faults itself.",
     "Use --odyssey-inject, or odyssey inject."),
    ("fake_process_group", "Its ranks are not real processes, so there is nothing to recover.", "Leave out --odyssey."),
    ("perform_rl_step", "Reinforcement learning has a training loop of its own, with inference in it.",
     "Leave out --odyssey."),
)  # fmt: skip
ROWS = (*_16, *_TE, *_17, *_18, *_19, *_NEVER)
SAID = {
    "fp4": "--fp4-format",
    "pad_vocab_size": "--no-pad-vocab-size",
    "perform_initialization": "--no-initialization",
    "non_persistent_ckpt_type": "--non-persistent-ckpt-type local",
}
"""Destination -> the flag, where the two differ."""
ONLY_IN = {"moe_grouped_gemm": "0.16."}
"""Destination -> how the versions begin in which it is refused, if it does no harm in others."""
SCRIPTS = {
    "pretrain_bert.py": "BERT, whose head is none of a language model's",
    "pretrain_ict.py": "two encoders, whose loss is of all samples of a batch together",
    "pretrain_retro.py": "a decoder with an encoder of what is retrieved beside it",
    "pretrain_t5.py": "an encoder and a decoder",
    "pretrain_vision_classify.py": "a model of images",
    "pretrain_vision_dino.py": "a model of images",
    "pretrain_vision_inpaint.py": "a model of images",
    "pretrain_vlm.py": "a model of images beside a language model",
    "train_rl.py": "in a loop with inference in it",
}
"""Megatron-LM's scripts that train something else than a GPT or a hybrid model, and what they train."""
TRIED = "pretrain_gpt.py", "pretrain_mamba.py", "pretrain_hybrid.py"
