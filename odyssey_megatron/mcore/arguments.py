"""Megatron-LM's flags: which cannot work under failure yet, and what becomes of those that Odyssey takes over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.plugin import estimate
from odyssey_megatron.policy.profile import Profile, load_profile


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


_LEAVE_OUT = "Leave it out."
REFUSALS = tuple(
    Refusal(flag=flag, given=given, remedy=remedy)
    for flag, given, remedy in (
        ("--yaml-cfg", _set("yaml_cfg"), "Give the model by flags."),
        ("--fp16", _set("fp16"), "Its loss scale would have to be agreed on over generations. Use --bf16."),
        ("--sequence-parallel", _set("sequence_parallel"),
         "Its norms' gradients would have to be summed over a cell. Leave it out; tensor parallelism works without."),
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
        ("--use-megatron-fsdp", _set("use_megatron_fsdp"), _LEAVE_OUT),
        ("--use-torch-fsdp2", _set("use_torch_fsdp2"), _LEAVE_OUT),
        ("--use-legacy-models", _set("use_legacy_models"), _LEAVE_OUT),
        ("--cuda-graph-impl", lambda args: getattr(args, "cuda_graph_impl", "none") not in (None, "none"), _LEAVE_OUT),
        ("--rampup-batch-size", _set("rampup_batch_size"),
         "The plan is made for one global batch size. Start with the full batch."),
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
        ("--inprocess-restart", _set("inprocess_restart"), "It restarts what Odyssey keeps alive. Leave it out."),
        ("--enable-ft-package", _set("enable_ft_package"), "Odyssey notices failures itself. Leave it out."),
        ("--skip-train", _set("skip_train"), "An evaluation alone has nothing to recover. Leave out --odyssey."),
        ("--perform-rl-step", _set("perform_rl_step"), "Leave out --odyssey."),
        ("--sft", _set("sft"), "Leave out --odyssey."),
        ("--check-weight-hash-across-dp-replicas-interval", _set("check_weight_hash_across_dp_replicas_interval"),
         "The journal has a digest of each layer on each holder at the end. Leave it out."),
        ("--save-wgrads-interval", _set("save_wgrads_interval"), _LEAVE_OUT),
        ("--save-dgrads-interval", _set("save_dgrads_interval"), _LEAVE_OUT),
        ("--log-progress", _set("log_progress"),
         "Megatron stops at a checkpoint if the number of ranks has changed. Leave it out; the journal has the times."),
        ("--log-params-norm", _set("log_params_norm"), "It would be that of one rank's layers. Leave it out."),
        ("--log-num-zeros-in-grad", _set("log_num_zeros_in_grad"), "It would be that of one rank's layers. Leave it "
         "out."),
        ("--optimizer", lambda args: args.optimizer not in ("adam", "sgd"), "Use adam or sgd."),
    )
)  # fmt: skip
"""The README's table is made of these."""


def check_early() -> None:
    """:func:`check` before Megatron does anything with its arguments. Raises ConfigError."""
    from megatron.training.arguments import parse_args

    args = parse_args(ignore_unknown_args=True)
    # If a checkpoint has the last word, it is read later.
    if not getattr(args, "use_checkpoint_args", False):
        check(args)


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


def optimizer_copies(args: Any) -> int:
    """On how many ranks each layer's optimizer state is; 0: on all that hold the layer."""
    # With --use-distributed-optimizer two: one is lost with its rank, the other goes on.
    return 2 if args.use_distributed_optimizer else 0


def job_of(args: Any, config: OdysseyConfig, *, optimizer_copies: int) -> JobSpec:
    """What the coordinator plans for."""
    return JobSpec(
        num_layers=args.num_layers + 2,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        num_microbatches=args.global_batch_size // args.micro_batch_size,
        tokens_per_step=args.global_batch_size * args.seq_length,
        train_steps=args.train_iters,
        least_holders=config.least_holders,
        optimizer_copies=optimizer_copies,
    )


def profile_of(args: Any, transformer_config: Any, config: OdysseyConfig) -> Profile:
    """What a step is expected to cost, until the job has measured itself. Raises ConfigError."""
    if config.profile:
        return load_profile(config.profile)
    return estimate(
        transformer_config,
        config,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        vocab_size=args.padded_vocab_size,
        tensor_parallel_size=args.tensor_model_parallel_size,
    )


def adapt(args: Any, config: OdysseyConfig) -> None:
    """What Odyssey does in Megatron's place is switched off there; Megatron has validated ``args``."""
    # Layers, not slices of buffers, are shared out (``Layout.keepers``), each to two holders.
    args.use_distributed_optimizer = args.overlap_param_gather = False
    # Reductions are instructions of the schedule.
    args.overlap_grad_reduce = args.align_grad_reduce = False
    args.overlap_p2p_comm = args.batch_p2p_comm = False
    # Randomness is a function of the step (I2), so there is no state of generators to keep.
    args.no_save_rng = args.no_load_rng = True
    if config.float64 == "on":
        args.params_dtype = torch.float64
        args.accumulate_allreduce_grads_in_fp32 = False


def ddp_config(args: Any) -> Any:
    """As ``megatron/training/training.py`` ``get_model`` makes it, without what reduces."""
    from megatron.core.distributed import DistributedDataParallelConfig

    values = {
        one.name: getattr(args, one.name)
        for one in fields(DistributedDataParallelConfig)
        if hasattr(args, one.name)
    }
    return DistributedDataParallelConfig(
        **{
            **values,
            "grad_reduce_in_fp32": args.accumulate_allreduce_grads_in_fp32,
            "overlap_grad_reduce": False,
            "check_for_nan_in_grad": False,  # the agreement on the step looks at all of them (I4)
            "bucket_size": None,
        }
    )


def schedule_of(scheduler: Any) -> dict[str, Any]:
    """The arguments that make another of Megatron's OptimizerParamScheduler like this one."""
    names = (
        "init_lr max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps "
        "wd_incr_style wsd_decay_steps lr_wsd_decay_style"
    ).split()
    return {name: getattr(scheduler, name) for name in names}


def silence_reruns() -> None:
    """Megatron's rerun machine would repeat a step by itself; its checks of losses stay."""
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

    get_rerun_state_machine().set_mode(RerunMode.DISABLED)
