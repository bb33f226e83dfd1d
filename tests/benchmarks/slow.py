"""How fast a job with a slow worker is once its plan has changed for it, by simulation.

    python tests/benchmarks/slow.py --json

The jobs are those of ``tests/benchmarks/policies.py`` where memory is that of 1F1B and one microbatch more: 32 workers,
32 layers, no communication. One worker has 0.8, 0.65, 0.45 or 0.3 of its speed. ``of_share`` is the throughput beside
the healthy job's times the share of speed that is left, ``of_best`` beside that of its best layout, ``over_nothing``
beside the layout as it was, ``over_left_out`` beside the best plan without that worker. Layout, schedule and step time
are ``decide()``'s own. The best healthy layouts of these jobs are 32 workers with two or four microbatches each, and no
pipelines: 31 of them and a slow one cannot share these out as evenly, so that ``of_best`` has no bar.

``links``: the same jobs with the memory of a 7B model (``state4`` there) and messages that take a twentieth of a
stage's forward, or ten, forty or two hundred times that, on one link, both ways (``link``), or between the first node
and all others (``node``). ``of_healthy`` is the throughput beside the best plan without slow links, ``over_nothing``
beside the layout as it was; ``slower`` is what the slowness costs if nothing is done. Sums of gradients take no time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state, with_speeds
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.policy.decide import decide, scheduled
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.profile import Profile
from tests.benchmarks.bars import at_least, finish
from tests.benchmarks.policies import LAYERS, SETTINGS, WORKERS, costs, job_of, profile_of

SPEEDS = (0.8, 0.65, 0.45, 0.3)
SLOW = 13
LINK_FACTORS = (10.0, 40.0, 200.0)


def measured(dp: int, pp: int, microbatches: int, speed: float) -> dict[str, Any]:
    """Of one job."""
    job = JobSpec(
        num_layers=LAYERS + 2,
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=1,
        num_microbatches=dp * microbatches,
        tokens_per_step=dp * microbatches,
        train_steps=1,
    )
    profile = Profile(costs=costs(LAYERS // pp * (pp + 1), 0), group_build_s=0.0)
    state = initial_state(nodes=tuple(worker // 8 for worker in range(WORKERS)))
    healthy, config = initial_plan(job, state, profile), OdysseyConfig(horizon_s=1e9, mtbf_s=1e9)
    slow = with_speeds(state, {SLOW: speed})
    without = apply(state, RankDied(rank=SLOW, code=-9, cause="left out", t_s=0.0))
    mended, left_out = (
        decide(
            job=job, state=one, previous=healthy, profile=profile, config=config, now_s=0.0, rebalances=True
        )
        for one in (slow, without)
    )
    nothing_s = scheduled("keep", healthy.layout, (), slow, profile).step_s
    best_s = initial_plan(replace(job, best_layout=True), state, profile).step_s
    share, chosen = WORKERS / (WORKERS - 1 + speed), mended.candidates[0]
    return {
        "setting": f"dp{dp}_pp{pp}_m{microbatches}_speed{speed}",
        "healthy_s": round(healthy.step_s, 3),
        "step_s": round(mended.plan.step_s, 3),
        "of_share": healthy.step_s * share / mended.plan.step_s,
        "of_best": best_s * share / mended.plan.step_s,
        "over_nothing": nothing_s / mended.plan.step_s,
        "over_left_out": left_out.plan.step_s / mended.plan.step_s,
        "policy": f"{chosen.name}: {chosen.reason}",
    }


def with_slow_links(dp: int, pp: int, microbatches: int, where: str, factor: float) -> dict[str, Any]:
    """Of one job."""
    job, profile = replace(job_of(dp, pp, microbatches), revisits=False), profile_of(pp, 1, 4)
    message_s = 0.05 * profile.costs.spans.forward_s(0, job.num_layers) / pp
    profile = replace(profile, costs=replace(profile.costs, link_latency_s=message_s))
    state = initial_state(nodes=tuple(worker // 8 for worker in range(WORKERS)))
    healthy, config = initial_plan(job, state, profile), OdysseyConfig(horizon_s=1e9, mtbf_s=1e9)
    one, other = healthy.layout.routes[0].hops[:2]
    links = [(one.worker, other.worker), (other.worker, one.worker)]
    if where == "node":
        links = [(a, b) for a in range(WORKERS) for b in range(WORKERS) if (a < 8) != (b < 8)]
    longer_s = (factor - 1) * message_s
    slow = replace(state, slow_links=tuple((a, b, longer_s) for a, b in sorted(links)))
    known: dict[str, Any] = {
        "job": job,
        "previous": healthy,
        "profile": profile,
        "config": config,
        "now_s": 0.0,
        "rebalances": True,
    }
    best, mended = decide(state=state, **known), decide(state=slow, **known)
    nothing_s = scheduled("keep", healthy.layout, (), slow, profile).step_s
    chosen = mended.candidates[0]
    return {
        "setting": f"dp{dp}_pp{pp}_m{microbatches}_{where}_times{factor:g}",
        "slower": nothing_s / healthy.step_s - 1,
        "of_healthy": best.plan.step_s / mended.plan.step_s,
        "over_nothing": nothing_s / mended.plan.step_s,
        "policy": f"{chosen.name}: {chosen.reason}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measured(*setting, speed) for setting in SETTINGS for speed in SPEEDS]
    bars = []
    for kind, least in (("of_share", 0.97), ("over_nothing", 1.0), ("over_left_out", 1.0)):
        values = [row[kind] for row in rows]
        bars.append(at_least(f"{kind} (median)", statistics.median(values), least))
        if least == 1.0:
            bars.append(at_least(f"{kind} (least)", min(values), least))
    links = [
        with_slow_links(*setting, where, factor)
        for setting in SETTINGS
        for where in ("link", "node")
        for factor in LINK_FACTORS
    ]
    for kind, least in (("of_healthy", 0.97), ("over_nothing", 1.0)):
        values = [row[kind] for row in links if "_link_" in row["setting"]]
        bars.append(at_least(f"one slow link: {kind} (least)", min(values), least))
    values = [row["over_nothing"] for row in links]
    bars.append(at_least("slow links: over_nothing (least)", min(values), 1.0))
    return finish({"settings": rows, "links": links}, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
