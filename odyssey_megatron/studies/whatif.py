"""``odyssey plan``: what would happen if these GPUs died. Needs no GPU, no torch and no running job."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import Cell, ClusterState, apply, initial_state
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import EXPECTED_S, OdysseyConfig, policies
from odyssey_megatron.errors import EXIT_LAYERS_LOST, ConfigError, LayersLost, PlanInfeasible
from odyssey_megatron.inputs import Between, Parser
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.render import render
from odyssey_megatron.plan.simulate import simulate
from odyssey_megatron.policy.case import worker_speeds
from odyssey_megatron.policy.decide import Decision, decide, initial_plan
from odyssey_megatron.policy.profile import Profile, load_profile
from odyssey_megatron.policy.table import candidates_table
from odyssey_megatron.policy.two_speed import TwoSpeed, two_speed
from odyssey_megatron.studies.presets import ACCELERATORS, GIB, MODELS, preset_profile

MAX_GPUS = 16_384
"""The largest cluster that deciding was measured on."""
MAX_VISITS = 262_144
"""Microbatches of a step times stages: what is put in order. On one core, about a minute."""
_SIZE = Between(1, MAX_GPUS, whole=True)
_MICROBATCHES = Between(1, MAX_VISITS, whole=True)
_SPEED = Between(0.001, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job on a cluster, as the command line describes it."""

    job: JobSpec
    state: ClusterState
    profile: Profile
    gpus_per_node: int
    tensor_parallel_size: int

    def rank(self, place: str) -> int:
        """``node:gpu`` or a rank. Raises ConfigError."""
        node, colon, gpu = place.partition(":")
        last = max(self.state.ranks)
        try:
            if colon:
                nodes = Between(0, last // self.gpus_per_node, whole=True)
                gpus = Between(0, self.gpus_per_node - 1, whole=True)
                return int(nodes.read(node) * self.gpus_per_node + gpus.read(gpu))
            return int(Between(0, last, whole=True).read(node))
        except ValueError:
            raise ConfigError(f"{place}: no such GPU. Write NODE:GPU or a rank, 0..{last}.") from None


def add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that describe cluster, model and job; shared by ``plan`` and ``simulate``."""
    parser.add_argument("--cluster", default="4x8", metavar="NODESxGPUS", help="default: 4x8")
    parser.add_argument(
        "--model", default="llama2-7b", help=f"one of {', '.join(MODELS)} (default: llama2-7b)"
    )
    parser.add_argument(
        "--accelerator", default="h100", help=f"one of {', '.join(ACCELERATORS)} (default: h100)"
    )
    parser.add_argument(
        "--profile", default="", help="a running job's profile.json in place of model and accelerator"
    )
    parser.add_argument("--pipeline-model-parallel-size", type=_SIZE, default=4, metavar="PP")
    parser.add_argument("--tensor-model-parallel-size", type=_SIZE, default=1, metavar="TP")
    parser.add_argument("--context-parallel-size", type=_SIZE, default=1, metavar="CP")
    parser.add_argument(
        "--expert-model-parallel-size", type=_SIZE, default=1, metavar="EP", help="of a job with --profile"
    )
    parser.add_argument(
        "--expert-tensor-parallel-size", type=_SIZE, metavar="ETP", help="default: the tensor size"
    )
    parser.add_argument(
        "--use-distributed-optimizer", action="store_true", help="optimizer state on two holders of a layer"
    )
    parser.add_argument("--micro-batch-size", type=_MICROBATCHES, default=1)
    parser.add_argument(
        "--num-microbatches", type=_MICROBATCHES, help="of one pipeline (default: twice the pipeline size)"
    )


def scenario_from(options: argparse.Namespace) -> Scenario:
    """Raises ConfigError if the job cannot be laid out on the cluster."""
    nodes, gpus = _cluster(options.cluster)
    pp, tp, cp = (
        options.pipeline_model_parallel_size,
        options.tensor_model_parallel_size,
        options.context_parallel_size,
    )
    lanes, cell = _cell(options).lanes, _cell(options).size
    world = nodes * gpus
    if world % (pp * cell):
        raise ConfigError(
            f"{world} GPUs are not divisible by pipeline size {pp} times tensor size {tp}"
            f"{f' times context size {cp}' if cp > 1 else ''}"
            f"{f' times {lanes} replicas that share out experts' if lanes > 1 else ''}: change one of them."
        )
    dp = world // (pp * cell)
    num_microbatches = dp * (options.num_microbatches or 2 * pp)
    if num_microbatches * pp > MAX_VISITS:
        raise ConfigError(
            f"{num_microbatches:,} microbatches a step ({dp:,} pipelines) through {pp} stages are "
            f"{num_microbatches * pp:,} visits, and at most {MAX_VISITS:,} are planned. Lower --num-microbatches, or "
            "make --cluster smaller."
        )
    profile = (
        load_profile(options.profile)
        if options.profile
        else preset_profile(
            options.model,
            options.accelerator,
            tensor_parallel_size=tp,
            context_parallel_size=cp,
            micro_batch_size=options.micro_batch_size,
        )
    )
    settings = OdysseyConfig()
    keeps = settings.interrupted_step == "resume"
    profile = replace(profile, costs=replace(profile.costs, keeps_messages=keeps))
    job = JobSpec(
        num_layers=len(profile.costs.layers),
        is_tied=profile.costs.tied is not None,
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=1,  # a worker is one cell, and the planner sees workers only
        num_microbatches=num_microbatches,
        tokens_per_step=num_microbatches * lanes * options.micro_batch_size * _seq_length(options),
        train_steps=1,
        optimizer_copies=settings.optimizer_copies if options.use_distributed_optimizer else 0,
    )
    job.check(world // cell)
    state = initial_state(nodes=tuple(rank // gpus for rank in range(world)), cell_size=cell)
    return Scenario(job=job, state=state, profile=profile, gpus_per_node=gpus, tensor_parallel_size=tp)


def _cell(options: argparse.Namespace) -> Cell:
    """The first worker. Raises ConfigError."""
    experts = options.expert_model_parallel_size
    if experts > 1 and not options.profile:
        raise ConfigError(
            f"--expert-model-parallel-size {experts}: {options.model} has no experts. Give the --profile of a job that "
            "has."
        )
    return Cell.in_job(0, options)


def _cluster(text: str) -> tuple[int, int]:
    """Nodes and GPUs of each. Raises ConfigError."""
    nodes, _, gpus = text.partition("x")
    try:
        size = int(_SIZE.read(nodes)), int(_SIZE.read(gpus))
        Between(1, MAX_GPUS, whole=True).check(size[0] * size[1])
    except ValueError as error:
        raise ConfigError(
            f"--cluster {text[:40]}: write NODESxGPUS, as in 4x8, with at most {MAX_GPUS:,} GPUs in total ({error})."
        ) from None
    return size


def _seq_length(options: argparse.Namespace) -> int:
    """A profile does not say how long its sequences are; then tokens are counted in sequences."""
    return 1 if options.profile else MODELS[options.model].seq_length


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``odyssey plan``."""
    add_scenario_arguments(parser)
    parser.add_argument("--kill", action="append", default=[], metavar="NODE:GPU", help="may be repeated")
    parser.add_argument(
        "--slow", action="append", default=[], metavar="NODE:GPU=SPEED", help="e.g. 0:1=0.5; may be repeated"
    )
    parser.add_argument("--policy", choices=policies(), default="auto")
    parser.add_argument(
        "--mtbf-s", type=EXPECTED_S, default=21600.0, help="mean time between failures (in seconds)"
    )
    parser.add_argument(
        "--horizon-s", type=EXPECTED_S, default=3600.0, help="score to this horizon (in seconds)"
    )
    parser.add_argument(
        "--restart-s",
        type=Between(0, 1e9),
        help="what a restart from a checkpoint costs, with the steps that are done again (in seconds; default: the "
        "profile's)",
    )
    parser.add_argument(
        "--width",
        type=Between(0, 10_000, whole=True),
        default=110,
        help="columns of the grids; 0 leaves them out",
    )
    parser.add_argument("--json", action="store_true")


def main_plan(argv: Sequence[str]) -> int:
    """Runs ``odyssey plan``; returns the exit code.

    Raises:
        ConfigError: bad input.
    """
    parser = Parser(prog="odyssey plan", description=__doc__)
    add_plan_arguments(parser)
    options = parser.parse_args(list(argv))
    scenario = scenario_from(options)
    state = _struck(options, scenario)
    try:
        before = initial_plan(scenario.job, scenario.state, scenario.profile)
    except PlanInfeasible as error:
        raise ConfigError(f"the healthy job does not fit: {error}.") from error
    try:
        decision, both, seconds = _decide(options, scenario, state, before)
    except LayersLost as lost:
        sys.stdout.write(f"{lost}\n")
        return EXIT_LAYERS_LOST
    if options.json:
        sys.stdout.write(_as_json(before, decision, seconds))
    else:
        sys.stdout.write(_as_text(options, scenario, before, decision, both, seconds))
    return 0


def _struck(options: argparse.Namespace, scenario: Scenario) -> ClusterState:
    """The cluster with its dead and slow GPUs. Raises ConfigError."""
    state = scenario.state
    for place in options.kill:
        event = RankDied(rank=scenario.rank(place), code=-9, cause="killed", t_s=0.0)
        state = apply(state, event)
    return _slowed(state, scenario, options.slow)


def _decide(
    options: argparse.Namespace, scenario: Scenario, state: ClusterState, before: Plan
) -> tuple[Decision, TwoSpeed | None, float]:
    config = OdysseyConfig(policy=options.policy, mtbf_s=options.mtbf_s, horizon_s=options.horizon_s)
    job, profile = scenario.job, scenario.profile
    if options.restart_s is not None:
        profile = replace(profile, restart_s=options.restart_s)
    start = time.perf_counter()
    decision = decide(job=job, state=state, previous=before, profile=profile, config=config, now_s=0.0)
    seconds = time.perf_counter() - start
    return decision, two_speed(decision, config), seconds


def _slowed(state: ClusterState, scenario: Scenario, slow: Sequence[str]) -> ClusterState:
    """A cell is as slow as its slowest rank. Raises ConfigError."""
    for text in slow:
        place, _, number = text.partition("=")
        try:
            speed = _SPEED.read(number)
        except ValueError as error:
            raise ConfigError(f"--slow {text}: write NODE:GPU=SPEED; as the SPEED, {error}.") from None
        hit = state.worker_of(scenario.rank(place)).worker
        workers = (replace(w, speed=min(w.speed, speed)) if w.worker == hit else w for w in state.workers)
        state = replace(state, workers=tuple(workers))
    return state


def _as_json(before: Plan, decision: Decision, seconds: float) -> str:
    candidates = ",".join(to_json(row) for row in decision.candidates)
    return (
        f'{{"before":{to_json(before)},"candidates":[{candidates}],"decide_s":{seconds:.6f},'
        f'"cluster_bound_s":{decision.bound_s!r},"after":{to_json(decision.plan)}}}\n'
    )


def _as_text(
    options: argparse.Namespace,
    scenario: Scenario,
    before: Plan,
    decision: Decision,
    both: TwoSpeed | None,
    seconds: float,
) -> str:
    after = decision.plan
    lines = [
        f"{options.profile or options.model + ' on ' + options.accelerator}, cluster {options.cluster}, "
        f"{len(scenario.state.workers)} workers, {scenario.job.num_microbatches} microbatches a step",
        "",
        _summary("before", before, scenario),
        _best_layout(before, scenario),
        *_grid(options, scenario, before),
        "",
        f"killed: {', '.join(options.kill) or 'nobody'}; slow: {', '.join(options.slow) or 'nobody'}; "
        f"decided in {seconds * 1e3:.1f} ms",
        candidates_table(decision.candidates),
        "",
        _summary("after", after, scenario),
        f"no layout over the living workers can have a step below {decision.bound_s * 1e3:.1f} ms, "
        f"{1 - decision.bound_s / after.step_s:.1%} less",
        *_grid(options, scenario, after, worker_speeds(_slowed(scenario.state, scenario, options.slow))),
        *([_two_speed_text(both)] if both else []),
        "",
        f"throughput after / before: {before.step_s / after.step_s:.1%}",
    ]
    return "\n".join(lines) + "\n"


def _best_layout(before: Plan, scenario: Scenario) -> str:
    best = initial_plan(replace(scenario.job, best_layout=True), scenario.state, scenario.profile)
    if best.layout == before.layout:
        return "no layout that was found is faster without failures"
    lengths = "+".join(str(len(route.hops)) for route in best.layout.routes)
    return (
        f"without failures pipelines {lengths} have a step of {best.step_s * 1e3:.1f} ms, "
        f"{before.step_s / best.step_s - 1:.1%} more throughput: --odyssey-layout auto"
    )


def _two_speed_text(both: TwoSpeed) -> str:
    gain = both.tokens / both.direct_tokens - 1 if both.direct_tokens > 0 else 0.0
    return (
        f"two-speed: {both.now.policy} at once, {len(both.then.transfers)} layers move behind "
        f"{both.after_steps} step(s), then {both.then.policy}: {gain:+.2%} tokens beside moving first"
    )


def _summary(name: str, plan: Plan, scenario: Scenario) -> str:
    fullest = max(size for _, size in plan.peak_bytes) / GIB
    above = max(0.0, plan.step_s / plan.bound_s - 1)
    return (
        f"{name}: {plan.policy}, step {plan.step_s * 1e3:.1f} ms ({above:.1%} above its layout's bound), "
        f"{scenario.job.tokens_per_step / plan.step_s:,.0f} tokens/s, fullest worker {fullest:.1f} GiB"
    )


def _grid(
    options: argparse.Namespace, scenario: Scenario, plan: Plan, speeds: Mapping[int, float] | None = None
) -> list[str]:
    if options.width <= 0:
        return []
    schedule = plan.schedule
    timeline = simulate(schedule, plan.layout, scenario.profile.costs, speeds)
    return [render(schedule, timeline, width=options.width)]
