"""Failure traces on 32 GPUs, simulated: average throughput beside our models of other systems, and a single policy.

    python tests/benchmarks/traces.py --json

Llama-2 7B and 13B on A100s; one worker dies every 6 h, 2 h, 30 min or 10 min until half are left, in 24 random
orders; and 24 random traces with repairs. Throughputs are means over the 24: a layout that is worth its risk
may still lose its layers to the very next failure. Every system has the same costs, the same simulator, the same layer
splits, shares and seats, and two seconds for new groups (``odyssey_megatron/studies/baselines.py`` says what each is
granted). All settings are printed, also those where the others are strong.

``odyssey_over`` a system is the product of two gains: ``healthy``, our schedule without a failure beside theirs (fused
1F1B), and ``handling``, the share of our healthy throughput that is left on the trace beside the share of theirs. Bars
are on the least and the median of all settings. Not fair yet: ReCycle has no failure normalisation, so that a second
loss of one stage hits it as placed; Oobleck starts from our user's layout, keeps its pipelines on a loss, and does not
choose a new set of templates.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.config import policies
from odyssey_megatron.studies.baselines import World
from odyssey_megatron.studies.presets import preset_profile
from odyssey_megatron.studies.trace import compare, monotone, with_repairs
from odyssey_megatron.studies.traceplay import MONOTONE_S, SYSTEMS
from tests.benchmarks.bars import at_least, finish

SINGLE = [f"only {policy}" for policy in policies() if policy != "auto"]
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


def rates(setting: tuple[str, int, int], interval_s: float | None) -> dict[str, tuple[float, float]]:
    """System -> tokens/s, mean over :data:`SEEDS`, and without a failure.

    Without an interval: with repairs, a failure an hour on average.
    """
    job, means, healthy = world(*setting), dict[str, float](), dict[str, float]()
    for seed in SEEDS:
        if interval_s is None:
            trace = with_repairs(
                job.workers, mtbf_s=3600.0, repair_s=4 * 3600.0, duration_s=86400.0, seed=seed
            )
        else:
            trace = monotone(job.workers, interval_s, GPUS // 2, seed)
        for one in compare(SYSTEMS, job, trace):
            means[one.system] = means.get(one.system, 0.0) + one.tokens_per_s / len(SEEDS)
            healthy[one.system] = one.history[0][1]
    return {system: (mean, healthy[system]) for system, mean in means.items()}


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
    handling: dict[str, list[float]] = {}
    with ProcessPoolExecutor() as pool:
        for case, means in zip(cases, pool.map(rates, *zip(*cases, strict=True)), strict=True):
            (model, pp, microbatches), interval_s = case
            ours, ours_healthy = means.pop("odyssey")
            row = {}
            for name, (rate, healthy) in sorted(means.items()):
                if rate:  # one that does not fit into memory trains nothing
                    whole, without = ours / rate, ours_healthy / healthy
                    ratios.setdefault(name, []).append(whole)
                    handling.setdefault(name, []).append(whole / without)
                    row[name] = {
                        "over": round(whole, 4), "healthy": round(without, 4), "handling": round(whole / without, 4)
                    }  # fmt: skip
            single = ours / max(means[name][0] for name in SINGLE)
            row["best single policy"] = {"over": round(single, 4)}
            ratios.setdefault("best single policy", []).append(single)
            when = f"one every {interval_s:g} s" if interval_s else "random, mean 1 h, repair 4 h"
            setting = f"{model} PP{pp} M{microbatches}, {when}"
            rows.append({"setting": setting, "tokens_per_s": round(ours), "odyssey_over": row})
            if not options.json:
                print(setting, round(ours), row, flush=True)
    bars = [
        at_least(
            "settings in which Oobleck and ReCycle train",
            len(ratios["oobleck"] + ratios["recycle"]),
            2 * len(cases),
        ),
        *(
            at_least(f"over {name} ({which})", of(ratios[name]), 1.0)
            for name in ("oobleck", "recycle", "chameleon", "best single policy")
            for which, of in (("least", min), ("median", statistics.median))
        ),
    ]
    spread = {
        f"{what} {name}": {"least": min(found), "median": statistics.median(found), "most": max(found)}
        for what, by_name in (("over", ratios), ("handling failures, over", handling))
        for name, found in by_name.items()
    }
    return finish(({"settings": rows} if options.json else {}) | spread, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
