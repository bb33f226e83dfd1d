"""Failure traces on 32 GPUs: average throughput beside other systems and beside a single policy.

    python tests/benchmarks/traces.py --json

Llama-2 7B and 13B on A100s; one worker dies every 6 h, 2 h, 30 min or 10 min until half are left, in 24 random
orders; and 24 random traces with repairs. Throughputs are means over the 24: a layout that is worth its risk
may still lose its layers to the very next failure. Every system has the same costs, the same simulator, the same layer
splits, shares and seats, and two seconds for new groups (``odyssey_megatron/policy/baselines.py`` says what each is
granted). All settings are printed, also those where the others are strong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.policy.baselines import World
from odyssey_megatron.policy.presets import preset_profile
from odyssey_megatron.policy.trace import compare, monotone, with_repairs
from odyssey_megatron.policy.traceplay import MONOTONE_S, SYSTEMS
from tests.benchmarks.bars import at_least, finish

GPUS = 32
SEEDS = range(24)
SETTINGS = (
    ("llama2-7b", 4, 8),
    ("llama2-7b", 8, 8),
    ("llama2-7b", 2, 8),
    ("llama2-13b", 8, 16),
    ("llama2-13b", 8, 8),
    ("llama2-13b", 16, 16),
)
"""(model, pipeline size, microbatches a pipeline)."""


def world(model: str, pp: int, microbatches: int) -> World:
    profile = replace(preset_profile(model, "a100"), group_build_s=2.0)
    total = GPUS // pp * microbatches
    job = JobSpec(
        num_layers=len(profile.costs.layers),
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=1,
        num_microbatches=total,
        tokens_per_step=4096 * total,
        train_steps=1,
    )
    return World(job=job, profile=profile, workers=tuple(range(GPUS)), mtbf_s=0.0)


def rates(setting: tuple[str, int, int], interval_s: float | None) -> dict[str, float]:
    """System -> tokens/s, mean over :data:`SEEDS`. Without an interval: with repairs, a failure an hour on average."""
    job, means = world(*setting), dict[str, float]()
    for seed in SEEDS:
        if interval_s is None:
            trace = with_repairs(
                job.workers, mtbf_s=3600.0, repair_s=4 * 3600.0, duration_s=86400.0, seed=seed
            )
        else:
            trace = monotone(job.workers, interval_s, GPUS // 2, seed)
        for one in compare(SYSTEMS, job, trace):
            means[one.system] = means.get(one.system, 0.0) + one.tokens_per_s / len(SEEDS)
    return means


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two settings, two intervals")
    options = parser.parse_args()
    settings, intervals = (SETTINGS[1:3], MONOTONE_S[::3]) if options.quick else (SETTINGS, MONOTONE_S)
    cases = list(itertools.product(settings, (*intervals, None)))
    rows: list[dict[str, object]] = []
    ratios: dict[str, list[float]] = {}
    with ProcessPoolExecutor() as pool:
        for case, means in zip(cases, pool.map(rates, *zip(*cases, strict=True)), strict=True):
            (model, pp, microbatches), interval_s = case
            ours = means.pop("odyssey")
            row = {name: round(ours / rate, 4) if rate else None for name, rate in sorted(means.items())}
            row["best single policy"] = round(ours / max(means["only reroute"], means["only replan"]), 4)
            for name, ratio in row.items():
                ratios.setdefault(name, []).append(ratio or 0.0)
            when = f"one every {interval_s:g} s" if interval_s else "random, mean 1 h, repair 4 h"
            setting = f"{model} PP{pp} M{microbatches}, {when}"
            rows.append({"setting": setting, "tokens_per_s": round(ours), "odyssey_over": row})
            if not options.json:
                print(setting, round(ours), row, flush=True)
    bars = [
        at_least("best_over_oobleck", max(ratios["oobleck"]), 1.30),
        at_least("best_over_recycle", max(ratios["recycle"]), 1.45),
        at_least("worst_over_best_single_policy", min(ratios["best single policy"]), 1.0),
    ]
    return finish({"settings": rows} if options.json else {}, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
