"""``odyssey simulate``: plays failures of single GPUs over days, and compares policies and systems. Needs no GPU and no
torch. Settings of Odyssey's (--odyssey-...) count as in a job, and notes name those that cannot be played. With tensor,
context or expert parallelism a lost GPU breaks its cell; --odyssey-respawn and --odyssey-shrink say what becomes of the
rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from importlib import import_module

from odyssey_megatron.config import OdysseyConfig, flag_of, policies
from odyssey_megatron.errors import ConfigError, PlanInfeasible
from odyssey_megatron.inputs import WHOLE, Between, Parser, output_file, read_text
from odyssey_megatron.policy.score import START_S
from odyssey_megatron.studies.baselines import Bamboo, Restart, System, World
from odyssey_megatron.studies.chameleon import Chameleon
from odyssey_megatron.studies.odyssey import Odyssey
from odyssey_megatron.studies.oobleck import Oobleck
from odyssey_megatron.studies.playing import Played, compare
from odyssey_megatron.studies.progress import Progress
from odyssey_megatron.studies.recycle import ReCycle
from odyssey_megatron.studies.resihp import ResiHP
from odyssey_megatron.studies.scenario import Scenario, add_scenario_arguments, scenario_from
from odyssey_megatron.studies.smaller import sizes_of, stands_by
from odyssey_megatron.studies.trace import TRACE_S, FailureTrace, monotone, read_trace, with_repairs


def played_for(config: OdysseyConfig) -> tuple[Callable[[], System], ...]:
    """Return what is played for a job with these settings. Each makes a new system, one for each trace.

    "odyssey" is the job as it is. Each of the next rows has one other setting.
    """
    others = {f"only {one}": replace(config, policy=one) for one in policies() if one != "auto"}
    others["odyssey, layout auto"] = replace(config, layout="auto")
    return (
        partial(Odyssey, config),
        *(partial(Odyssey, one, name) for name, one in others.items() if one != config),
        *(partial(system, ours=ours) for system in (Chameleon, ReCycle, Oobleck) for ours in (False, True)),
        Bamboo,
        Restart,
    )


SYSTEMS = played_for(OdysseyConfig())
"""Those of a job without settings."""

MONOTONE_S = (6 * 3600.0, 2 * 3600.0, 1800.0, 600.0)
"""The intervals between failures in Oobleck's and ReCycle's figures (arXiv 2309.08125, 2405.14009)."""


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``odyssey simulate``."""
    add_scenario_arguments(parser)
    parser.add_argument(
        "--trace",
        default="",
        help="a file of lines 'SECONDS kill|join GPU', closed by 'SECONDS end'. A GPU is a rank or NODE:GPU; NODE:* is "
        "a whole node",
    )
    parser.add_argument(
        "--interval-s", type=TRACE_S, action="append", default=[], help="a GPU dies this often (in seconds)"
    )
    parser.add_argument("--mtbf-s", type=TRACE_S, help="random failures with this mean (in seconds)")
    parser.add_argument(
        "--repair-s", type=TRACE_S, default=3600.0, help="mean repair of random failures (in seconds)"
    )
    parser.add_argument(
        "--node-share",
        type=Between(0, 1),
        default=0.0,
        help="share of the random failures that take a whole node (default: 0)",
    )
    parser.add_argument(
        "--duration-s", type=TRACE_S, default=24 * 3600.0, help="of a random trace (in seconds)"
    )
    parser.add_argument(
        "--losses",
        type=Between(0, 1_000_000, whole=True),
        default=0,
        help="deaths in an --interval-s trace (default: half as many as there are workers)",
    )
    parser.add_argument("--seed", type=WHOLE, default=0)
    parser.add_argument(
        "--group-build-s",
        type=Between(0, TRACE_S.high),
        default=2.0,
        help="new groups after a change (in seconds)",
    )
    parser.add_argument(
        "--start-s",
        type=Between(0, TRACE_S.high),
        default=START_S,
        help="how long processes take to start, for cells that come back with fewer GPUs, or with all again (in "
        f"seconds; default: {START_S:g})",
    )
    parser.add_argument(
        "--png",
        type=output_file,
        metavar="FILE",
        help="write throughput over time of the first trace to this file",
    )
    parser.add_argument("--json", action="store_true")


def main_simulate(argv: Sequence[str]) -> int:
    """Run ``odyssey simulate`` and return the exit code.

    Raises:
        ConfigError: bad input.
    """
    parser = Parser(prog="odyssey simulate", description=__doc__, allow_abbrev=False)
    add_simulate_arguments(parser)
    options, more = parser.parse_known_args(list(argv))
    scenario = scenario_from(options, more)
    profile = scenario.profile.without_messages
    world = World(
        job=scenario.job,
        profile=replace(profile, group_build_s=options.group_build_s),
        workers=scenario.state.alive,
        mtbf_s=0.0,
        gpus_per_node=scenario.gpus_per_node,
        start_s=options.start_s,
        expert_loads=scenario.state.workers[0].expert_loads,
    )
    traces, found = _traces(options, world), systems(scenario)
    try:
        with Progress("odyssey simulate") as progress:
            results = [
                (trace, compare(found, world, trace, _teller(progress, traces, at)))
                for at, trace in enumerate(traces)
            ]
    except PlanInfeasible as error:
        raise ConfigError(f"the healthy job does not fit: {error}.") from error
    if options.png:
        plot(results[0][0], results[0][1], options.png)
    notes = [*scenario.notes, *_not_played(scenario), *_on_cells(scenario, world)]
    if options.json:
        found_json = [
            {"trace": asdict(trace), "systems": [asdict(one) for one in played]} for trace, played in results
        ]
        sys.stdout.write(json.dumps({"notes": notes, "traces": found_json}) + "\n")
    else:
        sys.stdout.writelines(f"note: {one}\n" for one in notes)
        for trace, played in results:
            changes = f"{trace.name}, {len(trace.changes)} changes"
            sys.stdout.write(f"{changes}\n{table(played, with_smaller=world.is_in_cells)}\n\n")
    return 0


def systems(scenario: Scenario) -> tuple[Callable[[], System], ...]:
    """Return what is played for ``scenario``. Each makes a new system, one for each trace.

    Where broken cells may go on as smaller ones, one more row has them leave.
    """
    job, config = scenario.job, scenario.config
    own = played_for(config)
    if job.cell_size == 1:
        return own
    if len(sizes_of(job, config)) > 1 and scenario.gpus_per_node % job.cell_size == 0:
        own += (partial(Odyssey, replace(config, shrink="off"), "odyssey, shrink off"),)
    return (*own, ResiHP)


def _not_played(scenario: Scenario) -> Iterator[str]:
    """Yield a sentence on each setting that is given and changes what a job does, but is not played."""
    config, mean = scenario.config, "the mean time between failures of the trace"
    why = {
        "mtbf_s": f"plans go by {mean}",
        "horizon_s": f"plans are scored to four times {mean}",
        "rebalance": "no GPU of a trace is slow",
        "sequence_balance": "all microbatches of a trace cost the same",
        "inject": "what fails is in the trace",
        "profile": "--profile says what layers cost",
    }
    if config.layout == "spread":
        why["layout"] = "workers are played as if on one node"
    if scenario.job.cell_size == 1:
        why |= dict.fromkeys(
            ("respawn", "shrink"), "a worker is one GPU, which is back when the trace says so"
        )
    for one in fields(config):
        if one.name in why and getattr(config, one.name) != one.default:
            yield f"{flag_of(one)} does not count: {why[one.name]}"


def _on_cells(scenario: Scenario, world: World) -> Iterator[str]:
    """Yield sentences on what becomes of broken cells."""
    job, config, each = scenario.job, scenario.config, world.gpus_per_node
    if not world.is_in_cells:
        return
    breaks = f"a worker is a cell of {job.cell_size} GPUs, and a lost GPU breaks its cell"
    sizes, why = sizes_of(job, config)[1:], stands_by(job, config, each)
    if not world.cells_fill_nodes:
        sizes, why = (), why if job.cell_size > each else f"nodes of {each} GPUs are not whole cells"
    if not sizes:
        yield f"{breaks}, whose rest stands by: {why}"
        return
    any_size = replace(job, whole_cells_only="", whole_shards_only="", even_gangs_only="").cell_sizes
    yield (
        f"{breaks}. What is left of it goes on with {', '.join(map(str, sizes))} GPUs, {1 + config.respawn} start(s) "
        f"of {world.start_s:g} s (--start-s) and four steps after the loss; to become whole again it is away for one "
        "start and four steps"
        + (f". Other numbers stand by: {why}" if len(any_size) > 1 + len(sizes) else "")
    )
    yield "resihp goes on at once with a power of two of a cell's GPUs; the cells of all other systems leave as one"


def _teller(progress: Progress, traces: Sequence[FailureTrace], number: int) -> Callable[[str, float], None]:
    of_all = f"trace {number + 1} of {len(traces)}, " if len(traces) > 1 else ""

    def say(system: str, at_s: float) -> None:
        progress.say(f"{of_all}{system}: {at_s / traces[number].duration_s:.0%} of the trace")

    return say


def _traces(options: argparse.Namespace, world: World) -> list[FailureTrace]:
    kinds = {"--trace": options.trace, "--mtbf-s": options.mtbf_s, "--interval-s": options.interval_s}
    if len(given := [flag for flag, value in kinds.items() if value]) > 1:
        raise ConfigError(
            f"{' and '.join(given)} say what is played in different ways: leave one of them out."
        )
    if options.losses and not options.interval_s and given:
        raise ConfigError(f"--losses is for --interval-s, and {given[0]} is given: leave one of them out.")
    if options.node_share and options.mtbf_s is None:
        raise ConfigError("--node-share is for --mtbf-s: give that, too, or write a --trace with NODE:*.")
    gpus = len(world.workers) * world.job.cell_size
    if options.trace:
        try:
            text, each = read_text(options.trace), world.gpus_per_node
            return [read_trace(text, gpus, options.trace, gpus_per_node=each)]
        except ValueError as error:
            raise ConfigError(f"--trace {options.trace}: {error}.") from error
    if options.mtbf_s is not None:
        try:
            return [
                with_repairs(
                    range(gpus),
                    mtbf_s=options.mtbf_s,
                    repair_s=options.repair_s,
                    duration_s=options.duration_s,
                    seed=options.seed,
                    node_share=options.node_share,
                    gpus_per_node=world.gpus_per_node,
                )
            ]
        except ValueError as error:
            raise ConfigError(f"{error}.") from error
    if len(world.workers) < 2:
        raise ConfigError("one worker cannot lose another: give a larger --cluster, or a --trace.")
    losses = options.losses or len(world.workers) // 2
    if not 0 < losses < gpus:
        raise ConfigError(f"--losses {losses}: must leave one of {gpus} GPUs.")
    intervals = options.interval_s or MONOTONE_S
    return [monotone(range(gpus), interval_s, losses, options.seed) for interval_s in intervals]


def table(played: Sequence[Played], *, with_smaller: bool = False) -> str:
    """Return the average throughput of each system, best first, and how Odyssey compares.

    With ``with_smaller`` a column has how many times cells went on as smaller ones.
    """
    ours = next(one.tokens_per_s for one in played if one.system == "odyssey")
    head = f"{'system':<21} {'tokens/s':>12} {'standing still':>15} {'restarts':>8} {'odyssey is':>11}"
    lines = [head + (f" {'smaller cells':>14}" if with_smaller else "")]
    for one in played:
        ratio = f"{ours / one.tokens_per_s:.3f}x" if one.tokens_per_s else "-"
        lines.append(
            f"{one.system:<21} {one.tokens_per_s:>12,.0f} {one.downtime_s:>13,.0f} s {one.restarts:>8} {ratio:>11}"
            + (f" {one.smaller:>14}" if with_smaller else "")
        )
    return "\n".join(lines)


def plot(trace: FailureTrace, played: Sequence[Played], path: str) -> None:
    """Draw throughput over time, one step line for each system. Raises ConfigError without matplotlib."""
    try:
        figures = import_module("matplotlib.figure")  # by name: optional, and nothing else here may draw
    except ImportError as error:
        raise ConfigError("--png needs matplotlib: pip install odyssey-megatron[report].") from error
    figure = figures.Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots()
    for at, one in enumerate(played):
        times = [since / 3600 for since, _, _ in one.history] + [trace.duration_s / 3600]
        rates = [rate for _, rate, _ in one.history]
        axes.step(
            times,
            [*rates, rates[-1]],
            where="post",
            label=f"{one.system} ({one.tokens_per_s:,.0f})",
            color=f"C{at % 10}",  # there are ten colours, and more systems
            linestyle=("-", "--", ":")[at // 10 % 3],
        )
    axes.set(xlabel="hours", ylabel="tokens per second", title=trace.name, ylim=(0, None))
    figure.legend(title="average tokens/s", fontsize="small", loc="outside right upper")
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"--png {path} cannot be written: {error.strerror or error}.") from error
