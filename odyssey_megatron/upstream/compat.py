"""The one place that looks at Megatron's version: calls whose arguments or results differ between versions."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from odyssey_megatron.errors import ConfigError, MegatronIncompatible
from odyssey_megatron.upstream.flags import MUON

TESTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.1")
"""Versions that jobs have run with, the first one most (docs/versions.md). core_v0.19.0 reports 0.19.1."""


def check_version() -> str:
    """The installed megatron-core's version. Raises MegatronIncompatible if it is missing or known not to work."""
    try:
        from megatron.core import __version__ as found
    except ImportError as error:
        raise MegatronIncompatible(
            f"megatron-core cannot be imported ({error}); install megatron-core=={TESTED[0]}."
        ) from error
    if tuple(map(int, found.split(".")[:2])) < (0, 16):
        raise MegatronIncompatible(
            f"megatron-core {found} is too old: ProcessGroupCollection-based models need 0.16; tested with "
            + ", ".join(TESTED)
            + "."
        )
    return str(found)


def use_torch_optimizers() -> None:
    """Make Megatron's optimizers torch's, also where Transformer Engine or apex is installed (core_v0.16.1
    core/optimizer/__init__.py, lines 12 to 34).
    """
    from megatron.core import optimizer

    optimizer.Adam, optimizer.SGD = optimizer.CPUAdam, optimizer.CPUSGD
    optimizer.USING_PYTORCH_OPTIMIZER = True


def transformer_engine_is(least: str) -> bool:
    """Whether Transformer Engine is installed in version ``least`` or newer (core_v0.16.1 core/utils.py, line 312)."""
    from megatron.core import utils

    return utils.get_te_version() is not None and utils.is_te_min_version(least)


def backward_step(input_tensor: Any, output_tensor: Any, output_grad: Any, config: Any) -> Any:
    """Call Megatron's ``backward_step``, whose ``model_type`` argument was removed in 0.17."""
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules

    if "model_type" in inspect.signature(schedules.backward_step).parameters:
        return schedules.backward_step(
            input_tensor, output_tensor, output_grad, ModelType.encoder_or_decoder, config
        )
    newer: Any = schedules.backward_step
    return newer(input_tensor, output_tensor, output_grad, config)


def check_pretrain(named: Mapping[str, Any]) -> None:
    """Check that the script gives ``pretrain`` no groups, as it may in core_v0.19.0 (training/training.py, line 1014).
    Raises ConfigError.
    """
    if named.get("pg_collection") is not None or named.get("skip_model_parallel_init"):
        raise ConfigError(
            "pretrain() with groups of the script's own (pg_collection) does not work with --odyssey: the groups span "
            "ranks, which come and go. Leave them to Megatron."
        )


def check_model(chunk: Any) -> None:
    """Check that ``chunk`` is part of a GPTModel, or of one of Megatron's hybrid models. Raises ConfigError."""
    if hasattr(chunk, "encoder") or not hasattr(chunk, "decoder"):
        raise ConfigError(
            f"the script's model is a {type(chunk).__name__}, not one row of layers (decoder) between an embedding and "
            "a head, as GPTModel and Megatron's hybrid models are. Train it without --odyssey."
        )


def check_packed(args: Any) -> None:
    """Raise ConfigError where Megatron itself would fail in its first forward, or compute something unintended.

    core_v0.16.1 tells only the first tensor-parallel rank how long the longest sequence is (training/utils.py, lines
    667-676). Up to core_v0.17.1 the code that distributes packed sequences to context-parallel ranks is not told where
    they end (core/utils.py, line 2070, with what training/utils.py, line 533, gives). The documents of a sample are
    distributed as pieces of the sample, while positions and attention assume pieces of documents (core_v0.19.0
    pretrain_gpt.py, line 175, and core/models/common/embeddings/rope_utils.py, line 235).
    """
    version = check_version()
    wrong = []
    if args.sft and args.tensor_model_parallel_size > 1 and version.startswith("0.16."):
        flag = f"--sft with --tensor-model-parallel-size {args.tensor_model_parallel_size}"
        wrong.append((flag, "Use core_v0.17.1 or newer, or one tensor-parallel rank."))
    if args.context_parallel_size > 1:
        with_context = f"with --context-parallel-size {args.context_parallel_size}"
        if args.sft and version.startswith(("0.16.", "0.17.")):
            remedy = "Use core_v0.18.2 or newer, or one context-parallel rank."
            wrong.append((f"--sft {with_context}", remedy))
        if getattr(args, "dataloader_inter_document_masking", False):
            flag = f"--dataloader-inter-document-masking {with_context}"
            wrong.append((flag, "Use one context-parallel rank."))
    for flag, remedy in wrong:
        raise ConfigError(
            f"{flag} does not work in megatron-core {version}, with or without Odyssey. {remedy}"
        )


def setup_arguments(function: Any, *args: Any, **kwargs: Any) -> tuple[Callable[..., Any], Any, Any]:
    """The model provider, model type and checkpointing context in a call of ``setup_model_and_optimizer``.

    core_v0.19.0 (training/training.py, line 2017) has another order of arguments, and a configuration that can build
    the model instead of a provider. The provider can go with the oldest version that has none.
    """
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    model = getattr(given.get("cfg_container"), "model", None)
    provider = given["model_provider_func"] if model is None else _provider_of(model)
    return provider, given["model_type"], given.get("checkpointing_context")


def _provider_of(model: Any) -> Callable[..., Any]:
    """A provider that calls the ``build_model`` of core_v0.19.0's training/models/gpt.py, line 255."""

    def provider(*, config: Any, pg_collection: Any, pre_process: bool, post_process: bool) -> Any:
        model.transformer = config
        return model.get_builder_cls()(model).build_model(pg_collection, pre_process, post_process)

    return provider


def layer_kinds(args: Any) -> tuple[str, ...]:
    """The kinds of a hybrid model's transformer layers, one letter each as in Megatron's patterns, split where the
    pattern says that a stage ends; empty for other models. ``args`` as validated.

    core_v0.16.1 core/ssm/mamba_hybrid_layer_allocation.py; from 0.17 on the pattern is all there is.
    """
    if args.spec is None:
        return ()
    if hasattr(args, "hybrid_layer_pattern"):
        return tuple((args.hybrid_layer_pattern or "").partition("/")[0].split("|"))
    from megatron.core.ssm import mamba_hybrid_layer_allocation

    pattern, ratios = args.hybrid_override_pattern, (args.hybrid_attention_ratio, args.hybrid_mlp_ratio)
    return ("".join(mamba_hybrid_layer_allocation.allocate_layers(args.num_layers, *ratios, pattern)),)


def kinds_of_chunk(original: Callable[..., Any], offset: int, count: int, *args: Any, **kwargs: Any) -> Any:
    """The kinds of a chunk's layers for Megatron's hybrid stack: ``count`` layers, with ``offset`` before them.

    0.16 asks for those of the whole model (``allocate_layers``). Later versions ask for those of a stage, from a
    pattern that may contain ends of stages (``select_pipeline_segment``), and for the number of layers before them.
    """
    named = inspect.signature(original).bind(*args, **kwargs).arguments
    if "main_pattern" not in named:
        return original(*args, **kwargs)[offset : offset + count]
    return [*named["main_pattern"].replace("|", "")][offset : offset + count], offset


def number_layers(layers: Any, offset: int) -> None:
    """Give each of a chunk's layers its number in the model. With one stage 0.16's state spaces count from the first
    layer of a chunk (core_v0.16.1 core/ssm/mamba_block.py, line 129).
    """
    for number, layer in enumerate(layers, start=offset + 1):
        if layer.layer_number != number:
            layer.layer_number = layer.mixer.layer_number = number


def name_of_final_norm(decoder: Any) -> str:
    """The name of the norm behind the last layer, in Megatron's block of layers or its hybrid stack."""
    return "final_norm" if hasattr(decoder, "final_norm") else "final_layernorm"


def train_step_result(
    losses: dict[str, Any],
    grad_norm: float | None,
    num_zeros_in_grad: int | None,
    max_attention_logit: float,
    *,
    skipped: bool,
) -> tuple[Any, ...]:
    """The result of ``megatron.training.training.train_step``, which is the same from 0.16.1 to 0.19.0: losses,
    skipped, should checkpoint, should exit, exit code, gradient norm, zeros in the gradient, largest attention logit.
    """
    # Megatron sums zeros in float32, and prints a float.
    zeros = None if num_zeros_in_grad is None else float(num_zeros_in_grad)
    return losses, int(skipped), False, False, 0, grad_norm, zeros, max_attention_logit


def check_microbatches(args: Any) -> None:
    """Raise AssertionError if Megatron would do so when it makes its microbatch calculator from ``args``."""
    from megatron.core import num_microbatches_calculator

    before = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    nobody = -1  # rank 0 would print what it makes
    _count_microbatches(args, nobody, args.data_parallel_size, args.decrease_batch_size_if_needed)
    num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = before


def count_all_microbatches(args: Any, replicas: int) -> None:
    """Make Megatron's microbatch calculator count the whole batch as this rank's; with --decrease-batch-size-if-needed
    as much of the batch as ``replicas`` can share.
    """
    from megatron.core import num_microbatches_calculator

    _count_microbatches(args, args.rank, 1, False)
    if args.decrease_batch_size_if_needed:
        calculator: Any = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        calculator.num_micro_batches = args.global_batch_size // (args.micro_batch_size * replicas) * replicas
        calculator.current_running_global_batch_size = calculator.num_micro_batches * args.micro_batch_size


def _count_microbatches(args: Any, rank: int, replicas: int, decreases: bool) -> None:
    """Set Megatron's microbatch calculator. From 0.18 on it ignores a ramp-up, and knows a schedule (core_v0.18.2
    core/num_microbatches_calculator.py, lines 80 and 264).
    """
    from megatron.core import num_microbatches_calculator

    schedule = getattr(args, "step_batch_size_schedule", None)
    more = {"step_batch_size_schedule": schedule, "seq_length": args.seq_length} if schedule else {}
    num_microbatches_calculator.reconfigure_num_microbatches_calculator(
        rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        replicas,
        decreases,
        **more,
    )


def optimizer_settings(args: Any, config: Any) -> tuple[Any, Any]:
    """Megatron's OptimizerConfig, and overrides for parameter groups; from 0.17 on these include MuP's for the width of
    ``config`` (core_v0.19.0 training/training.py, line 2117).
    """
    from megatron.core import optimizer
    from megatron.training import training

    newer: Any = optimizer
    settings, overrides = training.get_megatron_optimizer_config(args)
    if getattr(args, "use_mup", False):
        wide = newer.get_mup_config_overrides(settings, config.mup_width_mult, settings.optimizer)
        overrides = {**(overrides or {}), **wide}
    return settings, overrides


def is_muon(optimizer: str) -> bool:
    """Whether ``optimizer`` is one of Megatron's names for Muon."""
    return optimizer in MUON


def optimizer_of(config: Any, chunks: list[Any], overrides: Any, groups: Any, *, of_layer: bool) -> Any:
    """Megatron's optimizer, a chain, for ``chunks`` of a model; the kind in which each rank keeps all of the state.

    In 16-bit training Megatron leaves a reference to each main parameter at the model's (core_v0.16.1
    core/optimizer/optimizer.py, line 683). It is taken away: a main parameter that another replaces, or of which only a
    slice is kept, would live on with it. Megatron reads it for --log-params-norm, which Odyssey computes, and for
    --qk-clip, which is refused. Both do without where there is none.

    Args:
        of_layer: the chunks are a single layer, known to this rank alone, which may have no matrix.

    Raises:
        ConfigError: the package that contains Muon is not installed.
    """
    from megatron.core import optimizer

    given: dict[str, Any] = {
        "config_overrides": None if overrides is None else dict(overrides),
        "use_gloo_process_groups": False,
        "pg_collection": groups,
    }
    make: Any = optimizer.get_megatron_optimizer
    if is_muon(config.optimizer):
        make, config = _muon(config, chunks, of_layer=of_layer)
    made = make(config, chunks, **given)
    for parameter in (one for chunk in chunks for one in chunk.parameters()):
        vars(parameter).pop("main_param", None)
    return made


def _muon(config: Any, chunks: list[Any], *, of_layer: bool) -> tuple[Any, Any]:
    """The function that makes Muon's optimizers for ``chunks``, and the config that it takes.

    Muon is for matrices, and Adam for the rest (core_v0.16.1 core/optimizer/muon.py, line 165; from 0.18 on Muon is one
    of the optimizers that ``get_megatron_optimizer`` makes). Both functions modify the config and overrides that they
    are given.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import muon

    if not getattr(optimizer, "HAVE_EMERGING_OPTIMIZERS", getattr(muon, "HAVE_EMERGING_OPTIMIZERS", True)):
        raise ConfigError(
            f"--optimizer {config.optimizer} is in NVIDIA's package emerging_optimizers, which this Megatron does not "
            "find, or finds too old. Install the version that Megatron-LM's pyproject.toml names, or use --optimizer "
            "adam."
        )
    own = copy.copy(config)
    own.optimizer = (
        "muon"
        if not of_layer or any(_is_matrix(p) for chunk in chunks for p in chunk.parameters())
        else "adam"
    )
    if hasattr(own, "use_layer_wise_distributed_optimizer"):
        own.use_layer_wise_distributed_optimizer = False
    elif own.optimizer == "muon":
        return muon.get_megatron_muon_optimizer, own
    return optimizer.get_megatron_optimizer, own


def _is_matrix(parameter: Any) -> bool:
    """Whether Muon steps this parameter."""
    is_end = getattr(parameter, "is_embedding_or_output_parameter", False)
    return parameter.dim() == 2 and not is_end and bool(parameter.requires_grad)


def batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of the sequences in ``batch``; from 0.18 on Megatron requires the group."""
    from megatron.core import parallel_state, utils

    function: Callable[..., dict[str, Any]] = utils.get_batch_on_this_cp_rank
    if "is_hybrid_cp" in inspect.signature(function).parameters:
        return function(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())
    return function(batch)


def samples_until_batches_are_alike(calculator: Any) -> int:
    """The number of consumed samples from which a microbatch calculator keeps one batch size."""
    if schedule := getattr(calculator, "schedule", None):  # from 0.18 on: (samples, size)
        return int(schedule[-1][0])
    return int(getattr(calculator, "ramup_samples", -1)) + 1  # sic


def steps_to_skip(args: Any) -> frozenset[int]:
    """The steps of ``--iterations-to-skip``, counted from 0. 0.16 counts iterations from 0, too (core_v0.16.1
    training/training.py, line 2752); from 0.17 on they count from 1.
    """
    first = 0 if check_version().startswith("0.16.") else 1
    return frozenset(one - first for one in args.iterations_to_skip)


def validates_by_single_samples() -> bool:
    """Whether a microbatch of ``--full-validation`` is one sample, as from 0.18 on (core_v0.18.2
    training/datasets/data_samplers.py, line 44).
    """
    from megatron.training.datasets import data_samplers

    return hasattr(data_samplers, "MegatronFullValidationSampler")


def generators_of(dataset: Any) -> list[Any]:
    """The random generators of ``--fim-data``, in ``dataset`` or in the data sets that it blends (core_v0.16.1
    training/datasets/fim_dataset.py, line 70; core/datasets/blended_dataset.py, line 73).
    """
    from megatron.training.datasets.fim_dataset import GPTFIMDataset

    parts = getattr(dataset, "datasets", [dataset])
    return [one.np_rng for one in parts if isinstance(one, GPTFIMDataset)]


def aux_losses() -> dict[str, tuple[Any, bool]]:
    """The routers' sums of each auxiliary loss, by layer, and whether each rank of a cell has only a part of them.

    core_v0.16.1 transformer/moe/moe_utils.py, line 897; core_v0.18.2 transformer/moe/moe_logging.py, line 74.
    """
    return {
        name: (one["values"], one["reduce_group"] is not None)
        if isinstance(one, dict)
        else (one.values, one.reduce_group is not None)
        for name, one in _aux_losses().items()
    }


def clear_aux_losses() -> None:
    """Set the sums of :func:`aux_losses` to zero."""
    for values, _ in aux_losses().values():
        values.zero_()


def set_aux_losses(losses: Mapping[str, Any]) -> None:
    """Set the sums of all routers of the job, by layer, for Megatron's loop to log without summing them further."""
    known = _aux_losses()
    known.clear()
    try:
        from megatron.core.transformer.moe.moe_logging import MetricEntry
    except ImportError:
        known.update(
            {
                name: {"values": values, "reduce_group": None, "avg_group": None}
                for name, values in losses.items()
            }
        )
    else:
        known.update({name: MetricEntry(values, needs_dp_avg=False) for name, values in losses.items()})


def router_of(layer: Any, config: Any, groups: Any) -> Any:
    """A new router for a mixture of experts ``layer``, of ``config``. Since 0.17 a router is told whether it belongs to
    multi-token prediction (core_v0.17.1 transformer/moe/moe_layer.py, line 238).
    """
    more = {"is_mtp_layer": layer.is_mtp_layer} if hasattr(layer, "is_mtp_layer") else {}
    return layer.submodules.router(config=config, pg_collection=groups, **more)


def blocks_ahead(block: Any) -> list[Any]:
    """The transformer layers of multi-token prediction (core_v0.16.1 transformer/multi_token_prediction.py, line 588;
    core_v0.17.1, line 834).
    """
    return [
        one.mtp_model_layer if hasattr(one, "mtp_model_layer") else one.transformer_layer
        for one in block.layers
    ]


def future_token_sums() -> dict[str, str]:
    """Kinds of sums that multi-token prediction makes for the log -> their keys in Megatron's tracker: the losses; from
    0.19 on also the numbers of tokens that were right, and of all tokens (core_v0.16.1
    transformer/multi_token_prediction.py, line 322; core_v0.19.0, line 348).
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    if hasattr(MTPLossLoggingHelper, "save_metrics_to_tracker"):
        return {kind: f"{kind}_values" for kind in ("loss", "correct", "total")}
    return {"loss": "values"}


def take_future_tokens() -> dict[str, Any]:
    """Remove and return the sums made so far, each by depth; kinds that were not summed are missing."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    known = MTPLossLoggingHelper.tracker
    return {kind: known.pop(name) for kind, name in future_token_sums().items() if name in known}


def set_future_tokens(sums: Mapping[str, Any]) -> None:
    """Set the sums over all microbatches, for Megatron's loop to log without summing them further."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    names = future_token_sums()
    MTPLossLoggingHelper.tracker.update({names[kind]: values for kind, values in sums.items()})
    MTPLossLoggingHelper.tracker.update(reduce_group=None, avg_group=None)


def _aux_losses() -> dict[str, Any]:
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        found: dict[str, Any] = get_moe_layer_wise_logging_tracker()
        return found
    inner: dict[str, Any] = get_moe_metrics_tracker().metrics
    return inner
