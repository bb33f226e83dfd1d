"""``odyssey plan``: how a job would run on a cluster, and what would happen if these GPUs died. Needs no GPU, no torch
and no running job. Settings of Odyssey's (--odyssey-...) count as in a job.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState, apply
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import EXPECTED_S, policies
from odyssey_megatron.errors import EXIT_LAYERS_LOST, ConfigError, LayersLost, PlanInfeasible
from odyssey_megatron.inputs import Between, Parser, output_file
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.scheduling.lean import MOST_VISITS
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide, scheduled
from odyssey_megatron.policy.planner import PolicyPlanner
from odyssey_megatron.policy.preparing import prepare_for
from odyssey_megatron.policy.two_speed import two_speed
from odyssey_megatron.studies import plan_page, plan_text
from odyssey_megatron.studies.answer import WhatIf
from odyssey_megatron.studies.losses import next_losses
from odyssey_megatron.studies.progress import Progress
from odyssey_megatron.studies.scenario import Scenario, add_scenario_arguments, scenario_from
from odyssey_megatron.studies.smaller import left_of
from odyssey_megatron.studies.suggested import started, suggested

_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
"""With them all layers keep only their input. Megatron-LM takes the first only with the others."""
_SPEED = Between(0.001, 1)
_SLOWER = (0.0, 0.002, 0.01, 0.03, 0.1)
"""Fractions of a step for which the memory that they would save is reported."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``odyssey plan``."""
    add_scenario_arguments(parser)
    parser.add_argument("--kill", action="append", default=[], metavar="NODE:GPU", help="may be repeated")
    parser.add_argument(
        "--slow", action="append", default=[], metavar="NODE:GPU=SPEED", help="e.g. 0:1=0.5; may be repeated"
    )
    parser.add_argument("--policy", choices=policies(), help="default: the --job's, or auto")
    parser.add_argument("--mtbf-s", type=EXPECTED_S, help="mean time between failures (in seconds)")
    parser.add_argument("--horizon-s", type=EXPECTED_S, help="score to this horizon (in seconds)")
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
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="write all of it as a page, with pictures"
    )
    parser.add_argument("--json", action="store_true")


def main_plan(argv: Sequence[str]) -> int:
    """Run ``odyssey plan`` and return the exit code.

    Raises:
        ConfigError: bad input.
    """
    parser = Parser(prog="odyssey plan", description=__doc__, allow_abbrev=False)
    add_plan_arguments(parser)
    options, more = parser.parse_known_args(list(argv))
    scenario = _with_settings(scenario_from(options, more), options)
    killed, state = [scenario.rank(place) for place in options.kill], _struck(options, scenario)
    with Progress("odyssey plan") as progress:
        try:
            answer = answered(scenario, state, _who(options), killed, progress.say)
        except PlanInfeasible as error:
            counted = "".join(f"{one}. So counted, " for one in scenario.uncounted)
            raise ConfigError(
                f"{counted}the healthy job does not fit: {error}. {_remedy(scenario)}"
            ) from error
        if options.html:
            progress.say("the page")
            _write(answer, options.html)
    sys.stdout.write(plan_text.as_json(answer) if options.json else plan_text.as_text(answer, options.width))
    return answer.exit_code


def _remedy(scenario: Scenario) -> str:
    """Return what leaves less memory to be filled on each GPU, what a job would do, and what the costs rest on."""
    job, config = scenario.job, scenario.config
    of_state = [] if job.optimizer_copies else ["--use-distributed-optimizer"]
    of_state += [] if config.redundancy == "off" else [f"no --odyssey-redundancy {config.redundancy}"]
    less = f"Of state, {' or '.join(of_state)} leaves less on each. " if of_state else ""
    of_activations = ["a smaller --micro-batch-size", "a larger --context-parallel-size"]
    if scenario.recomputed.share < 1:
        of_activations.append(_RECOMPUTED)
    elif scenario.recomputed.at_a_time > 1:
        of_activations.append("a smaller --recompute-num-layers")
    return (
        f"{less}Of activations, {' or '.join(of_activations)} does. Of both, more GPUs with more stages or a larger "
        "tensor size. A smaller --odyssey-memory-headroom-percent lets plans use more. Of this a job would only warn, "
        "and start without regard to memory."
        + "".join(f" Note: {one}." for one in scenario.notes if one not in scenario.uncounted)
    )


def _with_settings(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    given = {
        name: value
        for name in ("policy", "mtbf_s", "horizon_s")
        if (value := getattr(options, name)) is not None
    }
    profile = scenario.profile
    if options.restart_s is not None:
        profile = replace(profile, restart_s=options.restart_s)
    return replace(scenario, config=replace(scenario.config, **given), profile=profile)


def _who(options: argparse.Namespace) -> str:
    return f"killed: {', '.join(options.kill) or 'nobody'}; slow: {', '.join(options.slow) or 'nobody'}"


def _struck(options: argparse.Namespace, scenario: Scenario) -> ClusterState:
    """Return the cluster with its dead and slow GPUs. A cell is as slow as its slowest rank. Raises ConfigError."""
    state = scenario.state
    for place in options.kill:
        state = apply(state, RankDied(rank=scenario.rank(place), code=-9, cause="killed", t_s=0.0))
    for text in options.slow:
        place, _, number = text.partition("=")
        try:
            speed = _SPEED.read(number)
        except ValueError as error:
            raise ConfigError(f"--slow {text}: write NODE:GPU=SPEED; as the SPEED, {error}.") from None
        hit = state.worker_of(scenario.rank(place)).worker
        workers = (replace(w, speed=min(w.speed, speed)) if w.worker == hit else w for w in state.workers)
        state = replace(state, workers=tuple(workers))
    return state


def answered(
    scenario: Scenario,
    state: ClusterState,
    struck: str,
    killed: Sequence[int] = (),
    say: Callable[[str], None] = lambda _: None,
) -> WhatIf:
    """Return what a job would decide. Raises PlanInfeasible if the healthy one does not fit.

    Args:
        state: the cluster with its dead and slow GPUs.
        struck: which these are, in words.
        killed: the ranks whose GPUs are dead.
        say: is told what is being worked out.
    """
    config = scenario.config
    say("the healthy job's plans")
    planner = PolicyPlanner(config, must_fit=True)
    start = planner.start(scenario.job, scenario.state, to_json(scenario.profile))
    job, begun = planner.job, scenario.started_with(planner.job, start.plan)
    profile = begun.profile
    decision, both, smaller, decide_s, ends, exit_code = None, None, None, 0.0, "", 0
    if state != scenario.state:
        prepare_for(len(state.alive), job, profile)
        began_s = time.perf_counter()
        try:
            decision = decide(
                job=job, state=state, previous=start.plan, profile=profile, config=config, now_s=0.0
            )
        except (LayersLost, PlanInfeasible) as error:
            # As the coordinator's own.
            ends, exit_code = str(error), EXIT_LAYERS_LOST if isinstance(error, LayersLost) else 1
        else:
            decide_s, both = time.perf_counter() - began_s, two_speed(decision, config)
            smaller = left_of(begun, state, killed, decision.plan, start.plan)
    plan = decision.plan if decision else start.plan
    answer = WhatIf(
        scenario=scenario,
        state=state,
        struck=struck,
        start=start.rows,
        before=start.plan,
        best=start.plan if job.best_layout else started(scenario, replace(job, best_layout=True)),
        decision=decision,
        both=both,
        smaller=smaller,
        decide_s=decide_s,
        losses=[],
        flags=[],
        leaner=_leaner(plan, job, state, profile),
        ends=ends,
        exit_code=exit_code,
    )
    answer = replace(answer, flags=[*suggested(answer, job, killed)])
    if ends:
        return answer
    lasting, then = answer.lasting
    return replace(answer, losses=next_losses(job, then, lasting, profile, config, say))


def _leaner(
    plan: Plan, job: JobSpec, state: ClusterState, profile: Profile
) -> list[tuple[float, float, int]]:
    """Return the fastest order of the layout of ``plan``, and slower ones that need less memory than all before."""
    found: list[tuple[float, float, int]] = []
    visits = sum(len(route.microbatches) * len(route.hops) for route in plan.layout.routes)
    for share in _SLOWER if visits <= MOST_VISITS else ():
        longest_s = found[0][1] * (1 + share) if found else 0.0
        one = scheduled("leaner", plan.layout, plan.transfers, state, profile, job=job, longest_s=longest_s)
        fullest = max(size for _, size in one.peak_bytes)
        if found and one.step_s <= found[-1][1]:  # it was looked for longer, and is better in both
            share, *_ = found.pop()
        if not found or fullest < found[-1][2]:
            found.append((share, one.step_s, fullest))
    return found


def _write(answer: WhatIf, path: Path) -> None:
    """Write the page. Raises ConfigError."""
    try:
        path.write_text(plan_page.html(answer), encoding="utf-8")
    except ModuleNotFoundError as error:
        raise ConfigError(f"--html needs {error.name}: pip install 'odyssey-megatron[report]'.") from None
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror or error}.") from None
