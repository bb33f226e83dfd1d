"""For each refused flag of Megatron-LM's: why, from which version on it could work, and what to do instead.

Flags are grouped by the first version that has what they would need; from that version on only Odyssey's own work is
missing. What Odyssey does itself, or what leaves nothing to recover, is refused for good. Needs neither torch nor
megatron.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from odyssey_megatron.upstream.flags import MUON

STATELESS = "tensorwise", "blockwise", "mxfp8"
"""The fp8 recipes that scale a tensor by its contents alone, and keep nothing for the next one."""
_SCALED = "fp16", "torch.float16", "fp8", "torch.uint8"
"""Types with scales, as flags, and as Megatron's validation leaves them."""
_LEAVE_OUT = "Leave it out."
_KINDS = "M*-E"
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
    return value is not None and not (is_hybrid(args) and {*str(value)} <= {*_KINDS, "|"})


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


def _more_stages_than_layers(value: Any, args: Any) -> bool:
    return _number(value, 1) > _number(getattr(args, "num_layers", None), math.inf)


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
     "Delayed scaling goes by what each rank has seen before, a history that Transformer Engine keeps in each module "
     "(extra_state) and that would have to move, and to be agreed on, with its layer.",
     "Use tensorwise, blockwise or mxfp8.",
     lambda value, args: getattr(args, "fp8", None) is not None and value not in STATELESS),
    ("fp8_quantizer_factory", "Whether a function of one's own keeps something from step to step cannot be seen.",
     "Use one of the recipes.", _not_none),
    ("te_precision_config_file kitchen_config_file kitchen_recipe_number",
     "A layer's recipe, by its name, may be one whose scales would not move with the layer; the file is not looked at.",
     "Use --bf16 alone, or --fp8-format.", _not_none),
    ("symmetric_ar_type", "Its buffers belong to the ranks that the job started with: they would have to be made anew "
     "in a recovery.", _LEAVE_OUT),
    ("batch_invariant_mode", "It replaces torch's products by kernels of its own, whose weight gradients would have to "
     "run apart; these kernels need a GPU to be tried.", _LEAVE_OUT),
    ("fp32_residual_connection", "Messages between stages have the type of the parameters.", _LEAVE_OUT),
    ("distribute_saved_activations", "What a layer keeps would be cut over tensor-parallel ranks, and memory is "
     "planned for without.", "Use --sequence-parallel, which does the same for all activations."),
    ("hybrid_context_parallel", "Its groups of context-parallel ranks change from sample to sample; a cell's are the "
     "same for all.", "Use --context-parallel-size."),
    ("pipeline_model_parallel_size",
     "Each stage has at least one transformer layer, where Megatron's may have the embedding or the head alone.",
     "Use at most as many stages as layers.", _more_stages_than_layers),
    ("expert_tensor_parallel_size",
     "Without expert parallelism Megatron does not sum the gradients of experts over all who have them then.",
     "Use that of tensor parallelism, or --expert-model-parallel-size above 1.",
     lambda value, args: bool(getattr(args, "num_experts", None))
     and getattr(args, "expert_model_parallel_size", None) in (None, 1)
     and _unlike("tensor_model_parallel_size")(value, args)),
    ("moe_router_load_balancing_type",
     "The loss of a microbatch would depend on which others ran before it, and where.",
     "Use aux_loss, seq_aux_loss, sinkhorn or none.", _any_but("aux_loss", "seq_aux_loss", "sinkhorn", "none")),
    ("moe_use_upcycling", "It builds a dense model besides, and saves before it trains.",
     "Do that once without --odyssey, and go on from what it has saved."),
    ("moe_enable_routing_replay", "It replays what routers chose elsewhere, by the order in which microbatches run.",
     _LEAVE_OUT),
    ("moe_latent_size", "Its projections are Transformer Engine's alone, so that it needs a GPU to be tried.",
     _LEAVE_OUT),
    ("mtp_standalone", "Its blocks are part of the head, and have no stage of their own.", _LEAVE_OUT),
    ("position_embedding_type", "Tables of relative positions belong to the first layer of a stage, and mrope to "
     "multimodal models.", "Use rope, yarn, learned_absolute or none.",
     _none_of("rope", "yarn", "learned_absolute", "none")),
    ("hybrid_override_pattern",
     f"Of a hybrid pattern the layers {', '.join(_KINDS)} have been tried, and ends of stages (|); no multi-token "
     "prediction (/), and no layers of other kinds.", f"Use these, with --spec {_STACKS}.", _no_known_pattern),
    ("is_hybrid_model", "Hybrid models are given with --spec, one of Megatron's own.", f"Use --spec {_STACKS}.",
     lambda value, args: bool(value) and not is_hybrid(args)),
    ("linear_attention_freq experimental_attention_variant",
     "Gated delta nets and sparse attention keep other parts and costs than attention does, and want kernels that need "
     "a GPU to be tried.", "Use attention, or a hybrid pattern."),
    ("spec", "Of layers that it names those of Megatron's own hybrid models have been tried.",
     f"Use {_STACKS}, or leave it out.", lambda value, args: value is not None and not is_hybrid(args)),
    ("qk_clip", "It goes by the largest logits of one rank's layers, behind the optimizer's step.", _LEAVE_OUT),
    ("export_kd_cfg export_kd_teacher_load export_quant_cfg export_offline_model export_te_mcore_model "
     "export_legacy_megatron modelopt_enabled enable_gpt_oss",
     "Model Optimizer changes the model behind its stages, or builds a teacher beside it.", _LEAVE_OUT),
    ("use_megatron_fsdp use_torch_fsdp2",
     "It cuts weights over ranks by itself. Odyssey's unit of what is held and moved is a layer, of which only the "
     "optimizer's state is cut.", "Use --use-distributed-optimizer."),
    ("cpu_offloading_num_layers fine_grained_activation_offloading",
     "What an interrupted step keeps of a microbatch is told, and counted, on the device.", "Use recomputation."),
    ("optimizer_cpu_offload", "Odyssey moves a layer's optimizer state from where it put it.",
     "Use --odyssey-spare-state host, which keeps the second copy there."),
    ("optimizer", "A holder must be able to step a layer by its gradients alone, and that has been tried with these.",
     "Use adam, sgd or muon.", _none_of("adam", "sgd", *MUON)),
    ("muon_tp_mode", "The ranks of a cell would exchange messages in the middle of an update.", "Use blockwise.",
     lambda value, args: with_muon(args) and value not in (None, "blockwise")
     and _above_one(getattr(args, "tensor_model_parallel_size", None), args)),
    ("main_params_dtype", "Its scales, one for each tensor, would not move with a layer.", "Use fp32.",
     _in_16_bits_or_fewer),
    ("exp_avg_dtype exp_avg_sq_dtype", "Its scales, one for each tensor, would not move with a layer.",
     "Use fp32 or bf16.", _in_16_bits_or_fewer),
    ("dump_param_to_param_group_map", "It would be that of one rank's layers.", _LEAVE_OUT),
    ("check_for_large_grads", "Its check is of Megatron's own reduction.", _LEAVE_OUT),
    ("result_rejected_tracker_filename check_for_spiky_loss",
     "It is of Megatron's repeated steps; Odyssey repeats a step after a failure only.", _LEAVE_OUT),
    ("decrease_batch_size_if_needed", "The plan is that of the largest batch, which smaller ones have a share of.",
     "Give sizes that all replicas can share where they grow.",
     lambda value, args: bool(value) and bool(
         getattr(args, "rampup_batch_size", None) or getattr(args, "step_batch_size_schedule", None))),
    ("dataloader_type", "Samples are found by their global number, wherever they are computed.",
     "Use single or cyclic.", _none_of("single", "cyclic")),
    ("non_persistent_ckpt_type", "A local checkpoint has what one rank holds, and layers move between ranks.",
     "Use global.", lambda value, args: value == "local"),
    ("dist_ckpt_save_pre_mcore_014", "What is saved is in the format of the version that runs.", _LEAVE_OUT),
    ("load_main_params_from_ckpt", "A checkpoint without optimizer state is read into the model's type first.",
     "Leave it out, or load the optimizer's state, too."),
    ("use_mp_args_from_checkpoint_args", "The job is planned by its flags, before a checkpoint is opened.",
     "Give the sizes of the job by flags."),
    ("distributed_timeout_seconds_after_init", "The groups whose limit it sets are Odyssey's, anew in each generation.",
     "Use --distributed-timeout-minutes, or --odyssey-op-timeout-s."),
    ("sft", "Packed sequences are not tried with hybrid models; its samples do not make larger batches, and have no "
     "masks.", "Use GPT models, --micro-batch-size 1, and --no-create-attention-mask-in-dataloader.",
     lambda value, args: bool(value) and (
         _packed_with_others(value, args) or _above_one(getattr(args, "micro_batch_size", None), args)
         or getattr(args, "create_attention_mask_in_dataloader", True))),
    ("save_wgrads_interval save_dgrads_interval", "They would be those of one rank's layers, in the order in which its "
     "schedule makes them.", _LEAVE_OUT),
    ("log_energy log_straggler run_workload_inspector_server", "It compares GPUs over groups that Odyssey makes anew.",
     "Leave it out; odyssey top names slow ranks."),
)  # fmt: skip
_TE = _since(
    "core_v0.16.1 with Transformer Engine 2.7",
    ("fp4", "Weights in fp4 are rounded by numbers that each rank draws by itself; with --bf16 alone a layer moves as "
     "it is.", "Use --bf16, or --fp8-format with tensorwise, blockwise or mxfp8.", _not_none),
)  # fmt: skip
_17 = _since(
    "core_v0.17.1",
    ("mla_down_proj_fusion fused_residual_rmsnorm",
     "It fuses modules of Transformer Engine, whose weight gradients would have to run apart; it needs a GPU to be "
     "tried.", _LEAVE_OUT),
    ("moe_router_force_biased", "Below 0 it draws its numbers once, on each rank; above, others on each "
     "tensor-parallel rank.", "Use --moe-router-force-load-balancing.", _not_none),
    ("mtp_use_repeated_layer", "What a block does several times for a microbatch would be counted as done once.",
     _LEAVE_OUT),
    ("hybrid_layer_pattern",
     f"Of a hybrid pattern the layers {', '.join(_KINDS)} have been tried, and ends of stages (|); no multi-token "
     "prediction (/), and no layers of other kinds.", f"Use these, with --spec {_STACKS}.", _no_known_pattern),
    ("mtp_hybrid_override_pattern", "Multi-token prediction has been tried with blocks of attention.", _LEAVE_OUT),
    ("muon_scalar_optimizer", "What Muon does not step has been tried with Adam.", "Use adam.",
     lambda value, args: with_muon(args) and value not in (None, "adam")),
    ("ddp_param_name_patterns_for_fp32_local_accumulation",
     "A layer's gradients are one piece of memory, of one type.", "Use --accumulate-allreduce-grads-in-fp32."),
    ("ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group",
     "Who writes what is shared out over the holders of each layer.", "Use dp.", _none_of("dp")),
)  # fmt: skip
_18 = _since(
    "core_v0.18.2",
    ("fp8_output_proj", "The head's product would be a module of Transformer Engine, whose weight gradient would have "
     "to run apart; it needs a GPU to be tried.", _LEAVE_OUT),
    ("use_grouped_gemm_for_dense_mlp moe_single_grouped_weight moe_single_grouped_bias moe_mlp_glu_interleave_size",
     "It is for fused kernels of Transformer Engine for Blackwell, and needs such a GPU to be tried.", _LEAVE_OUT),
    ("moe_paged_stash moe_expert_rank_capacity_factor",
     "Its buffers belong to the ranks that the job started with, and it repeats steps that overflow them by itself.",
     _LEAVE_OUT),
    ("save_tokens_per_expert_interval save_params_interval save_activations_interval",
     "They would be those of one rank's layers.", _LEAVE_OUT),
    ("eval_micro_batch_size", "Evaluations run in microbatches of training's size, in which experts drop other tokens.",
     "Use that of training.",
     lambda value, args: _unlike("micro_batch_size")(value, args)
     and getattr(args, "moe_expert_capacity_factor", None) is not None),
    ("gpu_sniff_test_interval", "It compares GPUs over groups that Odyssey makes anew.",
     "Leave it out; odyssey top names slow ranks."),
)  # fmt: skip
_19 = _since(
    "core_v0.19.0",
    ("moe_shared_expert_glu_interleave_size use_grouped_gemm_for_shared_expert",
     "It is for fused kernels of Transformer Engine for Blackwell, and needs such a GPU to be tried.", _LEAVE_OUT),
    ("expert_tensor_parallel_num_weight_shards",
     "It spreads weights over more ranks than compute with them, by groups that Odyssey does not make.",
     "Use that of tensor parallelism.",
     _more_shards_than("expert_tensor_parallel_size", "tensor_model_parallel_size")),
    ("tensor_parallel_num_weight_shards",
     "It spreads weights over more ranks than compute with them, by groups that Odyssey does not make.",
     "Use that of tensor parallelism.",
     _more_shards_than("tensor_model_parallel_size")),
    ("moe_routing_trace_path", "It would be that of one rank's layers.", _LEAVE_OUT),
    ("mtp_detach_heads", "Gradients of these blocks are clipped by a norm of their own, and the agreement on a step "
     "has one.", _LEAVE_OUT),
    ("logits_save_dir logits_load_dir",
     "Its hooks are on one rank's last part of the model, which a recovery builds anew elsewhere.", _LEAVE_OUT),
    ("dataloader_inter_document_masking", "Packed sequences are not tried with hybrid models.", _LEAVE_OUT,
     _packed_with_others),
    ("override_ckpt_iteration", "The samples of a step are found by its number, which a checkpoint names.",
     "Use --finetune, or --iterations-to-skip.", _not_none),
)  # fmt: skip
_NEVER = _since(
    "",
    ("yaml_cfg", "The values in the file are not looked at, and would take the place of the flags.",
     "Give the model by flags."),
    ("recompute_modules", "With mlp among them and biases in linear layers Megatron-LM's backward never ends: the last "
     "bias is part of what is computed again, and leads back to that.",
     "Leave mlp out of it, or use --disable-bias-linear.", _mlp_with_biases),
    ("use_kitchen_attention", "It is in a package of NVIDIA's that cannot be had.", _LEAVE_OUT),
    ("adlr_autoresume", "It is in a package of NVIDIA's that cannot be had.",
     "Use --exit-signal-handler, or --exit-duration-in-mins."),
    ("moe_use_legacy_grouped_gemm use_legacy_models",
     "Later versions of Megatron-LM have it no more.", "Leave it out, and use what has taken its place there."),
    ("moe_grouped_gemm", "With --transformer-impl local core_v0.16.1 keeps the experts of a rank as one tensor, which "
     "cannot be dealt out to others; later versions take no notice of it there.",
     "Leave it out, or use Transformer Engine's layers.",
     lambda value, args: bool(value) and getattr(args, "transformer_impl", None) == "local"),
    ("init_model_with_meta_device", "It is for FSDP: else weights would stay undrawn until a checkpoint is read, and a "
     "layer that is built in a recovery would have none.", _LEAVE_OUT),
    ("freeze_all_layers skip_train", "Nothing is trained, so that there is nothing to recover.",
     "Leave out --odyssey."),
    ("perform_initialization", "Holders of a layer would begin with different weights.", _LEAVE_OUT,
     lambda value, args: value is False),
    ("lazy_mpu_init", "It leaves the groups to a program around Megatron-LM; they are Odyssey's.", _LEAVE_OUT),
    ("use_precision_aware_optimizer", "As in Megatron-LM it is for --optimizer adam with --use-distributed-optimizer.",
     "Use these, or leave it out.",
     lambda value, args: bool(value) and not (
         getattr(args, "optimizer", "adam") == "adam" and getattr(args, "use_distributed_optimizer", False))),
    ("ckpt_convert_format", "A job that converts a checkpoint does not train.", "Convert without --odyssey."),
    ("inprocess_restart", "It restarts what Odyssey keeps alive.", _LEAVE_OUT),
    ("enable_ft_package", "Odyssey notices failures itself.", _LEAVE_OUT),
    ("fault_injector_ranks fault_injector_num_ranks", "Odyssey puts faults into a job itself.",
     "Use --odyssey-inject, or odyssey inject."),
    ("fake_process_group", "Its ranks are none, so that there is nothing to recover.", "Leave out --odyssey."),
    ("perform_rl_step", "The loop of reinforcement learning is another one, with inference in it.",
     "Leave out --odyssey."),
)  # fmt: skip
ROWS = (*_16, *_TE, *_17, *_18, *_19, *_NEVER)
SAID = {
    "fp4": "--fp4-format",
    "perform_initialization": "--no-initialization",
    "non_persistent_ckpt_type": "--non-persistent-ckpt-type local",
}
"""Destination -> the flag, where the two differ."""
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
