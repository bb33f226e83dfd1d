"""How long ``decide()`` takes, up to 16,384 GPUs.

    python tests/benchmarks/planner.py --json

A worker is one tensor-parallel cell; Llama-2 on H100s by its presets; 2 x PP microbatches a pipeline.
The bars are CPU seconds of this one process, since other processes' load is not the planner's; wall time is
printed beside them. Each decision starts from the healthy plan, after ``prepare()``, as in a running job.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState, apply, initial_state
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.decide import decide, initial_plan, prepare
from odyssey_megatron.policy.presets import preset_profile
from odyssey_megatron.policy.profile import Profile
from odyssey_megatron.policy.search import search_for
from tests.benchmarks.bars import at_most, finish

CLUSTERS = (
    ("llama2-7b", 32, 1, 8, 20.0),
    ("llama2-13b", 32, 8, 2, 20.0),
    ("llama2-13b", 256, 1, 16, None),
    ("llama2-70b", 256, 8, 16, 100.0),
    ("llama2-70b", 16384, 8, 16, 1000.0),
)
"""(model, GPUs, tensor parallel, pipeline parallel, bar in milliseconds; None = only printed)."""
DEAD = (1, 8, 64)
COPIES = (0, 2)
"""Of a layer's optimizer state: one on every holder, or those of a distributed optimizer, whose places are decided too:
for that its bars are a quarter higher.
"""


def healthy_job(
    model: str, gpus: int, tp: int, pp: int, copies: int
) -> tuple[JobSpec, ClusterState, Profile, Plan]:
    """A job before its first failure; what ``prepare()`` works out is there."""
    workers = gpus // tp
    dp = workers // pp
    profile = preset_profile(model, "h100", tensor_parallel_size=tp)
    job = JobSpec(
        num_layers=len(profile.costs.layers),
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=1,
        num_microbatches=dp * 2 * pp,
        tokens_per_step=4096 * dp * 2 * pp,
        train_steps=1,
        optimizer_copies=copies,
    )
    state = initial_state(nodes=tuple(range(workers)))
    return job, state, profile, initial_plan(job, state, profile)


def measure(
    model: str, gpus: int, tp: int, pp: int, copies: int, dead: int, repeats: int
) -> dict[str, object]:
    job, full, profile, healthy = healthy_job(model, gpus, tp, pp, copies)
    workers, state = len(full.workers), full
    for i in range(dead):
        # Spread over pipelines and stages; coprime steps, so that no stage loses all its replicas.
        state = apply(state, RankDied(rank=(3 + i * 37) % workers, code=-9, cause="killed", t_s=0.0))
    cpu_ms, wall_ms = [], []
    for _ in range(repeats):
        search_for.cache_clear()  # what the decision before has worked out
        prepare(job, full, profile)
        wall, cpu = time.perf_counter(), time.process_time()
        decision = decide(
            job=job, state=state, previous=healthy, profile=profile, config=OdysseyConfig(), now_s=0.0
        )
        cpu_ms.append((time.process_time() - cpu) * 1e3)
        wall_ms.append((time.perf_counter() - wall) * 1e3)
    return {
        "gpus": gpus,
        "workers": workers,
        "dp": workers // pp,
        "pp": pp,
        "optimizer_copies": copies,
        "dead": len(state.dead),
        "cpu_ms": round(statistics.median(cpu_ms), 2),
        "wall_ms": round(statistics.median(wall_ms), 2),
        "policy": decision.plan.policy,
        "throughput_after": round(healthy.step_s / decision.plan.step_s, 4),
        "above_bound": round(decision.plan.step_s / decision.plan.bound_s - 1, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows, bars = [], []
    for model, gpus, tp, pp, limit_ms in CLUSTERS:
        for copies, dead in itertools.product(COPIES, DEAD):
            if dead * 4 <= gpus // tp:
                row = measure(model, gpus, tp, pp, copies, dead, options.repeats if gpus < 1000 else 1)
                rows.append(row)
                if limit_ms is not None:
                    shared = "_distributed_optimizer" if copies else ""
                    name = f"{gpus}_gpus_tp{tp}{shared}_{dead}_dead_cpu_ms"
                    bars.append(at_most(name, float(str(row["cpu_ms"])), limit_ms * (1.25 if copies else 1)))
                if not options.json:
                    print(row, flush=True)
    return finish({"decisions": rows} if options.json else {}, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
