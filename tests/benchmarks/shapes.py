"""What cells of other shapes are worth.

    python tests/benchmarks/shapes.py --json

**(a)** Cells that go on with fewer ranks: SIMULATED, by this planner's clock.

Single GPUs die in jobs of published models, whose workers are cells of eight or four of them, tensor-parallel ones
alone or four times two context-parallel ones, or gangs of eight, over which experts are spread. Without shrinking a
cell is lost with any of its GPUs. With it the cell goes on with the largest part of its size that its living ranks
allow, 4 of 8, or 2, or 1, if that pays and memory allows. A smaller cell is taken to do its share of what a whole one
does: no GPU has been asked. Layouts, schedules and step times on both sides are ``decide()``'s; a gain is throughput
with shrinking beside that without.

``gain_of_one``: one GPU is lost, so a cell without shrinking, and half of one with it. ``gain_of_many``: an eighth of
all GPUs has died, one by one, wherever chance puts them: the median of those of four draws that a job survives without
shrinking. ``jobs_ended``: of how many of the four it does not, without and with. ResiHP (arXiv 2605.06374, its
ablation) has 2.0 to 2.8 times ReCycle's throughput for keeping the rest of a cell, at up to half of all GPUs lost,
where no whole cell is left.

**(a), by the wall clock**: four jobs of emulated accelerators (``tests/execute/emulated.py``), whose cells are eight
tensor-parallel ranks: all of the product but the compute, which is a sleep, for half of a cell twice as long. What
sleeps and messages take the planner does not see (``emulated_jobs.uneven``): it goes by what the ranks measure. One
rank is killed in mid-step, and for good as soon as it has come back. ``gain`` is the median step without shrinking over
that with it, once the job has gone over to its last plan, and ``planned`` the same by the planner's clock at the costs
that each job has measured; ``modelled`` the same by what compute and links took, ``error`` how far the planner's clock
is off that, and ``runtime_s`` the rest of the wall clock. ``back_s`` is from the kill on until a step was committed
with what is left of the cell computing. What half a cell really does of what a whole one does no clock here shows.

**(b)** Optimizer slices, measured beside Megatron's own distributed optimizer: the example's model on 8 CPU ranks, PP2
x DP4, PP2 x CP2 x DP2, and PP2 x EP2 x DP2 with four experts, from the same weights on the same microbatches; runs
alternate. Both sides train in float64, too, where only the order of sums may differ; there they must be equal to 1e-10.
In float32 their norms are held against a float64 run from the same weights: Megatron-Core sums its norm in float32, and
so is further from it than this project, which sums in float64. Bytes are those of optimizer state on the fullest rank,
which keeps each slice twice, where Megatron has it once. Step times are from commit to commit, on gloo and two cores:
they show what is sent, and this project's own Python. Gloo's reduce-scatter sends as much as its all-reduce, on both
sides; what NCCL's saves, and what runs beside one another on a GPU, they do not show.

**(c)** A gang of eight, over which experts are spread, loses a rank: throughput beside that of the healthy job, whose
layout is Megatron's, simulated as in (a). The bars are 0.97 of what the other ranks of its stage's gangs are beside
all. Of the gang itself seven ranks go on, or four if each of them has a single expert.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState, initial_state
from odyssey_megatron.codec import from_jsonable
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.steps import CommittedStep
from odyssey_megatron.plan.checking.simulate import simulate
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.schedule import schedule_from_text
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.studies.presets import ACCELERATORS, MODELS
from odyssey_megatron.upstream.smaller import of_flags
from tests.benchmarks import emulated_jobs, overhead
from tests.benchmarks.bars import Bar, at_least, at_most, finish, largest_difference, summarize, taken
from tests.launch.jobserver import JobServer

SETTINGS = (
    ("llama2-13b", "a100", 8, 1, 1, 4, 2, 32),
    ("llama2-13b", "a100", 4, 1, 1, 2, 4, 32),
    ("llama2-70b", "h100", 8, 1, 1, 2, 8, 32),
    ("llama2-70b", "h100", 8, 1, 1, 4, 8, 32),
    ("llama2-13b", "a100", 4, 2, 1, 4, 2, 32),
    ("llama2-70b", "h100", 4, 2, 1, 4, 8, 32),
    ("mixtral-8x7b", "h100", 1, 1, 8, 4, 4, 32),
    ("qwen3-30b-a3b", "h100", 1, 1, 8, 4, 2, 32),
)
"""(model, GPU, tensor, context and expert parallel, workers of a stage, pipeline parallel, microbatches a pipeline, of
each lane).
"""
DRAWS = 4
GANGS = (
    ("mixtral-8x7b", "h100", 1, 1, 8, 2, 4, 32),
    ("mixtral-8x7b", "h100", 1, 1, 8, 4, 4, 32),
    ("qwen3-30b-a3b", "h100", 1, 1, 8, 2, 2, 32),
    ("qwen3-30b-a3b", "h100", 1, 1, 8, 4, 2, 32),
)
""":data:`SETTINGS` of (c)."""


def throughput(
    job: JobSpec, profile: Profile, state: ClusterState, healthy: Plan, dead: Sequence[int], *, shrinks: bool
) -> float:
    """Beside the healthy job's, after the GPUs ``dead`` have died one by one; 0.0 if that has ended the job."""
    config, size = OdysseyConfig(horizon_s=1e9, mtbf_s=1e9), job.cell_size
    plan, lost = healthy, Counter[int]()
    for gpu in dead:
        worker = gpu // size
        lost[worker] += 1
        steps = [with_worker(state, worker, alive=False, size=0)]
        if left := max((one for one in job.cell_sizes if shrinks and one <= size - lost[worker]), default=0):
            steps.append(with_worker(state, worker, alive=True, size=left))
        for state in steps:
            try:
                plan = decide(
                    job=job,
                    state=state,
                    previous=plan,
                    profile=profile,
                    config=config,
                    now_s=0.0,
                    home=healthy.layout,
                ).plan
            except (LayersLost, PlanInfeasible):
                return 0.0
    return healthy.step_s / plan.step_s


def with_worker(state: ClusterState, worker: int, *, alive: bool, size: int) -> ClusterState:
    """``state`` in which ``worker`` is that."""
    changed = (
        replace(w.whole.smaller(size), alive=alive) if w.worker == worker else w for w in state.workers
    )
    return replace(state, workers=tuple(changed))


@dataclass(frozen=True, kw_only=True)
class Job:
    """One of ``SETTINGS``, or of ``GANGS``, that nothing has happened to."""

    spec: JobSpec
    profile: Profile
    state: ClusterState
    healthy: Plan
    name: str

    @classmethod
    def of(
        cls, model: str, accelerator: str, tp: int, cp: int, ep: int, dp: int, pp: int, microbatches: int
    ) -> Job:
        known = MODELS[model]
        profile = known.profile(
            ACCELERATORS[accelerator],
            tensor_parallel_size=tp,
            context_parallel_size=cp,
            expert_parts=ep * tp if ep > 1 else 0,
        )
        count = known.experts.count if ep > 1 and known.experts else 0
        kept = of_flags({"num_experts": count, "expert_model_parallel_size": ep})
        spec = JobSpec(
            num_layers=len(profile.costs.layers),
            pipeline_model_parallel_size=pp,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            num_experts=count,
            even_gangs_only=kept.even,
            experts_work=known.experts_work if ep > 1 else 0.0,
            num_microbatches=dp * microbatches,
            tokens_per_step=dp * microbatches,
            train_steps=1,
        )
        nodes = tuple(gpu // 8 for gpu in range(spec.cell_size * dp * pp))
        state = initial_state(nodes=nodes, **spec.cells)
        return cls(
            spec=spec,
            profile=profile,
            state=state,
            healthy=initial_plan(spec, state, profile),
            name=f"{model} {accelerator} TP{tp} CP{cp} EP{ep} x {dp} PP{pp}",
        )

    def after(self, dead: Sequence[int], *, shrinks: bool) -> float:
        """Throughput beside that of the healthy job, after the GPUs ``dead`` have died one by one; 0.0 if that has
        ended the job.
        """
        return throughput(self.spec, self.profile, self.state, self.healthy, dead, shrinks=shrinks)


def measured(job: Job) -> dict[str, Any]:
    """(a) of one."""
    rng, gpus = random.Random(0), len(job.state.ranks)
    draws = [
        (job.spec.cell_size + 1,),
        *(tuple(rng.sample(range(gpus), gpus // 8)) for _ in range(DRAWS)),
    ]
    both = [[job.after(dead, shrinks=shrinks) for shrinks in (False, True)] for dead in draws]
    gains = [smaller / without for without, smaller in both[1:] if without]
    return {
        "setting": job.name,
        "one_lost": both[0],
        "gain_of_one": both[0][1] / both[0][0],
        "gain_of_many": statistics.median(gains) if gains else None,
        "jobs_ended": [sum(not one[which] for one in both[1:]) for which in (0, 1)],
    }


CELLS = ((2, 1), (3, 1), (4, 1), (2, 2))
"""(data parallel, pipeline parallel) of the emulated jobs, whose workers are cells of eight ranks."""
KILLED_AT, STEPS, LAYER_S, MICROBATCHES = emulated_jobs.KNOWN_AT, 24, 0.016, 8
"""Microbatches of a pipeline. Three times ``LAYER_S`` a layer, of which there are two a stage."""


@dataclass(frozen=True, kw_only=True)
class Walked:
    """An emulated job that has lost a rank for good."""

    healthy_s: float
    step_s: float
    planned_s: float
    modelled_s: float
    """What compute and links took in the last plan's steps; median."""
    back_s: float | None
    """None: what is left of the cell never computed."""


def walked(server: JobServer, folder: Path, dp: int, pp: int, *, shrinks: bool) -> Walked:
    """Steps of one, by the clock on the wall."""
    middle, end = emulated_jobs.layer(LAYER_S), emulated_jobs.layer(0.0)
    base, truth = emulated_jobs.emulation(middle, end, stages=pp, microbatches=dp * MICROBATCHES, steps=STEPS)
    emulation = replace(base, job=replace(base.job, tensor_model_parallel_size=8))
    ranks, dies = dp * pp * 8, 9
    inject = f"rank={dies},step={KILLED_AT},at=backward;rank={dies},step=-1,at=groups,incarnation=1"
    run = emulated_jobs.run(
        server, folder, emulation, truth, ranks,
        "--odyssey-respawn", 1, "--odyssey-shrink", "auto" if shrinks else "off", "--odyssey-inject", inject,
        "--odyssey-hang-s", 30, "--odyssey-build-timeout-s", 30, within_s=300,
    )  # fmt: skip
    events, costs = list(read_journal(folder)), emulated_jobs.measured_costs(folder)
    of_plans = {one["generation"]: one for one in events if one["event"] == "decision"}
    last = of_plans[run.steps[-1].generation]
    layout, schedule = from_jsonable(Layout, last["layout"]), schedule_from_text(last["schedule"])
    speeds = {worker: 1 / -(-last["cell_size"] // size) for worker, size in last["shapes"]}
    computing = {hop.worker for route in layout.routes for hop in route.hops}
    back_s = None
    if computing & speeds.keys():
        first = min(one["t_s"] for one in events if one["event"] == "injected")
        with_it = min(one.generation for one in run.steps if of_plans[one.generation]["shapes"])
        back_s = min(
            one["t_s"] - first
            for one in events
            if one["event"] == "step_committed" and one["generation"] >= with_it
        )

    def median_s(generation: int) -> float:
        return statistics.median(taken(one.interval_s, f"step {one.step}") for one in of(generation))

    def of(generation: int) -> list[CommittedStep]:
        return [one for one in run.steps if one.generation == generation][1:]

    return Walked(
        healthy_s=median_s(run.steps[0].generation),
        step_s=median_s(run.steps[-1].generation),
        planned_s=simulate(schedule, layout, costs, speeds).step_s,
        modelled_s=statistics.median(one.losses["modelled_s"] for one in of(run.steps[-1].generation)),
        back_s=back_s,
    )


def by_the_wall_clock() -> list[dict[str, Any]]:
    """(a) on emulated accelerators."""
    server, rows = emulated_jobs.start_server(), []
    with tempfile.TemporaryDirectory() as name:
        for dp, pp in CELLS:
            without, smaller = (
                walked(server, Path(name) / f"{dp}-{pp}-{shrinks}", dp, pp, shrinks=shrinks)
                for shrinks in (False, True)
            )
            rows.append(
                {
                    "setting": f"TP8 x {dp} PP{pp}",
                    "step_s, healthy, without, with": [smaller.healthy_s, without.step_s, smaller.step_s],
                    "gain": without.step_s / smaller.step_s,
                    "planned": without.planned_s / smaller.planned_s,
                    "modelled": without.modelled_s / smaller.modelled_s,
                    "error, without, with": [
                        abs(one.planned_s / one.modelled_s - 1) for one in (without, smaller)
                    ],
                    "runtime_s, without, with": [one.step_s - one.modelled_s for one in (without, smaller)],
                    "back_s": smaller.back_s,
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    server.close()
    return rows


_SLICED = (
    "--pipeline-model-parallel-size 2 --hidden-size 256 --ffn-hidden-size 768 --use-distributed-optimizer"
)
SLICED = {
    "DP4": _SLICED,
    "CP2 x DP2": f"{_SLICED} --context-parallel-size 2",
    "EP2 x DP2": f"{_SLICED} --num-experts 4 --moe-router-load-balancing-type none --expert-model-parallel-size 2",
}


def slices_measured(flags: str, rounds: int, steps: int) -> dict[str, Any]:
    """Of jobs without a failure, with our distributed optimizer and with Megatron's own."""
    step_s: dict[str, list[float]] = {"odyssey": [], "megatron": []}
    num_bytes: dict[str, int] = {}
    trained: dict[str, list[overhead.Trained]] = {"odyssey": [], "megatron": []}
    sides = {"odyssey": overhead.odyssey, "megatron": overhead.stock}
    for number in range(rounds):
        # Each second round the other way round: a slow drift of the machine cancels.
        for name in sides if number % 2 == 0 else reversed(sides):
            with tempfile.TemporaryDirectory() as folder:
                one = sides[name](steps, Path(folder), flags)
                if name == "odyssey":
                    ends = [one for one in read_journal(Path(folder) / "run") if one["event"] == "weights"]
                    num_bytes[name] = max(one["optimizer_bytes"] for one in ends)
                else:
                    num_bytes[name] = json.loads((Path(folder) / "stock.json").read_text())["optimizer_bytes"]
            step_s[name] += [after - before for before, after in pairwise(one.committed_s)]
            trained[name].append(one)
    in_float64 = f"{flags} --odyssey-float64 on"
    exact = {name: in_folder(run, steps, in_float64) for name, run in sides.items()}
    truth = in_folder(overhead.stock, steps, f"{in_float64} --drawn-in-float32")
    gaps = {
        "float64": gap([exact["odyssey"]], [exact["megatron"]]),
        "float32": gap(*trained.values()),
        **{f"{name}, from float64": gap(ones, [truth] * rounds) for name, ones in trained.items()},
    }
    times = {f"{name}_step_s": summarize(each_s) for name, each_s in step_s.items()}
    return {"optimizer_bytes": num_bytes, "gaps": gaps, **times}


def in_folder(run: Callable[[int, Path, str], overhead.Trained], steps: int, flags: str) -> overhead.Trained:
    with tempfile.TemporaryDirectory() as folder:
        return run(steps, Path(folder), flags)


def gap(ours: Sequence[overhead.Trained], theirs: Sequence[overhead.Trained]) -> dict[str, float]:
    """The largest differences of losses and of gradient norms."""
    return {
        what: largest_difference(
            *([one for run in side for one in getattr(run, what)] for side in (ours, theirs))
        )
        for what in ("losses", "grad_norms")
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="of (b); 0: none")
    parser.add_argument("--emulated-only", action="store_true", help="(a) by the wall clock alone")
    parser.add_argument("--steps", type=int, default=12, help="of (b)")
    parser.add_argument("--slices-only", action="store_true", help="(b) alone")
    args = parser.parse_args()
    if args.slices_only:
        return finish(*sliced(args.rounds, args.steps), as_json=args.json)
    emulated = by_the_wall_clock()
    bars = [
        at_least("(a) by the wall clock: gain (least)", min(one["gain"] for one in emulated), 1.0),
        at_least("... gain / planned (least)", min(one["gain"] / one["planned"] for one in emulated), 0.95),
    ]
    if args.emulated_only:
        return finish({"(a), emulated": emulated}, bars, as_json=args.json)
    gangs = [Job.of(*setting) for setting in GANGS]
    lost = {one.name: one.after((one.spec.cell_size + 1,), shrinks=True) for one in gangs}
    for (*_, dp, _, _), (name, value) in zip(GANGS, lost.items(), strict=True):
        bars.append(at_least(f"(c) {name}, a rank lost / healthy", value, 0.97 * (8 * dp - 1) / (8 * dp)))
    rows = [measured(Job.of(*setting)) for setting in SETTINGS]
    for kind in ("gain_of_one", "gain_of_many"):
        values = [row[kind] for row in rows if row[kind] is not None]
        bars.append(at_least(f"{kind} (least)", min(values, default=math.nan), 1.0))
    result = {"(a), emulated": emulated, "(a), simulated": rows, "(c), simulated": lost}
    if not args.rounds:
        return finish(result, bars, as_json=args.json)
    cut, more = sliced(args.rounds, args.steps)
    return finish(result | cut, [*bars, *more], as_json=args.json)


def sliced(rounds: int, steps: int) -> tuple[dict[str, Any], list[Bar]]:
    """(b) and its bars."""
    cut = {name: slices_measured(flags, rounds, steps) for name, flags in SLICED.items()}
    return {"(b), measured": cut}, [bar for name, found in cut.items() for bar in of_slices(name, found)]


def of_slices(name: str, found: dict[str, Any]) -> list[Bar]:
    """The bars of :func:`slices_measured`."""
    ours, theirs = (found["optimizer_bytes"][of] for of in ("odyssey", "megatron"))
    ours_s, theirs_s = (found[f"{of}_step_s"]["median"] for of in ("odyssey", "megatron"))
    exact, rounded = found["gaps"]["float64"], found["gaps"]["odyssey, from float64"]
    return [
        at_most(f"(b) {name}, optimizer state of the fullest rank / Megatron's share", ours / theirs, 2.1),
        at_most(
            "... median step with slices / with Megatron's distributed optimizer", ours_s / theirs_s, 1.0
        ),
        at_most("... largest relative loss difference (float64)", exact["losses"], 1e-10),
        at_most("... largest relative difference of gradient norms (float64)", exact["grad_norms"], 1e-10),
        at_most("... largest relative loss difference (float32)", found["gaps"]["float32"]["losses"], 1e-5),
        at_most(
            "... largest relative difference of gradient norms, float32 from float64",
            rounded["grad_norms"],
            1e-5,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
