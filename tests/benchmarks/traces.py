"""Failure traces on 32 GPUs, simulated: average throughput beside our models of other systems, and a single policy.

    python tests/benchmarks/traces.py --json

Llama-2 7B and 13B on A100s; one worker dies every 6 h, 2 h, 30 min or 10 min until half are left, in eight random
orders; and eight random traces with repairs. Throughputs are means over the eight: a layout that is worth its risk
may still lose its layers to the very next failure. Every system has the same costs, the same simulator, the same layer
splits, shares and seats, two seconds for new groups, and the memory that 1F1B needs in the launch line's layout, if
that is more than the GPU's (``odyssey_megatron/studies`` says what each is granted). ReCycle normalises failures;
Oobleck starts with its best set of templates. Each is there as its paper has it, and with our order of what is in its
layouts ("our order"), which shows what its rules are worth beside ours. All settings are printed, also those where the
others are strong.

``over`` a system is the product of two gains: ``healthy``, our schedule without a failure beside theirs (fused
1F1B), and ``handling``, the share of our healthy throughput that is left on the trace beside the share of theirs. We
start as they do: where the launch line says, and beside Oobleck with the best pipelines (``--odyssey-layout auto``).
``ceiling`` is what we could not be above: the best of our healthy throughputs times the share of GPUs that live,
without a moment lost, beside theirs. Bars are on the least and the median of all settings, and on restarts from a
checkpoint. A median's bar that is above the median of the ceilings is that of the ceilings.
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
from odyssey_megatron.config import OdysseyConfig, policies
from odyssey_megatron.plan.placing.memory import fullest_bytes
from odyssey_megatron.studies.baselines import World, megatron_on
from odyssey_megatron.studies.playing import compare
from odyssey_megatron.studies.trace import ClusterChange, FailureTrace, monotone, with_repairs
from odyssey_megatron.studies.traceplay import MONOTONE_S, played_for
from tests.benchmarks.bars import Bar, at_least, at_most, finish
from tests.plan.samples import preset_profile

OVER = {"recycle": 1.45, "oobleck": 1.30, "chameleon": 1.0} | {
    f"{name}, our order": least for name, least in (("recycle", 1.05), ("oobleck", 1.05), ("chameleon", 1.0))
}
"""What we are held to beside each, in the median, or to the ceiling's if that is less; in no setting below 1."""
SYSTEMS = played_for(OdysseyConfig(interrupted_step="redo", backend="gloo"))
"""All do an interrupted step again, and so keep no messages for it; and nobody's communicators take memory."""
SINGLE = [f"only {policy}" for policy in policies() if policy != "auto"]
CEILING = "ceiling"
GPUS = 32
SEEDS = range(8)
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
    whole = World(job=job, profile=profile, workers=tuple(range(GPUS)), mtbf_s=0.0)
    needs = fullest_bytes(megatron_on(job, whole.workers), profile.costs)
    costs = replace(profile.costs, memory_bytes=max(needs, profile.costs.memory_bytes or 0))
    return replace(whole, profile=replace(profile, costs=costs))


def rates(setting: tuple[str, int, int], interval_s: float | None) -> dict[str, tuple[float, float, int]]:
    """System -> tokens/s, mean over :data:`SEEDS`, and without a failure, and restarts in all of them.

    Without an interval: with repairs, a failure an hour on average.
    """
    job, found = world(*setting), dict[str, tuple[float, float, int]]()
    for seed in SEEDS:
        if interval_s is None:
            trace = with_repairs(
                job.workers, mtbf_s=3600.0, repair_s=4 * 3600.0, duration_s=86400.0, seed=seed
            )
        else:
            trace = monotone(job.workers, interval_s, GPUS // 2, seed)
        played = compare(SYSTEMS, job, trace)
        best = max(one.history[0][1] for one in played if one.system.startswith("odyssey"))
        mean = found.get(CEILING, (0.0, 0.0, 0))[0]
        found[CEILING] = (mean + best * alive_share(trace, GPUS) / len(SEEDS), best, 0)
        for one in played:
            mean, _, restarts = found.get(one.system, (0.0, 0.0, 0))
            healthy = one.history[0][1]
            found[one.system] = (mean + one.tokens_per_s / len(SEEDS), healthy, restarts + one.restarts)
    return found


def alive_share(trace: FailureTrace, gpus: int) -> float:
    """Of the GPUs, the mean over the trace."""
    alive, before_s, sum_s = gpus, 0.0, 0.0
    for one in (*trace.changes, ClusterChange(t_s=trace.duration_s)):
        sum_s += alive * (one.t_s - before_s)
        alive, before_s = alive + len(one.joined) - len(one.died), one.t_s
    return sum_s / gpus / trace.duration_s


def beside(found: dict[str, tuple[float, float, int]], name: str) -> dict[str, float]:
    """Us beside the system ``name``, which must train."""
    own = "odyssey, layout auto" if name.startswith("oobleck") else "odyssey"
    (ours, ours_healthy, ours_restarts), (rate, healthy, restarts) = found[own], found[name]
    whole, without = ours / rate, ours_healthy / healthy
    more = ours_restarts - restarts
    ceiling = found[CEILING][0] / rate
    return {
        "over": whole, "healthy": without, "handling": whole / without, "ceiling": ceiling, "more restarts": more,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--processes", type=int, default=None, help="at once (default: as many as cores)")
    parser.add_argument("--quick", action="store_true", help="two settings, two intervals")
    options = parser.parse_args()
    settings, intervals = (SETTINGS[1:3], MONOTONE_S[::3]) if options.quick else (SETTINGS, MONOTONE_S)
    cases = list(itertools.product(settings, (*intervals, None)))
    rows: list[dict[str, object]] = []
    by_name: dict[str, list[dict[str, float]]] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for case, found in zip(cases, pool.map(rates, *zip(*cases, strict=True)), strict=True):
            (model, pp, microbatches), interval_s = case
            # One that does not fit into memory trains nothing.
            row = {
                name: beside(found, name)
                for name, (rate, *_) in sorted(found.items())
                if rate and not name.startswith("odyssey") and name != CEILING
            }
            row["best single policy"] = min((row[name] for name in SINGLE), key=lambda one: one["over"])
            for name, one in row.items():
                by_name.setdefault(name, []).append(one)
            when = f"one every {interval_s:g} s" if interval_s else "random, mean 1 h, repair 4 h"
            setting = f"{model} PP{pp} M{microbatches}, {when}"
            means = {name: (round(rate), restarts) for name, (rate, _, restarts) in found.items()}
            rows.append({"setting": setting, "tokens_per_s, restarts": means, "odyssey": _rounded(row)})
            if not options.json:
                print(setting, means, flush=True)
    spread = {
        f"{what} {name}": {"least": min(of), "median": statistics.median(of), "most": max(of)}
        for what in ("over", "healthy", "handling", "ceiling")
        for name, found in by_name.items()
        for of in [[one[what] for one in found]]
    }
    return finish(
        ({"settings": rows} if options.json else {}) | spread, bars(by_name, len(cases)), as_json=options.json
    )


def bars(by_name: dict[str, list[dict[str, float]]], settings: int) -> list[Bar]:
    found = [
        at_least(f"settings in which {name} trains", len(by_name[name]), settings)
        for name in ("oobleck", "recycle")
    ]
    for name, least in (OVER | {"best single policy": 1.0}).items():
        over, ceiling = (
            statistics.median(one[what] for one in by_name[name]) for what in ("over", "ceiling")
        )
        found.append(at_least(f"over {name} (least)", min(one["over"] for one in by_name[name]), 1.0))
        found.append(at_least(f"over {name} (median)", over, min(least, ceiling)))
    for name in OVER:
        more = max(one["more restarts"] for one in by_name[name])
        found.append(at_most(f"restarts more than {name} (most, of {len(SEEDS)} traces)", more, 0))
    return found


def _rounded(row: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {what: round(value, 4) for what, value in one.items()} for name, one in row.items()}


if __name__ == "__main__":
    sys.exit(main())
