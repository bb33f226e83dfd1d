"""A job on a cluster, as described on the command line of ``odyssey plan`` or ``odyssey simulate``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.job import JobSpec, check_world
from odyssey_megatron.cluster.state import ClusterState, initial_state
from odyssey_megatron.config import OdysseyConfig, config_from_argv
from odyssey_megatron.doctor.flags import check_taken, looked_at
from odyssey_megatron.doctor.relations import uneven_batch
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import Between
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.costs.profile import Profile, load_profile
from odyssey_megatron.policy.costs.sizes import Recomputed
from odyssey_megatron.studies import launch_line
from odyssey_megatron.studies.busy_experts import with_measured_loads
from odyssey_megatron.studies.fitting import fitted
from odyssey_megatron.studies.launch_line import LaunchLine
from odyssey_megatron.studies.presets import (
    ACCELERATORS,
    EFFICIENCY,
    GIB,
    LINK_EFFICIENCY,
    MODELS,
    Accelerator,
    Model,
    named,
)
from odyssey_megatron.studies.trace import gpus_at

MAX_GPUS = 16_384
"""The largest cluster for which deciding was measured."""
MAX_VISITS = 262_144
"""The most microbatches of a step times stages. To put them in order takes about a minute on one core."""
_SIZE = Between(1, MAX_GPUS, whole=True)
_MICROBATCHES = Between(1, MAX_VISITS, whole=True)
_MEMORY_GIB = Between(0.001, 1e6)
_MODEL = "llama2-7b"
_CLUSTER = "4x8"
_STAGES = 4
_OF_NAMED = {"attention_dropout": 0, "hidden_dropout": 0}
"""What is known of a named model's flags: those that were published are trained without dropout."""
_MUCH = 0.25
"""The share of layers' time from which on it is said how much of it ranks exchange in."""
_SIZES = ("pipeline", "tensor", "context", "expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The job and the cluster that a question is about."""

    name: str
    job: JobSpec
    state: ClusterState
    profile: Profile
    config: OdysseyConfig
    gpus_per_node: int
    notes: tuple[str, ...] = ()
    """Sentences on what the answer leaves out, and on where its costs come from."""
    uncounted: tuple[str, ...] = ()
    """Those of the notes that say what would take other memory than is counted."""
    recomputed: Recomputed = Recomputed()  # noqa: RUF009 # frozen
    """What is run again, as far as is known."""

    def rank(self, place: str) -> int:
        """Return the rank that ``place``, ``node:gpu`` or a rank, names. Raises ConfigError."""
        try:
            ranks = gpus_at(place, len(self.state.ranks), self.gpus_per_node)
        except ValueError as error:
            raise ConfigError(f"{error}.") from None
        if len(ranks) > 1:
            raise ConfigError(f"{place}: a single GPU is expected, and these are {len(ranks)}.")
        return ranks[0]

    def started_with(self, job: JobSpec, plan: Plan) -> Scenario:
        """Return the scenario once ``job`` has started with ``plan``, which may have no room for messages."""
        costs = replace(self.profile.costs, keeps_messages=plan.keeps_messages)
        return replace(self, job=job, profile=replace(self.profile, costs=costs))

    def __str__(self) -> str:
        """Return the sizes in words."""
        cell = self.job.cell(0)
        size, lanes = cell.size, cell.lanes
        return (
            f"{len(self.state.workers)} workers{f' of {size} GPUs' if size > 1 else ''}, "
            f"{self.job.num_microbatches * lanes} microbatches a step"
            + (f", {lanes} at a time in a worker" if lanes > 1 else "")
        )


def add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe cluster, model and job."""
    parser.add_argument(
        "--cluster",
        metavar="NODESxGPUS",
        help=f"default: what the --job tells torchrun or Slurm, or {_CLUSTER}",
    )
    parser.add_argument(
        "--job",
        default="",
        metavar="FILE",
        help="a launch script of yours, which is read and not run: its model, its GPUs, its parallel sizes, its batch "
        "and its --odyssey flags. What it is started with may stand around it: 'NODES=4 train.sh 7b'. Cases "
        "are read, too (odyssey doctor --help). Flags of Megatron's given to this command count behind those of the "
        "script, or alone",
    )
    parser.add_argument(
        "--model",
        help=f"one of {', '.join(MODELS)} (default: {_MODEL}). Beside it --global-batch-size, --seq-length, "
        "--decoder-first-pipeline-num-layers and -last-, and those of recomputation count as in a launch line",
    )
    parser.add_argument(
        "--accelerator", default="h100", help=f"one of {', '.join(ACCELERATORS)} (default: h100)"
    )
    parser.add_argument(
        "--gpu-memory-gib",
        type=_MEMORY_GIB,
        metavar="GIB",
        help="memory of a GPU, of which plans may use all but --odyssey-memory-headroom-percent (default: the "
        "--accelerator's; with --profile or --fit what the runs' plans might use, if they had a limit)",
    )
    parser.add_argument(
        "--profile",
        default="",
        help="a run's folder, or its profile.json: what that model has cost, in place of costs that are estimated",
    )
    parser.add_argument(
        "--fit",
        action="append",
        default=[],
        metavar="RUN",
        help="a run's folder, or its profile.json, of any model on such GPUs: what it has measured says which FLOPs "
        "they achieve, and what links and memory they have, in place of --accelerator (whose memory counts if no run "
        "knows any). May be repeated: layers of two sizes show what one takes whatever its size. Of these and "
        "--profile, the last run with as many experts in gangs as large says how unevenly they are loaded",
    )
    _add_sizes(parser)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the flags that a launch line has, too."""
    for name, metavar in zip(_SIZES, ("PP", "TP", "CP", "EP"), strict=True):
        usual = _STAGES if name == "pipeline" else 1
        size = name if name == "context" else f"{name}-model"
        parser.add_argument(
            f"--{size}-parallel-size", type=_SIZE, metavar=metavar, help=f"default: the --job's, or {usual}"
        )
    parser.add_argument(
        "--expert-tensor-parallel-size", type=_SIZE, metavar="ETP", help="default: the tensor size"
    )
    parser.add_argument(
        "--use-distributed-optimizer", action="store_true", help="optimizer state on two holders of a layer"
    )
    parser.add_argument("--micro-batch-size", type=_MICROBATCHES, help="default: the --job's, or 1")
    parser.add_argument(
        "--num-microbatches",
        type=_MICROBATCHES,
        help="of one pipeline (default: the --job's --global-batch-size, or twice the pipeline size)",
    )


def scenario_from(options: argparse.Namespace, more: Sequence[str] = ()) -> Scenario:
    """Return the scenario that ``options`` describe.

    Args:
        more: arguments that are not the command's own, but a job's.

    Raises:
        ConfigError: the job cannot be laid out on the cluster, or something in it is wrong.
    """
    if options.fit and options.profile:
        raise ConfigError("--fit and --profile both say what layers cost: leave one of them out.")
    line = _overridden(_line(options, more), options)
    if line.model and line.name in MODELS and not options.job:
        _check_named(line, line.model, [*more, *_said_again(options)])
    nodes, gpus = _cluster(options.cluster or line.cluster or _CLUSTER)
    pp, cell = line.pipeline_model_parallel_size, Cell.in_job(0, line)
    dp = _num_pipelines(nodes * gpus, pp, cell, by_line=not options.cluster)
    num_microbatches = _num_microbatches(line, options.num_microbatches, dp, cell.lanes)
    name, profile, known = _costs(line, options, cell, gpus)
    profile, of_memory = _with_memory(profile, options.gpu_memory_gib, line.config.memory_headroom_percent)
    kept = line.kept
    job = JobSpec(
        num_layers=len(profile.costs.layers),
        is_tied=profile.costs.tied is not None,
        pipeline_model_parallel_size=pp,
        stage_layers=line.stage_layers,
        virtual_stages=line.virtual_stages,
        **line.sizes,
        num_experts=line.num_experts,
        experts_work=line.model.experts_work if line.model and cell.expert > 1 else 0.0,
        whole_cells_only=kept.whole,
        whole_shards_only=kept.shards,
        even_gangs_only=kept.even,
        num_microbatches=num_microbatches,
        # A profile alone does not say how long sequences are; then sequences are counted instead of tokens.
        tokens_per_step=num_microbatches
        * cell.lanes
        * line.micro_batch_size
        * (line.model.seq_length if line.model else 1),
        train_steps=1,
        least_holders=line.config.least_holders,
        eager_forwards=line.config.eager_forwards,
        slower_for_memory=line.config.slower_for_memory,
        optimizer_copies=line.config.optimizer_copies if line.use_distributed_optimizer else 0,
    )
    job.check(nodes * gpus)
    costs = profile.costs.with_stretches(*job.stretches)
    state = initial_state(nodes=tuple(rank // gpus for rank in range(nodes * gpus)), **job.cells)
    state, of_experts = with_measured_loads(state, [*options.fit, *filter(None, [options.profile])])
    return Scenario(
        name=name,
        job=job,
        state=state,
        profile=_by_settings(replace(profile, costs=costs), line.config),
        config=line.config,
        gpus_per_node=gpus,
        notes=(*line.uncounted, *line.notes, *known, *of_memory, *of_experts),
        uncounted=line.uncounted,
        recomputed=line.model.recomputed if line.model else Recomputed(),
    )


def _costs(
    line: LaunchLine, options: argparse.Namespace, cell: Cell, gpus: int
) -> tuple[str, Profile, tuple[str, ...]]:
    """Return a name for what is planned, its profile, and sentences on its costs. Raises ConfigError.

    Args:
        gpus: number of GPUs of a node.
    """
    if options.profile:
        profile = load_profile(options.profile)
        return options.profile, profile, tuple(_of_profile(line, profile, options.profile))
    device = named("accelerator", options.accelerator, ACCELERATORS)
    estimate = _estimated(line, device, cell, gpus)
    if not options.fit:
        told = (
            *line.of_estimate,
            _source(estimate, _exchange_share(estimate, device)),
            *_of_rack(device, options.accelerator, gpus),
        )
        return f"{line.name} on {options.accelerator}", estimate, told
    found = fitted(options.fit)
    notes = [str(found), found.far(estimate)]
    if not found.knows_memory and options.gpu_memory_gib is None:
        notes.append(f"no run knows its GPUs' memory: that of --accelerator {options.accelerator} counts")
    return f"{line.name}, as {', '.join(options.fit)}", found.profile(estimate), tuple(filter(None, notes))


def _with_memory(
    profile: Profile, memory_gib: float | None, headroom_percent: int
) -> tuple[Profile, tuple[str, ...]]:
    """Return ``profile`` for GPUs with ``memory_gib``, if that is given, and sentences on memory."""
    run_again, said = profile.costs.run_again_bytes, list[str]()
    if memory_gib is not None:
        usable = int(memory_gib * GIB) * (100 - headroom_percent) // 100
        of = f"of the {memory_gib:g} GiB of a GPU (--odyssey-memory-headroom-percent)"
        said.append(f"plans may use {usable / GIB:.4g} {of}")
        costs = replace(profile.costs, memory_bytes=usable).with_room(run_again)
        profile = replace(profile, costs=costs)
    if run_again and profile.costs.memory_bytes is not None:
        said.append(f"of the memory that plans may use, {run_again / GIB:.2g} GiB are for what is run again")
    return profile, tuple(said)


def _by_settings(profile: Profile, config: OdysseyConfig) -> Profile:
    """Return ``profile`` as the job's settings have it."""
    costs = replace(profile.costs, keeps_messages=config.resumes_steps)
    return replace(profile, costs=costs, restart_s=config.restart_s or profile.restart_s)


def _of_profile(line: LaunchLine, profile: Profile, path: str) -> Iterator[str]:
    """Raises ConfigError: it is another model's."""
    layers = len(profile.costs.layers) - 2
    if line.model is not None and line.model.num_layers != layers:
        raise ConfigError(
            f"--profile {path} has {layers} transformer layers, and {line.name} has {line.model.num_layers}: it is "
            "another model's. --fit takes what runs of other models have measured."
        )
    yield _source(profile)
    if profile.source == "measured":
        yield "they are of the run's own micro-batch, tensor-, context- and expert-parallel sizes, whatever is given"
    if line.model is None:
        yield "how long sequences are is not known of a profile alone, so that each counts as one token: name the model"


def _exchange_share(profile: Profile, device: Accelerator) -> float:
    """Return the share of its layers' estimated time in which ranks of a worker exchange."""
    computed_s = sum(map(sum, profile.operations[1:-1])) / (device.peak_flops_per_s * EFFICIENCY)
    layers = profile.costs.layers[1:-1]
    return 1 - computed_s / sum(one.forward_s + one.input_grad_s + one.weight_grad_s for one in layers)


def _source(profile: Profile, exchange_share: float = 0.0) -> str:
    if profile.source == "measured":
        return f"costs are measured, of {profile.samples} microbatches"
    much = f", which is {exchange_share:.0%} of layers' time, as none of it counts as hidden"
    return (
        f"costs are estimated from FLOPs at {EFFICIENCY:.0%} of the GPU's peak, and what ranks of a worker exchange at "
        f"{LINK_EFFICIENCY:.0%} of their links' rates{much if exchange_share > _MUCH else ''}; "
        "--fit takes what runs have measured, and --profile what one of the same model has"
    )


def _line(options: argparse.Namespace, more: Sequence[str]) -> LaunchLine:
    """Return the launch line, or the named model. Raises ConfigError."""
    if more and not more[0].startswith("--"):
        raise ConfigError(f"{more[0]} is no flag. 'odyssey plan --help' lists what there is.")
    if options.num_microbatches and any(one.partition("=")[0] == "--global-batch-size" for one in more):
        raise ConfigError(
            "--num-microbatches and --global-batch-size both say how large a step is: leave one of them out."
        )
    args, parser, others = looked_at(more, None)
    if strange := [one for one in others if not one.startswith("--odyssey")]:
        raise ConfigError(f"{' '.join(strange)}: neither of this command's flags nor of Megatron-LM's.")
    of_megatron = [one for one in more if one.startswith("--") and not one.startswith("--odyssey-")]
    given = {name: getattr(args, name) for name in parser.flags}
    beside = options.model and not options.job and launch_line.BESIDE_MODEL.issuperset(given)
    if options.job or (of_megatron and not beside):
        if options.model:
            also = "--job" if options.job else of_megatron[0]
            raise ConfigError(
                f"--model {options.model} is instead of a launch line, and {also} is of one: leave one of them out. "
                "Beside --model may stand --global-batch-size, --seq-length, --decoder-first-pipeline-num-layers and "
                "-last-, and the flags of recomputation."
            )
        more = [*more, *_said_again(options)]
        if not options.job:
            return launch_line.read((), more)
        return launch_line.read_script(options.job, more, _CLUSTER if not options.cluster else "")
    if options.fit and not options.model:
        raise ConfigError(
            f"--fit {options.fit[0]}: for which model? Name one (--model, --job, or Megatron-LM's flags). The plan of "
            f"the run's own model needs no fit: --profile {options.fit[0]}."
        )
    name = options.model or _MODEL
    model = None if options.profile and not options.model else named("model", name, MODELS)
    stages = options.pipeline_model_parallel_size or _STAGES
    return launch_line.of_named(name, model, stages, config_from_argv(more), _OF_NAMED | given)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is given of a launch line in flags of this command, by the fields of LaunchLine."""
    names = [one.name for one in fields(LaunchLine) if one.name != "model"]
    return {name: value for name in names if (value := getattr(options, name, None))}


def _said_again(options: argparse.Namespace) -> Iterator[str]:
    """Yield the same as Megatron's flags: what a launch line says of stages, say, depends on their number."""
    for name, value in _given(options).items():
        yield "--" + name.replace("_", "-")
        if value is not True:
            yield str(value)


def _overridden(line: LaunchLine, options: argparse.Namespace) -> LaunchLine:
    """Return ``line`` with the sizes that are given on the command line. Raises ConfigError."""
    line = replace(line, **_given(options))
    experts = line.expert_model_parallel_size
    if experts > 1 and line.model is not None and line.model.experts is None:
        raise ConfigError(
            f"--expert-model-parallel-size {experts}: {line.name} has no experts. Name a "
            "model that has, or give the --profile of a job."
        )
    return line


def _check_named(line: LaunchLine, model: Model, flags: Sequence[str]) -> None:
    """Raise ConfigError if Megatron-LM would refuse a launch line of ``model`` with ``flags``."""
    of_model = {
        "--num-layers": model.num_layers,
        "--num-attention-heads": model.num_attention_heads,
        "--num-experts": line.num_experts,
        "--seq-length": model.seq_length,
        "--pipeline-model-parallel-size": line.pipeline_model_parallel_size,
    }
    said = [word for name, size in of_model.items() if size for word in (name, str(size))]
    check_taken([*said, *["--sequence-parallel"] * line.sequence_parallel, *flags], is_whole=True)


def _num_pipelines(ranks: int, pp: int, cell: Cell, *, by_line: bool) -> int:
    """Return the number of pipelines of ``ranks``; ``by_line``: --cluster does not say these. Raises ConfigError."""
    try:
        check_world(ranks, pp, cell)
    except ConfigError as error:
        raise ConfigError(f"{error} --cluster says on which to plan.") if by_line else error from None
    return ranks // (pp * cell.size)


def _num_microbatches(line: LaunchLine, each: int | None, dp: int, lanes: int) -> int:
    """Return the number of microbatches of a step in each lane. ``each``: that of a pipeline, if given. Raises
    ConfigError.
    """
    pp, batch = line.pipeline_model_parallel_size, line.global_batch_size
    if each is None and batch is not None:
        if why := uneven_batch(batch, line.micro_batch_size, dp * lanes):
            raise ConfigError(why)
        found = batch // (line.micro_batch_size * lanes)
    else:
        found = dp * (each or 2 * pp)
    if found * pp > MAX_VISITS:
        raise ConfigError(
            f"{found:,} microbatches a step ({dp:,} pipelines) through {pp} stages are {found * pp:,} visits, and at "
            f"most {MAX_VISITS:,} are planned. Lower --num-microbatches, or make --cluster smaller."
        )
    return found


def _of_rack(device: Accelerator, name: str, gpus: int) -> Iterator[str]:
    if device.rack_gpus and device.rack_gpus != gpus:
        yield (
            f"what ranks of a worker exchange goes by the {device.rack_gpus} GPUs that NVLink joins in a rack of "
            f"{name}s, and not by nodes of {gpus}"
        )


def _estimated(line: LaunchLine, device: Accelerator, cell: Cell, gpus: int) -> Profile:
    """Return the estimated profile on nodes of ``gpus`` GPUs."""
    assert line.model is not None, "a profile was asked for"
    return line.model.profile(
        device,
        tensor_parallel_size=line.tensor_model_parallel_size,
        context_parallel_size=line.context_parallel_size,
        expert_parts=cell.expert_parts if cell.expert > 1 else 0,
        expert_tensor_parts=cell.expert_tensor,
        micro_batch_size=line.micro_batch_size,
        sequence_parallel=line.sequence_parallel,
        headroom_percent=line.config.memory_headroom_percent,
        node_gpus=gpus,
    )


def _cluster(text: str) -> tuple[int, int]:
    """Return the number of nodes, and of GPUs on each. Raises ConfigError."""
    nodes, _, gpus = text.partition("x")
    try:
        size = int(_SIZE.read(nodes)), int(_SIZE.read(gpus))
        _SIZE.check(size[0] * size[1])
    except ValueError as error:
        raise ConfigError(
            f"--cluster {text[:40]}: write NODESxGPUS, as in 4x8, with at most {MAX_GPUS:,} GPUs in total ({error})."
        ) from None
    return size
