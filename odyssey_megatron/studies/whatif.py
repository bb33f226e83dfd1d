"""``odyssey plan``: how a job would run on a cluster, and what would happen if these GPUs died. Needs no GPU, no torch
and no running job. Settings of Odyssey's (--odyssey-...) count as in a job.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from odyssey_megatron.cluster.cell import NO_SHAPES
from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState, apply
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import EXPECTED_S, policies
from odyssey_megatron.errors import EXIT_LAYERS_LOST, ConfigError, LayersLost, PlanInfeasible
from odyssey_megatron.inputs import Between, Parser, output_file
from odyssey_megatron.metrics.run import text_table
from odyssey_megatron.names import layer_names
from odyssey_megatron.plan.checking.render import render
from odyssey_megatron.plan.checking.simulate import Timeline, simulate
from odyssey_megatron.plan.placing.communicators import Communicators, Needs, communicators
from odyssey_megatron.plan.placing.redundancy import with_keepers
from odyssey_megatron.plan.placing.spread import on_one_node, spread
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.scheduling.gathers import ending_s
from odyssey_megatron.plan.scheduling.lean import MOST_VISITS
from odyssey_megatron.plan.scheduling.reductions import buckets
from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.policy.case import worker_speeds
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import Decision, decide, scheduled
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.planner import PolicyPlanner
from odyssey_megatron.policy.table import candidates_table
from odyssey_megatron.policy.two_speed import TwoSpeed, two_speed
from odyssey_megatron.studies.losses import NextLoss, alone, next_losses
from odyssey_megatron.studies.presets import GIB
from odyssey_megatron.studies.progress import Progress
from odyssey_megatron.studies.scenario import Scenario, add_scenario_arguments, scenario_from
from odyssey_megatron.studies.smaller import Smaller, left_of

_SPEED = Between(0.001, 1)
_WORTH = 0.01
"""A layout that is faster by less than this share is not recommended."""
_SHOWN_LOSSES = 6
_SLOWER = (0.0, 0.002, 0.01, 0.03, 0.1)
"""Fractions of a step for which the memory that they would save is reported."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The answer to everything that was asked."""

    scenario: Scenario
    state: ClusterState
    """The cluster with its dead and slow GPUs."""
    struck: str
    """Which GPUs are dead and which are slow, in words."""
    start: tuple[CandidateRow, ...]
    """The rows that were weighed for the healthy job, if there was a choice."""
    before: Plan
    best: Plan
    """The best plan of the healthy job, whatever the launch line's layout."""
    decision: Decision | None
    """None if no GPU is dead or slow, or the job would end."""
    both: TwoSpeed | None
    smaller: Smaller | None
    """What is left of cells that have lost GPUs; None if no cell has lost a part of its own."""
    decide_s: float
    losses: list[NextLoss]
    leaner: list[tuple[float, float, int]]
    """(share of the fastest step, step in seconds, bytes of the fullest worker): what less memory would cost."""
    ends: str = ""
    """Why the job would end with what has happened."""
    exit_code: int = 0
    """Its, if it would end."""

    @property
    def plan(self) -> Plan:
        """The plan with which the job would go on; the one before, if it would end."""
        return self.decision.plan if self.decision else self.before

    def sizes(self, plan: Plan) -> Mapping[int, int]:
        """Return worker -> its number of GPUs, of those that go on in ``plan`` though they have lost some."""
        return self.smaller.sizes if self.smaller and plan is self.smaller.plan else NO_SHAPES

    @property
    def gain_of_smaller(self) -> float:
        """The throughput that smaller cells add, as a share of that without them; 0 if they compute nothing."""
        plan = self.smaller.plan if self.smaller else None
        return self.plan.step_s / plan.step_s - 1 if plan else 0.0

    def communicators(self, plan: Plan) -> Communicators:
        """Return the communicators of all ranks, including those within cells."""
        previous = None if plan is self.before else Needs(self.before.layout)
        planned = self.decision is not None and not self.decision.case.lost
        needs = Needs(plan.layout, plan.transfers, planned)
        return communicators(needs, self.scenario.job.cell(0), previous, self.scenario.state.nodes)

    def timeline(self, plan: Plan) -> Timeline:
        """Return the timeline of one step; slow workers are slow in it once they are planned for."""
        speeds = worker_speeds(self.state) if plan is self.plan else None
        if self.smaller and plan is self.smaller.plan:
            speeds = worker_speeds(self.smaller.state)
        return simulate(plan.schedule, plan.layout, self.scenario.profile.costs, speeds)

    def flags(self) -> list[tuple[str, str]]:
        """Return (flag, why) for flags that the job would be better off with, and does not have."""
        config, found = self.scenario.config, [("--odyssey", "to survive at all")]
        gain, nodes = self.before.step_s / self.best.step_s - 1, self.state.nodes
        faster = config.layout != "auto" and gain >= _WORTH
        whys = [f"a healthy job has {gain:.1%} more throughput"] if faster else []
        copies = self.scenario.job.optimizer_copies
        apart = spread((self.best if faster else self.before).layout, nodes, copies)
        apart = with_keepers(apart, None, nodes, copies)  # as a job that begins with this layout has them
        if on_one_node(self.before.layout, nodes) and not on_one_node(apart, nodes):
            whys.append("the loss of any one node is survived, too")
        if whys:
            found.append((f"--odyssey-layout {'auto' if faster else 'spread'}", "; ".join(whys)))
        if config.redundancy == "off" and (single := alone(self.before.layout)):
            names = names_of(single, self.before)
            found.append(("--odyssey-redundancy state", f"without a second holder: {names}"))
        return found


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
            raise ConfigError(
                f"the healthy job does not fit: {error}. More stages, a larger tensor size or "
                "--use-distributed-optimizer leave less on each."
            ) from error
        if options.html:
            progress.say("the page")
            _write(answer, options.html)
    sys.stdout.write(_as_json(answer) if options.json else _as_text(answer, options.width))
    return answer.exit_code


def _with_settings(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    given = {
        name: value
        for name in ("policy", "mtbf_s", "horizon_s")
        if (value := getattr(options, name)) is not None
    }
    profile, restart_s = scenario.profile, options.restart_s
    if restart_s is None:
        restart_s = scenario.config.restart_s or profile.restart_s
    profile = replace(profile, restart_s=restart_s)
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
    profile, config = scenario.profile, scenario.config
    say("the healthy job's plans")
    planner = PolicyPlanner(config)
    start = planner.start(scenario.job, scenario.state, to_json(profile))
    if planner.known.given.costs.memory_bytes != profile.costs.memory_bytes:
        # A job that does not fit starts without regard to memory; whoever asks wants to know that it does not fit.
        least = replace(scenario.job, least_holders=0, eager_forwards=False)
        initial_plan(least, scenario.state, profile.without_messages)
    profile = replace(profile, costs=replace(profile.costs, keeps_messages=start.plan.keeps_messages))
    job, decision, both, smaller, decide_s, ends, exit_code = planner.job, None, None, None, 0.0, "", 0
    if state != scenario.state:
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
            if killed and job.cell_size > 1:
                smaller = left_of(replace(scenario, job=job), state, killed, decision.plan, start.plan)
    plan = decision.plan if decision else start.plan
    return WhatIf(
        scenario=scenario,
        state=state,
        struck=struck,
        start=start.rows,
        before=start.plan,
        best=initial_plan(replace(job, best_layout=True), scenario.state, profile),
        decision=decision,
        both=both,
        smaller=smaller,
        decide_s=decide_s,
        losses=[] if ends else next_losses(job, state, plan, profile, config, say),
        leaner=_leaner(plan, job, state, profile),
        ends=ends,
        exit_code=exit_code,
    )


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
        if not found or fullest < found[-1][2]:
            found.append((share, one.step_s, fullest))
    return found


def _write(answer: WhatIf, path: Path) -> None:
    """Write the page. Raises ConfigError."""
    from odyssey_megatron.studies import plan_page  # it imports this module

    try:
        path.write_text(plan_page.html(answer), encoding="utf-8")
    except ModuleNotFoundError as error:
        raise ConfigError(f"--html needs {error.name}: pip install 'odyssey-megatron[report]'.") from None
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror or error}.") from None


# -- text ---------------------------------------------------------------------------------------------------------


def _as_json(answer: WhatIf) -> str:
    decision = answer.decision
    candidates = ",".join(to_json(row) for row in (decision.candidates if decision else answer.start))
    losses = ",".join(to_json(one) for one in answer.losses)
    bound_s = decision.bound_s if decision else answer.plan.bound_s
    found = {
        "ends": json.dumps(answer.ends or None),
        "notes": json.dumps(answer.scenario.notes),
        "before": to_json(answer.before),
        "candidates": f"[{candidates}]",
        "decide_s": f"{answer.decide_s:.6f}",
        "cluster_bound_s": repr(bound_s),
        "next_losses": f"[{losses}]",
        "leaner": json.dumps(answer.leaner),
        "smaller": answer.smaller.as_json() if answer.smaller else "null",
        "after": "null" if answer.ends else to_json(answer.plan),
        "communicators": to_json(answer.communicators(answer.plan)),
    }
    return "{" + ",".join(f'"{name}":{value}' for name, value in found.items()) + "}\n"


def _as_text(answer: WhatIf, width: int) -> str:
    scenario, before = answer.scenario, answer.before
    lines = [
        f"{scenario.name}, cluster {nodes_and_gpus(scenario)}, {scenario}",
        *(f"note: {one}" for one in scenario.notes),
        "",
        summary("before", before, scenario),
        communicators_text(answer, before),
        *([candidates_table(answer.start)] if answer.start else []),
        best_layout(answer),
        *_grid(answer, before, width),
        "",
        answer.struck + (f"; decided in {answer.decide_s * 1e3:.1f} ms" if answer.decision else ""),
    ]
    if answer.decision:
        after, bound_s = answer.plan, answer.decision.bound_s
        lines += [
            candidates_table(answer.decision.candidates),
            "",
            summary("after", after, scenario),
            communicators_text(answer, after),
            f"no layout over the living workers can have a step below {bound_s * 1e3:.1f} ms, "
            f"{1 - bound_s / after.step_s:.1%} less",
            *_grid(answer, after, width),
            *([two_speed_text(answer.both)] if answer.both else []),
            "",
            kept_text(answer, after),
            *_smaller_lines(answer, width),
        ]
    lines += [leaner_text(answer)] if len(answer.leaner) > 1 else []
    lines += ["", *([ends_text(answer)] if answer.ends else _losses_text(answer)), "", "flags for this job:"]
    lines += [f"  {flag:<28} {why}" for flag, why in answer.flags()]
    return "\n".join(lines) + "\n"


def nodes_and_gpus(scenario: Scenario) -> str:
    """Return the cluster's size in the form of ``--cluster``."""
    return f"{len(scenario.state.ranks) // scenario.gpus_per_node}x{scenario.gpus_per_node}"


def summary(name: str, plan: Plan, scenario: Scenario) -> str:
    """Return a line on a plan."""
    fullest, costs = max(size for _, size in plan.peak_bytes) / GIB, scenario.profile.costs
    end_s = ending_s(plan.layout, buckets(plan.layout, costs), costs)
    return (
        f"{name}: {plan.policy}, step {plan.step_s * 1e3:.1f} ms ({max(0.0, plan.step_s / plan.bound_s - 1):.1%} above "
        f"its layout's bound; {end_s * 1e3:.1f} ms of it until all have stepped their optimizers), "
        f"{scenario.job.tokens_per_step / plan.step_s:,.0f} tokens/s, fullest GPU {fullest:.1f} GiB"
    )


def communicators_text(answer: WhatIf, plan: Plan) -> str:
    """Return a line on the number of a plan's communicators, and the time that they are expected to take."""
    found = answer.communicators(plan)
    return f"{found.held}; {'at the start' if plan is answer.before else 'at least'} {found.connected}"


def best_layout(answer: WhatIf) -> str:
    """Return a line on the best layout of the healthy job."""
    before, best = answer.before, answer.best
    if best.layout == before.layout:
        return "no layout that was found is faster without failures"
    return (
        f"without failures pipelines {best.layout.lengths} have a step of {best.step_s * 1e3:.1f} ms, "
        f"{before.step_s / best.step_s - 1:.1%} more throughput: --odyssey-layout auto"
    )


def kept_text(answer: WhatIf, after: Plan) -> str:
    """Return a line on the throughput that is left."""
    before, best = answer.before, answer.best
    kept = f"throughput after / before: {before.step_s / after.step_s:.1%}"
    if before.step_s / best.step_s - 1 < _WORTH:
        return kept
    # Otherwise a loss can look like a gain: what follows it is planned anew, and what was before is the launch line's.
    return f"{kept}; of the best layout without failures {best.step_s / after.step_s:.1%}"


def smaller_text(answer: WhatIf) -> str:
    """Return a line on what becomes of cells that have lost GPUs; empty if none has."""
    found, size = answer.smaller, answer.scenario.job.cell_size
    if found is None:
        return ""
    if not found.sizes:
        return f"what is left of broken cells stands by: {found.why or 'too few ranks are left'}"
    cells = "; ".join(f"worker {worker} with {left} of {size} GPUs" for worker, left in found.sizes.items())
    gain = answer.gain_of_smaller
    worth = f"{gain:+.1%} throughput" if gain else "which gains nothing: they wait among the living"
    given_up = "once lost GPUs are given up, " if answer.scenario.config.respawn else ""
    rest = f"; all others stand by: {found.why}" if found.why else ""
    return f"{given_up}what is left of broken cells goes on ({cells}), {worth}{rest}"


def _smaller_lines(answer: WhatIf, width: int) -> list[str]:
    text, plan = smaller_text(answer), answer.smaller and answer.smaller.plan
    if not plan:
        return [text] if text else []
    return [text, summary("then", plan, answer.scenario), *_grid(answer, plan, width)]


def leaner_text(answer: WhatIf) -> str:
    """Return a line on what less memory would cost."""
    found = answer.leaner
    steps = (f"{share * 100:g}: {step_s * 1e3:.1f} ms, {size / GIB:.1f} GiB" for share, step_s, size in found)
    return f"memory for speed, by --odyssey-slower-for-memory-percent: {'; '.join(steps)}"


def two_speed_text(both: TwoSpeed) -> str:
    """Return a line on what moving layers behind the steps would gain."""
    gain = both.tokens / both.direct_tokens - 1 if both.direct_tokens > 0 else 0.0
    return (
        f"two-speed: {both.now.policy} at once, {len(both.then.transfers)} layers move behind "
        f"{both.after_steps} step(s), then {both.then.policy}: {gain:+.2%} tokens beside moving first"
    )


def ends_text(answer: WhatIf) -> str:
    """That the job would end, in a sentence or more."""
    return f"the job ends, exit code {answer.exit_code}: {answer.ends}"


def names_of(layers: Sequence[int], plan: Plan) -> str:
    """Return ascending ``layers`` in words."""
    total = plan.layout.num_layers
    if len(layers) in (0, total):
        return "all layers" if layers else "no layers"
    return layer_names(list(layers), total)


LOSS_COLUMNS = ("the next loss", "with", "then", "step", "throughput")


def loss_rows(answer: WhatIf) -> list[tuple[str, ...]]:
    """Return the table of next losses, the worst first; losses with the same outcome share a row."""
    rows: dict[tuple[str, ...], list[NextLoss]] = {}
    for one in answer.losses:
        ends: tuple[str, ...] = ("the job ends", "–", "–")
        if one.step_s is not None:
            ends = (one.policy, f"{one.step_s * 1e3:.1f} ms", f"{answer.plan.step_s / one.step_s:.1%}")
        rows.setdefault(ends, []).append(one)
    found: list[tuple[str, ...]] = []
    for ends, alike in rows.items():
        workers = [worker for one in alike for worker in one.workers]
        layers = {layer for one in alike for span in one.spans for layer in range(*span)}
        who = f"worker {workers[0]}" if len(workers) == 1 else f"any of {len(workers)} workers"
        found.append((who, names_of(sorted(layers), answer.plan), *ends))
    return found


def _losses_text(answer: WhatIf) -> list[str]:
    rows = loss_rows(answer)
    lines = [text_table(LOSS_COLUMNS, rows[:_SHOWN_LOSSES])]
    if len(rows) > _SHOWN_LOSSES:
        lines.append("all others cost less")
    return [*lines, nodes_text(answer)]


def nodes_text(answer: WhatIf) -> str:
    """Return a line on what the loss of a whole node would do."""
    fatal = on_one_node(answer.plan.layout, answer.state.nodes)
    if len({*answer.state.nodes.values()}) == 1:
        return "a whole node: there is only one"
    if not fatal:
        return "a whole node: no layer has all its holders on one"
    node, layers = min(fatal.items())
    names = names_of(layers, answer.plan)
    return (
        f"a whole node: {len(fatal)} of them cannot be lost, since all holders of a layer are there (node {node}: "
        f"{names})"
    )


def _grid(answer: WhatIf, plan: Plan, width: int) -> list[str]:
    return [render(plan.schedule, answer.timeline(plan), width=width)] if width > 0 else []
