"""Does a step take as long as the planner says? Predicted beside measured, on emulated accelerators.

    python tests/benchmarks/model_error.py --json

8, 16 and 32 processes under ``odyssey run``, with its launcher, coordinator, groups, interpreter, gloo messages,
agreement and recovery; only the compute is a sleep (``tests/execute/emulated.py``). Each job loses workers by SIGKILL
in mid-run, and the plan before, between and after is one row: healthy, rerouted, ragged, hybrid, with slow workers.
``predicted_s`` is the simulated time of the schedule in the journal; ``measured_s`` the runtime's own wall clock
around a step, the median of three steps after the generation's first; ``modelled_s`` the same step by the deadlines
that the messages carry; ``late_ms`` how far behind its deadline any rank was at the worst.

It measures whether real processes that only know their own program, with real messages in between, take the time that
the simulator computes with everything in sight: order, dependencies, the work that is really done. What the runtime
does between steps counts; what it does within one counts where it takes longer than the instruction that it is part
of. It does not measure whether the costs that go in are those of a GPU, nor what the simulator leaves out:
contention for links, memory bandwidth, kernels that slow each other down.

The last part runs the settings of ``policies.py`` at 32 workers: Megatron's healthy 1F1B by the wall clock, then a
real SIGKILL in mid-step, then the plan that ``decide()`` found; ``ratio`` is throughput after / before.
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

CHECKOUT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):
    sys.path.insert(0, str(CHECKOUT))

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import from_jsonable
from odyssey_megatron.metrics.run import read_run
from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import schedule_from_text
from odyssey_megatron.plan.simulate import simulate
from odyssey_megatron.policy.profile import Profile
from tests.benchmarks import emulated_jobs, policies
from tests.benchmarks.bars import Bar, at_least, at_most, finish, summarize
from tests.execute.emulation import Emulation
from tests.launch.jobserver import JobServer, events

STEPS_A_PLAN = 4
"""The first of them is not measured: its ranks begin when they get there."""
OPTIMIZER_S = 0.25
"""Modelled agreement and optimizer; an all-reduce over 32 processes on two cores takes 0.15 s of it for real."""
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
    slow: tuple[tuple[int, float], ...] = ()
    layers: int = 8


CASES = (
    Case(workers=8, stages=4, microbatches=8, kills=(2, 7)),
    Case(workers=8, stages=4, microbatches=8, kills=(5, 0), among=("reroute",)),
    Case(workers=8, stages=4, microbatches=8, kills=(1, 6), among=("replan",)),
    Case(workers=8, stages=2, microbatches=6, kills=(4,), slow=((3, 0.6),)),
    Case(workers=16, stages=4, microbatches=8, kills=(6, 13)),
    Case(workers=16, stages=8, microbatches=12, kills=(3, 8), among=("reroute",), layers=18),
    Case(workers=16, stages=4, microbatches=8, kills=(5, 9), among=("shift", "reroute"), layers=16),
    Case(workers=16, stages=4, microbatches=8, kills=(11, 2), among=("drop",)),
    Case(workers=16, stages=8, microbatches=12, kills=(0, 15), among=("replan",), layers=18),
    Case(workers=16, stages=4, microbatches=8, kills=(10,), slow=((1, 0.5), (14, 0.8))),
    Case(workers=32, stages=8, microbatches=12, kills=(9, 30), layers=16),
    Case(workers=32, stages=4, microbatches=8, kills=(4, 21), among=("reroute",)),
    Case(workers=32, stages=8, microbatches=12, kills=(17,), slow=((12, 0.7),), layers=16),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan as it ran."""

    workers: int
    plan: str
    routes: str
    """How many, of how many workers each."""
    predicted_s: float
    measured_s: float
    modelled_s: float
    late_ms: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)


def layer_costs(num_layers: int) -> Costs:
    """Uneven on purpose: a light embedding, a heavy head, unequal halves of the backward, links, reductions."""

    def layer(forward_s: float, input_grad_s: float, weight_grad_s: float, parameters: int) -> LayerCost:
        return LayerCost(
            forward_s=forward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            activation_bytes=100,
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
        optimizer_s=OPTIMIZER_S,
    )


def emulation_of(case: Case) -> Emulation:
    """The job of ``case``, as long as its plans need."""
    total = case.workers // case.stages * case.microbatches
    job = JobSpec(
        num_layers=case.layers + 2,
        pipeline_model_parallel_size=case.stages,
        tensor_model_parallel_size=1,
        num_microbatches=total,
        tokens_per_step=total,
        train_steps=STEPS_A_PLAN * (len(case.kills) + 1),
    )
    return Emulation(
        job=job, profile=Profile(costs=layer_costs(case.layers)), speeds=case.slow, among=case.among
    )


def run_job(
    server: JobServer, folder: Path, emulation: Emulation, workers: int, kills: tuple[int, ...]
) -> float:
    """Runs the job in ``folder``; the share of the machine's CPU time that its surviving ranks used, start included."""
    inject = ";".join(
        f"rank={rank},step={STEPS_A_PLAN * (i + 1)},at=backward" for i, rank in enumerate(kills)
    )
    began_s = time.monotonic()
    emulated_jobs.run(
        server, folder, emulation, workers,
        "--odyssey-inject", inject, "--odyssey-trace-steps", 1, "--odyssey-build-timeout-s", 20,
    )  # fmt: skip
    wall_s = time.monotonic() - began_s
    used_s = sum(float(path.read_text()) for path in folder.glob("cpu_s-*"))
    return used_s / wall_s / (os.cpu_count() or 1)


def rows_of(folder: Path, emulation: Emulation) -> Iterator[Row]:
    """One row a generation."""
    costs, speeds = emulation.profile.costs, dict(emulation.speeds)
    steps = read_run(folder).steps
    for decision in events(folder, "decision"):
        layout = from_jsonable(Layout, decision["layout"])
        lengths = Counter(len(route.hops) for route in layout.routes)
        measured = [step for step in steps if step.generation == decision["generation"]][1:]
        yield Row(
            workers=len(layout.workers),
            plan=decision["policy"],
            routes=", ".join(f"{n} of {hops}" for hops, n in sorted(lengths.items(), reverse=True)),
            predicted_s=simulate(schedule_from_text(decision["schedule"]), layout, costs, speeds).step_s,
            measured_s=statistics.median(step.step_s for step in measured),
            modelled_s=statistics.median(step.losses["modelled_s"] for step in measured),
            late_ms=1e3 * max(step.losses["late_s"] for step in measured),
        )


def after_a_kill(setting: tuple[int, int, int]) -> tuple[Emulation, int]:
    """The job of a setting of ``policies.py``, at 1F1B's memory, and who dies."""
    dp, pp, microbatches = setting
    costs = policies.costs(memory_bytes=policies.LAYERS // pp * pp, state_bytes=0)
    layers = tuple(
        replace(
            layer,
            forward_s=layer.forward_s * SECONDS_A_LAYER,
            input_grad_s=layer.input_grad_s * SECONDS_A_LAYER,
            weight_grad_s=layer.weight_grad_s * SECONDS_A_LAYER,
        )
        for layer in costs.layers
    )
    job = JobSpec(
        num_layers=len(layers),
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=1,
        num_microbatches=dp * microbatches,
        tokens_per_step=dp * microbatches,
        train_steps=2 * STEPS_A_PLAN,
    )
    profile = Profile(costs=replace(costs, layers=layers, optimizer_s=OPTIMIZER_S))
    return Emulation(job=job, profile=profile, megatron_start=True), policies.DEAD[1][0]


def measure_plans(server: JobServer, folder: Path, cases: tuple[Case, ...]) -> tuple[list[Row], list[float]]:
    """All rows of all cases, and the CPU share of each job."""
    rows: list[Row] = []
    cpu: list[float] = []
    for number, case in enumerate(cases):
        emulation = emulation_of(case)
        cpu.append(run_job(server, folder / f"case{number}", emulation, case.workers, case.kills))
        found = list(rows_of(folder / f"case{number}", emulation))
        rows += found
        for row in found:
            print(f"{row} error {row.error:.2%}, cpu {cpu[-1]:.0%}", file=sys.stderr, flush=True)
    return rows, cpu


def measure_kills(
    server: JobServer, folder: Path, settings: tuple[tuple[int, int, int], ...]
) -> tuple[list[dict[str, object]], list[Bar], list[float]]:
    """Healthy 1F1B against what follows the kill, by the wall clock."""
    results: list[dict[str, object]] = []
    bars: list[Bar] = []
    cpu: list[float] = []
    for dp, pp, microbatches in settings:
        name = f"dp{dp}_pp{pp}_m{microbatches}"
        emulation, victim = after_a_kill((dp, pp, microbatches))
        cpu.append(run_job(server, folder / name, emulation, dp * pp, (victim,)))
        before, after = rows_of(folder / name, emulation)
        (recovery,) = read_run(folder / name).recoveries
        results.append(
            {
                "setting": name,
                "one_f_one_b_s": before.measured_s,
                "after_s": after.measured_s,
                "plan": f"{after.plan}, {after.routes}",
                "ratio": before.measured_s / after.measured_s,
                "predicted_ratio": before.predicted_s / after.predicted_s,
                "late_ms": max(before.late_ms, after.late_ms),
                "stall_s": recovery.stall_s,
            }
        )
        print(results[-1], f"cpu {cpu[-1]:.0%}", file=sys.stderr, flush=True)
        bars.append(at_least(f"{name}_wall_clock_ratio", before.measured_s / after.measured_s, 1.0))
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
    result = {
        "plans": [
            {
                "workers": row.workers,
                "plan": f"{row.plan}, {row.routes}",
                "predicted_s": round(row.predicted_s, 4),
                "measured_s": round(row.measured_s, 4),
                "modelled_s": round(row.modelled_s, 4),
                "error": round(row.error, 4),
                "late_ms": round(row.late_ms, 1),
            }
            for row in rows
        ],
        "error": summarize(errors),
        "error_by_deadlines": summarize([abs(row.predicted_s / row.modelled_s - 1) for row in rows]),
        "after_a_kill": kills,
        "cpu_share": summarize([*cpu, *more]),
    }
    bars = [
        at_least("plans", len(rows), 4 if options.quick else 30),
        at_most("error (median)", statistics.median(errors), 0.03),
        at_most("error (worst)", max(errors), 0.08),
        at_most("cpu_share (worst; above 0.8 nothing here counts)", max(*cpu, *more), 0.8),
        *bars,
    ]
    return finish(result, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
