"""``odyssey simulate``: plays failure traces and compares policies and systems. Needs no GPU and no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module

from odyssey_megatron.config import policies
from odyssey_megatron.errors import ConfigError, PlanInfeasible
from odyssey_megatron.inputs import WHOLE, Between, Parser, read_text
from odyssey_megatron.studies.baselines import Bamboo, Restart, System, World
from odyssey_megatron.studies.chameleon import Chameleon
from odyssey_megatron.studies.oobleck import Oobleck
from odyssey_megatron.studies.recycle import ReCycle
from odyssey_megatron.studies.scenario import add_scenario_arguments, scenario_from
from odyssey_megatron.studies.trace import (
    TRACE_S,
    FailureTrace,
    Odyssey,
    Played,
    compare,
    monotone,
    read_trace,
    with_repairs,
)

SYSTEMS: tuple[Callable[[], System], ...] = (
    *(partial(Odyssey, policy) for policy in policies()),
    partial(Odyssey, layout="auto"),
    *(partial(system, ours=ours) for system in (Chameleon, ReCycle, Oobleck) for ours in (False, True)),
    Bamboo,
    Restart,
)
"""Each makes a new system, one for each trace."""

MONOTONE_S = (6 * 3600.0, 2 * 3600.0, 1800.0, 600.0)
"""The intervals between failures in Oobleck's and ReCycle's figures (arXiv 2309.08125, 2405.14009)."""


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``odyssey simulate``."""
    add_scenario_arguments(parser)
    parser.add_argument(
        "--trace", default="", help="a file of lines 'SECONDS kill|join WORKER', closed by 'SECONDS end'"
    )
    parser.add_argument(
        "--interval-s",
        type=TRACE_S,
        action="append",
        default=[],
        help="a worker dies this often (in seconds)",
    )
    parser.add_argument("--mtbf-s", type=TRACE_S, help="random failures with this mean (in seconds)")
    parser.add_argument(
        "--repair-s", type=TRACE_S, default=3600.0, help="mean repair of random failures (in seconds)"
    )
    parser.add_argument(
        "--duration-s", type=TRACE_S, default=24 * 3600.0, help="of a random trace (in seconds)"
    )
    parser.add_argument(
        "--losses",
        type=Between(0, 1_000_000, whole=True),
        default=0,
        help="deaths in an --interval-s trace (default: half of all)",
    )
    parser.add_argument("--seed", type=WHOLE, default=0)
    parser.add_argument(
        "--group-build-s",
        type=Between(0, TRACE_S.high),
        default=2.0,
        help="new groups after a change (in seconds)",
    )
    parser.add_argument(
        "--png", default="", help="write throughput over time of the first trace to this file"
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
    world = World(
        job=scenario.job,
        profile=replace(scenario.profile, group_build_s=options.group_build_s),
        workers=scenario.state.alive,
        mtbf_s=0.0,
    )
    try:
        results = [(trace, compare(SYSTEMS, world, trace)) for trace in _traces(options, world)]
    except PlanInfeasible as error:
        raise ConfigError(f"the healthy job does not fit: {error}.") from error
    if options.png:
        plot(results[0][0], results[0][1], options.png)
    if options.json:
        found = [
            {"trace": asdict(trace), "systems": [asdict(one) for one in played]} for trace, played in results
        ]
        sys.stdout.write(json.dumps({"traces": found}) + "\n")
    else:
        sys.stdout.writelines(f"note: {one}\n" for one in scenario.notes)
        for trace, played in results:
            sys.stdout.write(f"{trace.name}, {len(trace.changes)} changes\n{table(played)}\n\n")
    return 0


def _traces(options: argparse.Namespace, world: World) -> list[FailureTrace]:
    kinds = {"--trace": options.trace, "--mtbf-s": options.mtbf_s, "--interval-s": options.interval_s}
    if len(given := [flag for flag, value in kinds.items() if value]) > 1:
        raise ConfigError(
            f"{' and '.join(given)} say what is played in different ways: leave one of them out."
        )
    if options.losses and not options.interval_s and given:
        raise ConfigError(f"--losses is for --interval-s, and {given[0]} is given: leave one of them out.")
    if options.trace:
        try:
            return [read_trace(read_text(options.trace), world.workers, options.trace)]
        except ValueError as error:
            raise ConfigError(f"--trace {options.trace}: {error}.") from error
    if options.mtbf_s is not None:
        try:
            return [
                with_repairs(
                    world.workers,
                    mtbf_s=options.mtbf_s,
                    repair_s=options.repair_s,
                    duration_s=options.duration_s,
                    seed=options.seed,
                )
            ]
        except ValueError as error:
            raise ConfigError(f"{error}.") from error
    if len(world.workers) < 2:
        raise ConfigError("one worker cannot lose another: give a larger --cluster, or a --trace.")
    losses = options.losses or len(world.workers) // 2
    if not 0 < losses < len(world.workers):
        raise ConfigError(f"--losses {losses}: must leave one of {len(world.workers)} workers.")
    intervals = options.interval_s or MONOTONE_S
    return [monotone(world.workers, interval_s, losses, options.seed) for interval_s in intervals]


def table(played: Sequence[Played]) -> str:
    """Return the average throughput of each system, best first, and how Odyssey compares."""
    ours = next(one.tokens_per_s for one in played if one.system == "odyssey")
    lines = [f"{'system':<21} {'tokens/s':>12} {'standing still':>15} {'restarts':>8} {'odyssey is':>11}"]
    for one in played:
        ratio = f"{ours / one.tokens_per_s:.3f}x" if one.tokens_per_s else "-"
        lines.append(
            f"{one.system:<21} {one.tokens_per_s:>12,.0f} {one.downtime_s:>13,.0f} s {one.restarts:>8} {ratio:>11}"
        )
    return "\n".join(lines)


def plot(trace: FailureTrace, played: Sequence[Played], path: str) -> None:
    """Draw throughput over time, one step line for each system. Raises ConfigError without matplotlib."""
    try:
        figures = import_module("matplotlib.figure")  # by name: optional, and nothing else here may draw
    except ImportError as error:
        raise ConfigError("--png needs matplotlib: pip install odyssey-megatron[report].") from error
    figure = figures.Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    for one in played:
        times = [since / 3600 for since, _, _ in one.history] + [trace.duration_s / 3600]
        rates = [rate for _, rate, _ in one.history]
        axes.step(times, [*rates, rates[-1]], where="post", label=f"{one.system} ({one.tokens_per_s:,.0f})")
    axes.set(xlabel="hours", ylabel="tokens per second", title=trace.name, ylim=(0, None))
    axes.legend(title="average tokens/s", fontsize="small")
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"--png {path} cannot be written: {error.strerror or error}.") from error
