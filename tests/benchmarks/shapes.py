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

**(b)** Optimizer slices, measured beside Megatron's own distributed optimizer: the example's model on 8 CPU ranks, PP2
x DP4, from the same weights on the same microbatches; runs alternate. Bytes are those of optimizer state on the fullest
rank, which keeps each slice twice, where Megatron has it once. Step times are from commit to commit, on gloo and two
cores: they show what is sent, and this project's own Python. Gloo's reduce-scatter sends as much as its all-reduce, on
both sides; what NCCL's saves, and what runs beside one another on a GPU, they do not show.
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
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState, initial_state
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.profile import Profile
from odyssey_megatron.studies.presets import preset_profile
from tests.benchmarks import overhead
from tests.benchmarks.bars import at_least, at_most, finish, summarize

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


def throughput(
    job: JobSpec, profile: Profile, state: ClusterState, healthy: Plan, dead: Sequence[int], *, shrinks: bool
) -> float:
    """Beside the healthy job's, after the GPUs ``dead`` have died one by one; 0.0 if that has ended the job."""
    config, size = OdysseyConfig(horizon_s=1e9, mtbf_s=1e9), job.cell_size
    plan, lost = healthy, Counter[int]()
    for gpu in dead:
        worker = gpu // size
        lost[worker] += 1
        steps = [with_worker(state, worker, alive=False, each=1)]
        if left := max((one for one in job.cell_sizes if shrinks and one <= size - lost[worker]), default=0):
            steps.append(with_worker(state, worker, alive=True, each=size // left))
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


def with_worker(state: ClusterState, worker: int, *, alive: bool, each: int) -> ClusterState:
    """``state`` in which ``worker`` is that."""
    changed = (
        replace(w.whole.smaller(each), alive=alive) if w.worker == worker else w for w in state.workers
    )
    return replace(state, workers=tuple(changed))


def measured(
    model: str, accelerator: str, tp: int, cp: int, ep: int, dp: int, pp: int, microbatches: int
) -> dict[str, Any]:
    """Of one job."""
    profile = preset_profile(
        model,
        accelerator,
        tensor_parallel_size=tp,
        context_parallel_size=cp,
        expert_parts=ep * tp if ep > 1 else 0,
    )
    job = JobSpec(
        num_layers=len(profile.costs.layers),
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        num_microbatches=dp * microbatches,
        tokens_per_step=dp * microbatches,
        train_steps=1,
    )
    cell, rng = job.cell_size, random.Random(0)
    gpus = cell * dp * pp
    state = initial_state(
        nodes=tuple(gpu // 8 for gpu in range(gpus)), cell_size=cell, context=job.alike_ranks
    )
    healthy = initial_plan(job, state, profile)
    draws = [(cell + 1,), *(tuple(rng.sample(range(gpus), gpus // 8)) for _ in range(DRAWS))]
    both = [
        [throughput(job, profile, state, healthy, dead, shrinks=shrinks) for shrinks in (False, True)]
        for dead in draws
    ]
    gains = [smaller / without for without, smaller in both[1:] if without]
    return {
        "setting": f"{model} {accelerator} TP{tp} CP{cp} EP{ep} x {dp} PP{pp}",
        "one_lost": both[0],
        "gain_of_one": both[0][1] / both[0][0],
        "gain_of_many": statistics.median(gains) if gains else None,
        "jobs_ended": [sum(not one[which] for one in both[1:]) for which in (0, 1)],
    }


SLICED = (
    "--pipeline-model-parallel-size 2 --hidden-size 256 --ffn-hidden-size 768 --use-distributed-optimizer"
)


def slices_measured(rounds: int, steps: int) -> dict[str, Any]:
    """Of jobs without a failure, with our distributed optimizer and with Megatron's own."""
    step_s: dict[str, list[float]] = {"odyssey": [], "megatron": []}
    num_bytes: dict[str, int] = {}
    gap = 0.0
    for number in range(rounds):
        losses = {}
        # Each second round the other way round: a slow drift of the machine cancels.
        order = [("odyssey", overhead.odyssey), ("megatron", overhead.stock)]
        for name, run in order if number % 2 == 0 else reversed(order):
            with tempfile.TemporaryDirectory() as folder:
                committed_s, losses[name] = run(steps, Path(folder), SLICED)
                if name == "odyssey":
                    ends = [one for one in read_journal(Path(folder) / "run") if one["event"] == "weights"]
                    num_bytes[name] = max(one["optimizer_bytes"] for one in ends)
                else:
                    num_bytes[name] = json.loads((Path(folder) / "stock.json").read_text())["optimizer_bytes"]
            step_s[name] += [after - before for before, after in pairwise(committed_s)]
        pairs = zip(losses["odyssey"], losses["megatron"], strict=True)
        gap = max(gap, max(abs(a - b) / b for a, b in pairs))
    return {"optimizer_bytes": num_bytes, "loss_gap": gap} | {
        f"{name}_step_s": summarize(times) for name, times in step_s.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="of (b); 0: (a) alone")
    parser.add_argument("--steps", type=int, default=12, help="of (b)")
    args = parser.parse_args()
    rows = [measured(*setting) for setting in SETTINGS]
    bars = []
    for kind in ("gain_of_one", "gain_of_many"):
        values = [row[kind] for row in rows if row[kind] is not None]
        bars.append(at_least(f"{kind} (least)", min(values, default=math.nan), 1.0))
    if not args.rounds:
        return finish({"(a), simulated": rows}, bars, as_json=args.json)
    cut = slices_measured(args.rounds, args.steps)
    ours, theirs = (cut["optimizer_bytes"][name] for name in ("odyssey", "megatron"))
    bars.append(at_most("optimizer state of the fullest rank / Megatron's share", ours / theirs, 2.1))
    ours_s, theirs_s = (cut[f"{name}_step_s"]["median"] for name in ("odyssey", "megatron"))
    bars.append(
        at_most("median step with slices / with Megatron's distributed optimizer", ours_s / theirs_s, 1.0)
    )
    bars.append(at_most("largest relative loss difference (float32)", cut["loss_gap"], 1e-5))
    return finish({"(a), simulated": rows, "(b), measured": cut}, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
