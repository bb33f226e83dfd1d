"""Handles those of Megatron-LM's flags whose work Odyssey takes over."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import ConfigError, MegatronIncompatible
from odyssey_megatron.mcore.estimate import estimate, experts_work
from odyssey_megatron.mcore.loop.balance import Balance
from odyssey_megatron.mcore.loop.batches import Batches
from odyssey_megatron.mcore.model import groups, span
from odyssey_megatron.mcore.model.layers import ModelSpec
from odyssey_megatron.policy.costs.profile import Profile, load_profile
from odyssey_megatron.policy.costs.sizes import Precision
from odyssey_megatron.upstream import compat, refusals, smaller


def early() -> Any:
    """Megatron's arguments before it does anything with them; None if a checkpoint, which is read later, may override
    them. Raises ConfigError if there is to be one, and none is named: Megatron asserts that outside of its validation.
    """
    from megatron.training.arguments import parse_args

    args = parse_args(ignore_unknown_args=True)
    if not getattr(args, "use_checkpoint_args", False):
        return args
    if args.load is None and args.pretrained_checkpoint is None:
        raise ConfigError(
            "--use-checkpoint-args takes flags from a checkpoint, and no flag names one. Add --load or "
            "--pretrained-checkpoint, or leave it out."
        )
    return None


def quiet_rebuilding() -> None:
    """Silence what Megatron logs for each optimizer and wrapper that is made: a recovery makes them anew."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("megatron.core.distributed", "megatron.core.optimizer")):
            logging.getLogger(name).setLevel(logging.WARNING)


def say_moot(args: Any, parser: refusals.MegatronParser, config: OdysseyConfig) -> None:
    """On one rank, print a line for each flag that is given but ignored, and for each that works with a caveat."""
    if args.rank == 0:
        for flag, why in refusals.ignored(args, parser):
            sys.stderr.write(f"[odyssey] {flag} changes nothing with --odyssey: {why}.\n")
        for flag, why in config.without_effect(distributed=args.use_distributed_optimizer):
            sys.stderr.write(f"[odyssey] {flag} changes nothing here: {why}.\n")
        for flag, what in refusals.cautions(args):
            sys.stderr.write(f"[odyssey] {flag}: {what}\n")


def optimizer_copies(args: Any, config: OdysseyConfig) -> int:
    """The number of ranks that have each layer's optimizer state; 0: all that hold the layer."""
    return config.optimizer_copies if args.use_distributed_optimizer else 0


@contextlib.contextmanager
def refused_by_megatron() -> Iterator[None]:
    """Turn a failed assertion of Megatron's about its arguments in the body into one message. Raises ConfigError."""
    try:
        yield
    except AssertionError as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where, what = f"{os.path.basename(at.filename)}, line {at.lineno}", str(error) or at.line or ""
        raise ConfigError(
            f"Megatron-LM itself refuses these flags ({where}): {what.rstrip('. ')}. Change them as you would without "
            "--odyssey."
        ) from error


def split_of(args: Any) -> Callable[[Any], span.MegatronSplit]:
    """A function from a config to the split that Megatron would make of its model; ``args`` as before :func:`adapt`."""
    return functools.partial(
        span.MegatronSplit.of,
        stages=args.pipeline_model_parallel_size,
        virtual_stages=args.virtual_pipeline_model_parallel_size,
        layout=args.pipeline_model_parallel_layout,
        segments=compat.layer_kinds(args),
    )


def prepare_hybrid(args: Any, config: Any) -> None:
    """Tell the code that asks about a hybrid model's layers which kinds they are; other models need nothing. ``config``
    is the model's.
    """
    if kinds := "".join(compat.layer_kinds(args)):
        span.install_hybrid()
        # Megatron's hybrid stacks do not read it, but the code that counts tokens of experts does.
        config.moe_layer_freq = [int(kind == "E") for kind in kinds]


def is_packed(args: Any) -> bool:
    """Whether samples are packed sequences: see ``ModelSpec.is_packed``."""
    return bool(args.sft or getattr(args, "dataloader_inter_document_masking", False))


def has_masks(args: Any) -> bool:
    """Whether samples come with masks: see ``ModelSpec.has_masks``."""
    return bool(args.reset_attention_mask and args.create_attention_mask_in_dataloader)


def job_of(
    args: Any,
    transformer_config: Any,
    config: OdysseyConfig,
    split: span.MegatronSplit,
    *,
    batch_size: int,
    optimizer_copies: int,
) -> JobSpec:
    """The job that the coordinator plans for; ``batch_size``: the number of samples of the largest step."""
    kept = smaller.kept_whole(
        transformer_config,
        optimizer=args.optimizer,
        is_packed=is_packed(args),
        is_hybrid=bool(compat.layer_kinds(args)),
    )
    return JobSpec(
        num_layers=args.num_layers + 2,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_tied=not args.untie_embeddings_and_output_weights or bool(args.mtp_num_layers),
        # Megatron may have a stage without a transformer layer; a plan cannot.
        stage_layers=split.stage_layers if all(split.stage_layers) else (),
        virtual_stages=len(split.counts),
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=tuple(args.hierarchical_context_parallel_sizes or ()),
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_microbatches=batch_size // (args.micro_batch_size * Cell.in_job(0, args).lanes),
        tokens_per_step=batch_size * args.seq_length,
        train_steps=args.train_iters,
        whole_cells_only=kept.whole,
        whole_shards_only=kept.shards,
        even_gangs_only=kept.even,
        num_experts=args.num_experts or 0,
        packs_sequences=is_packed(args),
        experts_work=experts_work(
            transformer_config, seq_length=args.seq_length, vocab_size=args.padded_vocab_size
        ),
        least_holders=config.least_holders,
        eager_forwards=config.eager_forwards,
        slower_for_memory=config.slower_for_memory,
        optimizer_copies=optimizer_copies,
        save_steps=save_steps(args),
    )


def save_steps(args: Any) -> int:
    """The number of steps between two checkpoints of either kind, as a restart loads the newest; 0: none."""
    given = filter(None, (args.save_interval, args.non_persistent_save_interval))
    return min(given, default=0) if args.save else 0


def moments_of(args: Any) -> dict[str, torch.dtype]:
    """The types in which Adam's moments are kept with --use-precision-aware-optimizer; ``args`` as validated, and not
    adapted yet.
    """
    kept = {"exp_avg": args.exp_avg_dtype, "exp_avg_sq": args.exp_avg_sq_dtype}
    return kept if args.use_precision_aware_optimizer else {}


def profile_of(
    args: Any, transformer_config: Any, config: OdysseyConfig, moments: Mapping[str, torch.dtype]
) -> Profile:
    """The expected costs of a step, until the job has measured its own. Raises ConfigError."""
    if config.profile:
        return load_profile(config.profile)
    return estimate(
        transformer_config,
        config,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        vocab_size=args.padded_vocab_size,
        is_tied=not args.untie_embeddings_and_output_weights,
        kinds="".join(compat.layer_kinds(args)),
        precision=Precision(
            dtype_bytes=transformer_config.params_dtype.itemsize,
            gradient_bytes=4 if args.accumulate_allreduce_grads_in_fp32 else 2,
            moments_bytes=sum(one.itemsize for one in moments.values()) or None,
        ),
    )


def balance_of(args: Any, transformer_config: Any, config: OdysseyConfig, *, places: int) -> Balance:
    """What deals the microbatches of steps to the places of a plan, of which there are at most ``places``."""
    return Balance.of(
        config,
        is_packed=is_packed(args),
        speaks=args.rank == 0,
        places=places,
        steps=args.train_iters,
        seq_length=args.seq_length,
        rows=args.micro_batch_size,
        profile=lambda length: estimate(
            transformer_config,
            config,
            seq_length=length,
            micro_batch_size=args.micro_batch_size,
            vocab_size=args.padded_vocab_size,
            kinds="".join(compat.layer_kinds(args)),
        ),
    )


_LEFT_OUT: dict[str, Any] = {
    "delay_wgrad_compute": False,
    "defer_embedding_wgrad_compute": False,
    "tp_comm_overlap": False,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "optimizer_cuda_graph": False,
    "overlap_param_gather_with_optimizer_step": False,
    "overlap_p2p_comm_warmup_flush": False,
    "overlap_moe_expert_parallel_comm": False,
    "ep_overlap_early_attn_memory_release": False,
    "overlap_dispatch_backward_with_experts_wgrad": False,
    # Evaluations sum over the same samples, in microbatches of the training's size.
    "eval_micro_batch_size": None,
    "num_distributed_optimizer_instances": 1,
    "rerun_mode": "disabled",
    "error_injection_rate": 0,
    "moe_enable_deepep": False,
    "moe_flex_dispatcher_backend": "deepep",
    "fp8_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "use_transformer_engine_op_fuser": False,
    "ckpt_format": "torch_dist",
    # Odyssey writes in threads of the rank. Megatron would require a package for its processes.
    "async_save": False,
    # To register a buffer Megatron meets all ranks of the job, and ranks have different numbers of blocks.
    "nccl_ub": False,
    # Its handler would replace Odyssey's, and end each rank at once, with nothing saved.
    "exit_signal_handler_for_training": False,
}
"""Flags that Odyssey's own step makes moot, and their values when they are not given."""


def leave_out_moot(args: Any) -> None:
    """Reset the flags for what Odyssey does itself, before Megatron's validation derives anything from them."""
    for name, value in _LEFT_OUT.items():
        if hasattr(args, name):  # a version without this flag cannot have been given it
            setattr(args, name, value)
    if args.moe_token_dispatcher_type == "flex":
        args.moe_token_dispatcher_type = "alltoall"


def adapt(args: Any, config: OdysseyConfig) -> None:
    """Switch off in Megatron whatever Odyssey does in its place; ``args`` have been validated.

    Raises:
        MegatronIncompatible: an argument to set does not exist.
        ConfigError: see ``compat.check_packed``.
    """
    compat.check_packed(args)
    # Each layer's state is cut over its holders (``plan/placing/slices.py``), rather than the state of a stage's
    # buffers over replicas.
    _set(args, False, "use_distributed_optimizer", "overlap_param_gather")
    # In Megatron this flag stands for an optimizer that is also Transformer Engine's, and distributed. From
    # core_v0.18.2 on pretrain_gpt.py checks that before the model is built.
    _set(args, False, "use_precision_aware_optimizer")
    _set(args, torch.float32, "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    # Reductions are instructions of the schedule.
    _set(args, False, "overlap_grad_reduce", "align_grad_reduce")
    _set(args, False, "overlap_p2p_comm")
    _set(args, None, "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout")
    # A loss that is not finite must not end the job before its cause has been looked for (``execute/suspects.py``).
    _set(args, False, "check_for_nan_in_loss_and_grad")
    # Randomness is a function of the step (I2), so there is no generator state to keep.
    _set(args, True, "no_save_rng", "no_load_rng")
    # The plan of a save would be kept for the next save, which may be under another layout.
    _set(args, False, "ckpt_assume_constant_structure")
    if config.float64 == "on":
        _set(args, torch.float64, "params_dtype")
        _set(args, False, "accumulate_allreduce_grads_in_fp32")


def profile_as_launched(args: Any, rank: int, world_size: int, *, joins: bool) -> None:
    """Decide by the launch line's ``rank`` whether this process is profiled, whatever number Megatron knows it by after
    a loss: Megatron makes the profiler once, but checks the rank in each step. A process that joins later is not
    profiled, since its steps are not those that were asked for.
    """
    if args.profile:
        args.profile = not joins and rank in (args.profile_ranks or range(world_size))
        args.profile_ranks = list(range(world_size))


def batches_of(args: Any, *, consumed: int = 0, first_step: int = 0) -> Batches:
    """The sizes of the steps of a job that begins with ``first_step``, after ``consumed`` samples."""
    left_out = compat.steps_to_skip(args)
    return Batches.of_megatron(consumed, first_step=first_step, left_out=left_out)


def check_batches(args: Any, batches: Batches, replicas: int) -> None:
    """Check that every batch can be divided among the replicas, as Megatron does at each step. Raises ConfigError."""
    shared = args.micro_batch_size * replicas
    if uneven := [size for size in batches.sizes if size % shared]:
        raise ConfigError(
            f"Some steps have {' or '.join(map(str, uneven))} samples, while --rampup-batch-size, "
            f"--step-batch-size-schedule and --global-batch-size must come to multiples of {shared}, which is "
            f"--micro-batch-size {args.micro_batch_size} times {replicas} replicas."
        )


def _set(args: Any, value: Any, *names: str) -> None:
    """Set arguments that Megatron reads. Raises MegatronIncompatible if one does not exist: Megatron would use its own
    instead.
    """
    if missing := [name for name in names if not hasattr(args, name)]:
        raise MegatronIncompatible(
            f"megatron-core {compat.check_version()} has no argument {', '.join(missing)}, which Odyssey must set to "
            f"{value}; jobs ran with {', '.join(compat.TESTED)}. Use one of these, or train without --odyssey."
        )
    for name in names:
        setattr(args, name, value)


def ddp_config(args: Any) -> Any:
    """The config of the buffers in which a layer's gradients are added up. All else in Megatron's is for reducing them,
    which Odyssey does, and for the check of them, which the step's agreement makes (I4).
    """
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32)


def schedule_of(scheduler: Any) -> dict[str, Any]:
    """The arguments for another of Megatron's OptimizerParamScheduler that is like ``scheduler``."""
    names = (
        "init_lr max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps "
        "wd_incr_style wsd_decay_steps lr_wsd_decay_style"
    ).split()
    return {name: getattr(scheduler, name) for name in names}


def spec_of(
    args: Any,
    config: Any,
    split: span.MegatronSplit,
    model_provider: Any,
    *,
    moments: Mapping[str, torch.dtype],
    overflow_ends_job: bool,
) -> ModelSpec:
    """The model of ``args``, with Megatron's own stages, each of which is seeded as in Megatron."""
    from megatron.training import initialize

    optimizer_config, overrides = compat.optimizer_settings(args, config)

    def seed_stage(stage: int) -> None:
        with groups.in_stage(stage, args.pipeline_model_parallel_size):
            initialize._set_random_seed(
                args.seed,
                args.data_parallel_random_init,
                args.te_rng_tracker,
                args.inference_rng_tracker,
                use_cudagraphable_rng=False,
            )
            # Megatron draws random numbers here; where one generator serves all devices, the weights come next from it.
            initialize.set_jit_fusion_options()

    return ModelSpec(
        config=config,
        model_provider=functools.partial(model_provider, config=config),
        optimizer_config=optimizer_config,
        config_overrides=overrides,
        moments=dict(moments),
        seed=args.seed,
        is_tied=not args.untie_embeddings_and_output_weights,
        is_packed=is_packed(args),
        has_masks=has_masks(args),
        ddp_config=ddp_config(args),
        overflow_ends_job=overflow_ends_job,
        stages=split.chunks(),
        seed_stage=seed_stage,
    )
