"""Does a step take as long as the planner says? Predicted beside what happened, on emulated accelerators.

    python tests/benchmarks/model_error.py --json

8, 16 and 32 processes under ``odyssey run``, with its launcher, coordinator, groups, interpreter, gloo messages,
agreement and recovery; only the compute is a sleep (``tests/execute/emulated.py``). What layers, messages and sums take
stands in a table that the planner never sees (``emulated_jobs.uneven``): no two layers alike, a last stage twice as
dear, every instruction up to 5 % longer or shorter than the last time, sums at a rate of their own. The planner starts
from an estimate that is wrong by a factor, for layers that are all alike, and has what the ranks measure and publish: a
job that loses a worker before that fails.

Each job loses workers by SIGKILL in mid-run, and the plan before, between and after is one row. Some have routes that
visit workers more than once. ``predicted_s`` is what
the decision said that the step will take; for the first plan, which is older than any measurement, the simulated time
of its schedule at the costs measured by the job's end. ``modelled_s`` is what the accelerators and links took, by the
deadlines that the messages carry: ``error`` is between these two. ``measured_s`` is the wall clock from commit to
commit, and ``runtime_s`` = ``measured_s`` - ``modelled_s`` what is neither compute nor a link: Python, agreement,
journal, and processes that wait for a core. On two cores with up to 32 processes it is much more than on a machine of
one's own for each; it is no part of the error, and is printed by itself.

What it cannot show: costs of a real GPU, contention for links and memory, kernels that slow each other down. Sums are
measured by no rank: the planner takes the link's rate for them, and the table has another one, so that they are part of
the error. The agreement is a real one, which the planner counts and the accelerators' time does not.

The last part runs the settings of ``policies.py`` at 32 workers in the same way: our own healthy schedule by the wall
clock, then a real SIGKILL in mid-step, then the plan that ``decide()`` found; beside it Megatron's healthy 1F1B in a
job without a failure, as its ranks could not measure the two halves of a backward apart. What our schedule gains
without failures is the first ratio, what a failure costs the second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):
    sys.path.insert(0, str(CHECKOUT))

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import from_jsonable
from odyssey_megatron.metrics.run import read_run
from odyssey_megatron.plan.checking.simulate import simulate
from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.plan.layout import Layout, Route
from odyssey_megatron.plan.schedule import schedule_from_text
from odyssey_megatron.policy.costs.profile import Profile
from tests.benchmarks import emulated_jobs, policies
from tests.benchmarks.bars import Bar, at_least, at_most, finish, summarize, taken
from tests.benchmarks.emulated_jobs import NOISE, OPTIMIZER_S, estimate, measured_costs, times, uneven
from tests.execute.emulation import Emulation, Truth
from tests.launch.jobserver import JobServer, events

STEPS_A_PLAN = 6
"""The first of them is not measured: its ranks begin when they get there. What ranks have measured is known to the
planner four steps after the start.
"""
TURNING, INTERLEAVED = " turning", " interleaved"
SECONDS_A_LAYER = 0.008
"""Forward of one of the 32 layers of ``policies.py``, whose unit is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job, and who is killed in the middle of it, one after the other."""

    workers: int
    stages: int
    microbatches: int
    """Of one pipeline."""
    kills: tuple[int, ...]
    among: tuple[str, ...] = ()
    layers: int = 8
    layout: str = "megatron"
    """``--odyssey-layout``; with ``auto`` the job may move to another one once costs are measured: a plan more."""
    memory: float | None = None
    """Of what 1F1B needs of a first stage, where state is four times an activation of its layer; None: it is free."""
    steps_a_plan: int = STEPS_A_PLAN
    virtual_stages: int = 1


AUTO: Any = {"layout": "auto", "steps_a_plan": 14}
CASES = (
    Case(workers=8, stages=4, microbatches=8, kills=(2, 7)),
    Case(workers=8, stages=4, microbatches=8, kills=(5, 0), among=("reroute",)),
    Case(workers=8, stages=4, microbatches=8, kills=(1, 6), among=("replan",)),
    Case(workers=16, stages=4, microbatches=8, kills=(6, 13)),
    Case(workers=16, stages=8, microbatches=12, kills=(3, 8), among=("reroute",), layers=18),
    Case(workers=16, stages=4, microbatches=8, kills=(5, 9), among=("shift", "reroute"), layers=16),
    Case(workers=16, stages=4, microbatches=8, kills=(11, 2), among=("drop",)),
    Case(workers=16, stages=8, microbatches=12, kills=(0, 15), among=("replan",), layers=18),
    Case(workers=32, stages=8, microbatches=12, kills=(9, 30), layers=16),
    Case(workers=32, stages=4, microbatches=8, kills=(4, 21), among=("reroute",)),
    Case(workers=8, stages=4, microbatches=8, kills=(2, 7), memory=1.0),
    Case(workers=16, stages=4, microbatches=8, kills=(6, 13), memory=1.0, layers=16),
    Case(workers=8, stages=4, microbatches=8, kills=(2,), memory=1.0, **AUTO),
    Case(workers=8, stages=4, microbatches=8, kills=(5,), memory=1.3, **AUTO),
    Case(workers=16, stages=8, microbatches=8, kills=(3,), memory=1.0, layers=14, **AUTO),
    Case(workers=8, stages=4, microbatches=8, kills=(2,), memory=1.1, layers=30, **AUTO),
    Case(workers=16, stages=8, microbatches=8, kills=(3,), memory=1.1, layers=30, **AUTO),
    Case(workers=8, stages=2, microbatches=8, kills=(2,), memory=1.1, virtual_stages=2),
    Case(workers=8, stages=4, microbatches=8, kills=(2,), memory=1.3, virtual_stages=2, among=("reroute",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan as it ran; medians over its steps but the first."""

    workers: int
    is_whole: bool
    """Whether nobody is dead."""
    plan: str
    routes: str
    """How many, of how many visits to workers each, and the ways that they take."""
    predicted_s: float
    modelled_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.modelled_s - 1)

    @property
    def runtime_s(self) -> float:
        return self.measured_s - self.modelled_s


def layer_costs(num_layers: int) -> Costs:
    """A light embedding, unequal halves of the backward, links and gradients that take their time."""

    def layer(forward_s: float, input_grad_s: float, weight_grad_s: float, parameters: int) -> LayerCost:
        return LayerCost(
            forward_s=forward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            activation_bytes=4 * parameters,
            weight_bytes=2 * parameters,
            gradient_bytes=2 * parameters,
            optimizer_bytes=12 * parameters,
            state_bytes=14 * parameters,
        )

    return Costs(
        layers=(
            layer(0.002, 0.0, 0.002, 10**6),
            *(layer(0.012, 0.014, 0.010, 10**6),) * num_layers,
            layer(0.007, 0.007, 0.006, 10**6),
        ),
        message_bytes=10**6,
        link_latency_s=0.001,
        link_bytes_per_s=1e9,
    )


def emulation_of(case: Case) -> tuple[Emulation, Truth]:
    """The job of ``case``, as long as its plans need, and what things really take in it."""
    total = case.workers // case.stages * case.microbatches
    job = JobSpec(
        num_layers=case.layers + 2,
        pipeline_model_parallel_size=case.stages,
        tensor_model_parallel_size=1,
        num_microbatches=total,
        tokens_per_step=total,
        train_steps=case.steps_a_plan * (len(case.kills) + 1),
        virtual_stages=case.virtual_stages,
    )
    costs = layer_costs(case.layers)
    if case.memory is not None:
        own = costs.layers[1 : 1 + -(-job.num_layers // case.stages)]
        needs = sum(one.kept_bytes + case.stages * one.activation_bytes for one in own)
        costs = replace(costs, memory_bytes=int(case.memory * needs))
    truth = uneven(costs, head=case.layers / case.stages, seed=case.workers + case.kills[0])
    return Emulation(job=job, profile=Profile(costs=estimate(costs)), among=case.among), truth


def run_job(
    server: JobServer,
    folder: Path,
    emulation: Emulation,
    truth: Truth,
    workers: int,
    kills: tuple[int, ...],
    steps_a_plan: int = STEPS_A_PLAN,
    layout: str = "megatron",
) -> float:
    """Runs the job in ``folder``; the share of the machine's CPU time that its surviving ranks used, start included."""
    inject = ";".join(
        f"rank={rank},step={steps_a_plan * (i + 1)},at=backward" for i, rank in enumerate(kills)
    )
    began_s = time.monotonic()
    emulated_jobs.run(
        server, folder, emulation, truth, workers,
        "--odyssey-inject", inject, "--odyssey-trace-steps", 1, "--odyssey-build-timeout-s", 20,
        "--odyssey-layout", layout,
    )  # fmt: skip
    wall_s = time.monotonic() - began_s
    used_s = sum(float(path.read_text()) for path in folder.glob("cpu_s-*"))
    return used_s / wall_s / (os.cpu_count() or 1)


def way_of(route: Route) -> str:
    """How it visits workers more than once; "": it does not."""
    workers = [hop.worker for hop in route.hops]
    once = len({*workers})
    if once == len(workers):
        return ""
    if workers == workers[::-1]:
        return TURNING
    return INTERLEAVED if workers == workers[:once] * (len(workers) // once) else " with visits again"


def rows_of(folder: Path) -> Iterator[Row]:
    """One row a generation."""
    steps, learned, decisions = read_run(folder).steps, measured_costs(folder), events(folder, "decision")
    predicted_s = 0.0
    for decision in decisions:
        layout = from_jsonable(Layout, decision["layout"])
        lengths = Counter((len(route.hops), way_of(route)) for route in layout.routes)
        ran = [step for step in steps if step.generation == decision["generation"]][1:]
        chosen = [row["step_s"] for row in decision["candidates"] if row["chosen"]]
        if decision is decisions[0]:
            chosen = [simulate(schedule_from_text(decision["schedule"]), layout, learned).step_s]
        if chosen:
            (predicted_s,) = chosen
        if decision["policy"] == "fill":  # layers move behind its steps; the next plan is what was predicted
            continue
        yield Row(
            workers=len(layout.workers),
            is_whole=len(layout.workers) == len(from_jsonable(Layout, decisions[0]["layout"]).workers),
            plan=decision["policy"],
            routes=", ".join(
                f"{n} of {hops}{way}" for (hops, way), n in sorted(lengths.items(), reverse=True)
            ),
            predicted_s=predicted_s,
            modelled_s=statistics.median(step.losses["modelled_s"] for step in ran),
            measured_s=statistics.median(taken(step.interval_s, f"step {step.step}") for step in ran),
        )


def after_a_kill(setting: tuple[int, int, int]) -> tuple[Emulation, Truth, int]:
    """The job of a setting of ``policies.py``, whose layers are alike, at 1F1B's memory; and who dies."""
    dp, pp, microbatches = setting
    costs = policies.costs(memory_bytes=policies.LAYERS // pp * pp, state_bytes=0)
    layers = tuple(times(layer, SECONDS_A_LAYER) for layer in costs.layers)
    costs = replace(costs, layers=layers, message_bytes=1)  # none at all would leave no rate to measure
    job = JobSpec(
        num_layers=len(layers),
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=1,
        num_microbatches=dp * microbatches,
        tokens_per_step=dp * microbatches,
        train_steps=2 * STEPS_A_PLAN,
    )
    truth = Truth(
        costs=replace(costs, agreement_s=OPTIMIZER_S),
        noise=NOISE,
        reduce_latency_s=0.0,
        reduce_bytes_per_s=costs.link_bytes_per_s,
    )
    return Emulation(job=job, profile=Profile(costs=estimate(costs))), truth, policies.DEAD[1][0]


def measure_plans(server: JobServer, folder: Path, cases: tuple[Case, ...]) -> tuple[list[Row], list[float]]:
    """All rows of all cases, and the CPU share of each job."""
    rows: list[Row] = []
    cpu: list[float] = []
    for number, case in enumerate(cases):
        emulation, truth = emulation_of(case)
        job = folder / f"case{number}"
        cpu.append(
            run_job(server, job, emulation, truth, case.workers, case.kills, case.steps_a_plan, case.layout)
        )
        found = list(rows_of(job))
        rows += found
        for row in found:
            print(f"{row} error {row.error:.2%}, cpu {cpu[-1]:.0%}", file=sys.stderr, flush=True)
    return rows, cpu


def measure_kills(
    server: JobServer, folder: Path, settings: tuple[tuple[int, int, int], ...]
) -> tuple[list[dict[str, object]], list[Bar], list[float]]:
    """Healthy 1F1B, our own healthy schedule, and what follows the kill, by the wall clock."""
    results: list[dict[str, object]] = []
    cpu: list[float] = []
    gains: list[float] = []
    for dp, pp, microbatches in settings:
        name = f"dp{dp}_pp{pp}_m{microbatches}"
        emulation, truth, victim = after_a_kill((dp, pp, microbatches))
        cpu.append(run_job(server, folder / name, emulation, truth, dp * pp, (victim,)))
        healthy, after = rows_of(folder / name)
        (recovery,) = read_run(folder / name).recoveries
        shorter = replace(emulation.job, train_steps=STEPS_A_PLAN)
        megatron = replace(emulation, job=shorter, megatron_start=True)
        cpu.append(run_job(server, folder / f"{name}_megatron", megatron, truth, dp * pp, ()))
        (fused,) = rows_of(folder / f"{name}_megatron")
        gains.append(fused.measured_s / after.measured_s)
        results.append(
            {
                "setting": name,
                "one_f_one_b_s": fused.measured_s,
                "our_healthy_s": healthy.measured_s,
                "after_s": after.measured_s,
                "plan": f"{after.plan}, {after.routes}",
                "without failures, over 1F1B": fused.measured_s / healthy.measured_s,
                "after the kill, over our healthy step": healthy.measured_s / after.measured_s,
                "after the kill, over 1F1B": gains[-1],
                "runtime_s": [row.runtime_s for row in (fused, healthy, after)],
                "stall_s": taken(recovery.stall_s, "the stall"),
            }
        )
        print(results[-1], f"cpu {cpu[-1]:.0%}", file=sys.stderr, flush=True)
    bars = [
        at_least(
            "after the kill, over healthy 1F1B by the wall clock (least of all settings)", min(gains), 1.0
        ),
        at_least("... (median)", statistics.median(gains), 1.0),
    ]
    return results, bars, cpu


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two jobs, one kill")
    options = parser.parse_args()
    cases, settings = (CASES[:2], policies.SETTINGS[:1]) if options.quick else (CASES, policies.SETTINGS)
    server = emulated_jobs.start_server()
    try:
        with tempfile.TemporaryDirectory() as name:
            rows, cpu = measure_plans(server, Path(name), cases)
            kills, bars, more = measure_kills(server, Path(name), settings)
    finally:
        server.close()
    errors = [row.error for row in rows]
    visited_again = {
        f"plans{way}, {'healthy' if is_whole else 'after a kill'}": sum(
            way in row.routes and row.is_whole == is_whole for row in rows
        )
        for way, is_whole in ((TURNING, True), (TURNING, False), (INTERLEAVED, False))
    }
    result = {
        "plans": [
            {
                "workers": row.workers,
                "plan": f"{row.plan}, {row.routes}",
                "predicted_s": round(row.predicted_s, 4),
                "modelled_s": round(row.modelled_s, 4),
                "error": round(row.error, 4),
                "measured_s": round(row.measured_s, 4),
                "runtime_s": round(row.runtime_s, 4),
            }
            for row in rows
        ],
        "error": summarize(errors),
        "runtime_s": {
            f"{least} to {most} ranks": summarize(
                [row.runtime_s for row in rows if least <= row.workers <= most]
            )
            for least, most in ((6, 8), (9, 16), (17, 32))
        },
        "after_a_kill": kills,
        "cpu_share": summarize([*cpu, *more]),
    }
    bars = [
        at_least("plans", len(rows), 4 if options.quick else 25),
        *(at_least(name, n, 0 if options.quick else 1) for name, n in visited_again.items()),
        at_most("error (median)", statistics.median(errors), 0.03),
        at_most("error (worst)", max(errors), 0.08),
        at_most("cpu_share (worst; above 0.8 nothing here counts)", max(*cpu, *more), 0.8),
        *bars,
    ]
    return finish(result, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
