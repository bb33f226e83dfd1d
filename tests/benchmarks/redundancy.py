"""What it costs to have nothing to lose, and what it saves when something is lost.

The example's Llama on 8 CPU ranks, PP2 x DP4: optimizer state on every holder, and cut over them, each slice on two of
four (``--use-distributed-optimizer``), there with the second copies in host memory, too. On 4 ranks, one pipeline:
without and with shadows (``--odyssey-redundancy state``).
Runs alternate. Bytes are counted (weights, gradients, optimizer state of the fullest rank), step times and stalls are
measured on gloo and two cores: they show what is sent, not what it would take on a GPU's links.

Then each kind of ``--odyssey-redundancy`` on emulated accelerators (``tests/execute/emulated.py``: compute is a sleep),
one pipeline of 8 stages: the step by the planner and by the wall clock, the most memory that the plan needs on a
worker, and for workers killed half-way through a step how long the job stood still and what the rest of that step
took, with what had been run ahead and without. What sleeps, messages and sums take the planner does not see
(``emulated_jobs.uneven``): it starts from an estimate, and goes by what the ranks measure. ``planned_step_s`` is by the
simulator at the measured costs, ``modelled_step_s`` what compute and links took, and ``runtime_s`` the rest of the wall
clock. At last what rejoin.py measures: how long the job stands still when a lost rank comes back.

    python tests/benchmarks/redundancy.py [--rounds 3] [--json] [--emulated-only]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):
    sys.path.insert(0, str(CHECKOUT))

from odyssey_megatron.codec import from_jsonable
from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.run import read_run
from odyssey_megatron.plan.checking.simulate import simulate
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import Op, schedule_from_text
from tests.benchmarks import emulated_jobs, rejoin
from tests.benchmarks.bars import Bar, at_least, at_most, finish, summarize, taken
from tests.benchmarks.emulated_jobs import measured_costs, runtimes_s
from tests.execute.emulation import Emulation, Truth
from tests.launch.jobserver import ENVIRONMENT, JobServer

MODEL = (
    "--num-layers 8 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 64 --micro-batch-size 1 --global-batch-size 16 --train-iters 12 --lr-warmup-iters 1 "
    "--odyssey-device cpu --odyssey-policy reroute"
).split()
WARM_UP_STEPS, KILLED_AT = 3, 6
SHARED = ["--use-distributed-optimizer"]
MODES = {
    # name: ranks, stages, flags, the rank that is killed at the end, if that can be survived
    "DP4": (8, 2, [], 5),
    "DP4, optimizer state on two": (8, 2, SHARED, 5),
    "DP4, the second one's on the host": (8, 2, [*SHARED, "--odyssey-spare-state", "host"], 5),
    "DP1": (4, 4, [], None),
    "DP1, shadows": (4, 4, ["--odyssey-redundancy", "state"], 2),
}


STAGES, MICROBATCHES, LAYER_S, MEGABYTE = 8, 16, 0.006, 10**6
KINDS, VICTIMS, STEP = ("off", "state", "compute"), (0, 2, 4, 6), emulated_jobs.KNOWN_AT


@dataclass
class Emulated:
    """One kind of redundancy on emulated accelerators."""

    planned_step_s: float = 0.0
    planned_bytes: int = 0
    forwards_ahead: int = 0
    step_s: list[float] = field(default_factory=list)
    modelled_s: list[float] = field(default_factory=list)
    runtime_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    rest_s: list[float] = field(default_factory=list)
    """From when the interrupted step went on until it was committed."""
    saved: list[float] = field(default_factory=list)
    """Forwards of the dead worker that were not done again."""


def emulation_of(kind: str) -> tuple[Emulation, Truth]:
    """Gradients take 10 ms a layer to sum over two holders by the planner's formula, and 13 ms in truth."""
    base, truth = emulated_jobs.emulation(
        emulated_jobs.layer(
            LAYER_S,
            activation_bytes=20 * MEGABYTE,
            weight_bytes=10 * MEGABYTE,
            gradient_bytes=10 * MEGABYTE,
            optimizer_bytes=40 * MEGABYTE,
            state_bytes=50 * MEGABYTE,
        ),
        emulated_jobs.layer(
            0.0, activation_bytes=0, weight_bytes=0, gradient_bytes=0, optimizer_bytes=0, state_bytes=0
        ),
        stages=STAGES,
        microbatches=MICROBATCHES,
        steps=STEP + 2,
        among=("takeover",),
    )
    least = 0 if kind == "off" else 2
    job = replace(base.job, least_holders=least, eager_forwards=kind == "compute")
    return replace(base, job=job), truth


def emulate(server: JobServer, folder: Path, kind: str, into: Emulated, victim: int | None) -> None:
    """One job on emulated accelerators; what is measured goes ``into``."""
    flags = ["--odyssey-redundancy", kind]
    if victim is not None:
        at = f"rank={victim},step={STEP},at=backward,microbatch={MICROBATCHES // 2}"
        flags += ["--odyssey-inject", at]
    done, costs = (
        emulated_jobs.run(server, folder, *emulation_of(kind), STAGES, *flags),
        measured_costs(folder),
    )
    if victim is not None:
        (recovery,) = done.recoveries
        into.stall_s.append(taken(recovery.stall_s, "a stall"))
        into.rest_s.append(taken(recovery.redo_s, "the rest of a step"))
        into.saved.append(recovery.eager_forwards)
        return
    into.step_s += [taken(one.step_s, f"step {one.step}") for one in done.steps[1:]]
    into.modelled_s += [one.losses["modelled_s"] for one in done.steps[1:]]
    into.runtime_s += runtimes_s(done.steps[1:])
    first = next(event for event in read_journal(folder) if event["event"] == "decision")
    layout, schedule = from_jsonable(Layout, first["layout"]), schedule_from_text(first["schedule"])
    timeline = simulate(schedule, layout, costs)
    into.planned_step_s = timeline.step_s
    into.planned_bytes = max(size for _, size in timeline.peak_bytes)
    into.forwards_ahead = sum(
        one.op is Op.EAGER_FORWARD for _, program in schedule.programs for one in program
    )


def measure_emulated(rounds: int) -> tuple[dict[str, Emulated], list[rejoin.Return]]:
    """All kinds of redundancy, in turns; without one nothing can be killed. Then ranks that come back."""
    found = {kind: Emulated() for kind in KINDS}
    server = emulated_jobs.start_server()
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                for victim in (None, *(VICTIMS if kind != "off" else ())):
                    emulate(server, Path(name) / f"{number}-{kind}-{victim}", kind, found[kind], victim)
            print(f"emulated, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        returns = [rejoin.come_back(server, Path(name) / f"back-{rank}", rank) for rank in rejoin.VICTIMS]
    server.close()
    return found, returns


def emulated_result(
    found: dict[str, Emulated], returns: list[rejoin.Return], rounds: int
) -> tuple[dict[str, object], list[Bar]]:
    """What is printed of it, and the bars."""
    result: dict[str, object] = {
        f"emulated, {kind}": {
            "planned_step_s": one.planned_step_s,
            "planned_bytes": one.planned_bytes,
            "forwards_ahead": one.forwards_ahead,
            "modelled_step_s": summarize(one.modelled_s),
            "step_s": summarize(one.step_s),
            "runtime_s": summarize(one.runtime_s),
            "stall_s": summarize(one.stall_s),
            "rest_of_the_step_s": summarize(one.rest_s),
            "forwards_saved": summarize(one.saved),
        }
        for kind, one in found.items()
    }
    longest = max(one.excess for one in returns)
    result["rejoin: longest stop, s"] = max(one.excess * one.step_s for one in returns)
    state, compute = found["state"], found["compute"]
    rest = statistics.mean(compute.rest_s) / statistics.mean(state.rest_s)
    step = statistics.median(compute.step_s) / statistics.median(state.step_s)
    errors = [abs(one.planned_step_s / statistics.median(one.modelled_s) - 1) for one in found.values()]
    return result, [
        at_least("emulated kills survived", len(state.stall_s + compute.stall_s), 2 * len(VICTIMS) * rounds),
        at_most("step time, compute / state", step, 1.02),
        at_most("rest of an interrupted step, compute / state (mean)", rest, 1.0),
        at_most("planned step, off by (worst of all kinds)", max(errors), 0.08),
        at_most("longest stop while a rank comes back, share of a step", longest, 0.1),
    ]


@dataclass
class Measured:
    step_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    state_bytes: int = 0
    """Of the rank that has most, without what is on the host."""


def run(server: JobServer, folder: Path, mode: str, into: Measured, *, kill: bool) -> None:
    """One job; its step times, or its stall, go ``into``."""
    ranks, stages, flags, victim = MODES[mode]
    script = CHECKOUT / "examples" / "llama" / "pretrain_llama.py"
    argv = ["--nproc-per-node", ranks, script, *MODEL, "--pipeline-model-parallel-size", stages, *flags]
    argv += ["--odyssey-run-dir", folder]
    if kill:
        argv += ["--odyssey-inject", f"rank={victim},step={KILLED_AT},at=backward"]
    job = server.run(argv, log=folder.with_suffix(".log"), env=ENVIRONMENT)
    if job.wait(120) != 0:
        raise RuntimeError(job.log()[-3000:])
    done = read_run(folder)
    if kill:
        (recovery,) = done.recoveries
        into.stall_s.append(taken(recovery.stall_s, "a stall"))
        return
    into.step_s += [taken(one.step_s, f"step {one.step}") for one in done.steps[WARM_UP_STEPS:]]
    ends = [event for event in read_journal(folder) if event["event"] == "weights"]
    into.state_bytes = max(event["state_bytes"] for event in ends)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--emulated-only", action="store_true")
    args = parser.parse_args()
    emulated, emulated_bars = emulated_result(*measure_emulated(args.rounds), args.rounds)
    if args.emulated_only:
        return finish(emulated, emulated_bars, as_json=args.json)
    found = {mode: Measured() for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        server = JobServer.start(["tests.e2e.preload"])
        for number in range(args.rounds):
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                for kill in (False, True) if MODES[mode][3] is not None else (False,):
                    folder = Path(name) / f"{number}-{list(MODES).index(mode)}-{kill}"
                    run(server, folder, mode, found[mode], kill=kill)
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        server.close()
    result = emulated | {
        mode: {
            "state_bytes": one.state_bytes,
            "step_s": summarize(one.step_s),
            "stall_s": summarize(one.stall_s),
        }
        for mode, one in found.items()
    }

    def ratio(mode: str, base: str) -> tuple[float, float]:
        ours, theirs = found[mode], found[base]
        times = statistics.median(ours.step_s) / statistics.median(theirs.step_s)
        return ours.state_bytes / theirs.state_bytes, times

    shared, shadows = ratio("DP4, optimizer state on two", "DP4"), ratio("DP1, shadows", "DP1")
    on_host = ratio("DP4, the second one's on the host", "DP4, optimizer state on two")
    result["of DP4: bytes, step time"], result["of DP1: bytes, step time"] = shared, shadows
    result["second copy on the host, of both on the device: bytes, step time"] = on_host
    bars = [
        *emulated_bars,
        at_most("bytes with optimizer state on two of four / on all", shared[0], 0.85),
        at_most("bytes with the second copy on the host / on the device", on_host[0], 0.95),
        at_least("kills survived", sum(len(one.stall_s) for one in found.values()), 4 * args.rounds),
        at_most("stall with shadows, s (median)", statistics.median(found["DP1, shadows"].stall_s), 0.5),
    ]
    return finish(result, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
