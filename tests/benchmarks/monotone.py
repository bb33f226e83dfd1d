"""Whether a better cluster ever gets a slower step: one dead worker fewer, more memory, or a worker that is faster.

    python tests/benchmarks/monotone.py --clusters 2000 --json

Random small clusters: up to 5 stages and 4 pipelines, layers alike or not, links that cost little or much, memory
unknown, or as much as the healthy plan takes and up to three times its state more. One to four workers are dead.
``decide()`` is asked twice, for the cluster and for the better one; transitions take no time, and no loss is to be
expected, so that it goes by steps alone. 10,000 clusters take a quarter of an hour.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.plan.placing.memory import state_bytes
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import Decision, decide
from odyssey_megatron.policy.initial import initial_plan
from tests.benchmarks.bars import at_least, at_most, finish, taken

CONFIG = OdysseyConfig(horizon_s=1e6, mtbf_s=1e10)
ALIKE = 1.001
KINDS = ("dead", "memory", "speed")


def layer(rng: random.Random, scale: float = 1.0) -> LayerCost:
    times = [rng.randint(2, 20) / 10 * scale for _ in range(3)]
    return LayerCost(
        forward_s=times[0],
        input_grad_s=times[1],
        weight_grad_s=times[2],
        activation_bytes=rng.randint(0, 40),
        weight_bytes=rng.randint(1, 20),
        gradient_bytes=rng.randint(1, 20),
        optimizer_bytes=rng.randint(1, 60),
        state_bytes=rng.randint(1, 80),
    )


class Cluster:
    """A healthy job, and whom it loses."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        stages, pipelines = rng.randint(1, 5), rng.randint(1, 4)
        blocks = rng.randint(stages, 3 * stages)
        alike = rng.random() < 0.6
        middle = [layer(rng)] * blocks if alike else [layer(rng) for _ in range(blocks)]
        costs = Costs(
            layers=(layer(rng, rng.choice((0.01, 1.0))), *middle, layer(rng, rng.choice((0.1, 2.0)))),
            message_bytes=rng.randint(0, 10),
            link_latency_s=rng.choice((0.0, 0.01, 0.3)),
            link_bytes_per_s=rng.choice((1e4, 1e2)),
        )
        self.job = JobSpec(
            num_layers=2 + blocks,
            pipeline_model_parallel_size=stages,
            tensor_model_parallel_size=1,
            num_microbatches=pipelines * rng.randint(1, 4),
            tokens_per_step=1000,
            train_steps=10,
        )
        self.workers = stages * pipelines
        self.state = initial_state(nodes=(0,) * self.workers)
        self.profile = Profile(costs=costs, group_build_s=0.0)
        self.plan = initial_plan(self.job, self.state, self.profile)
        if rng.random() < 0.5:
            state = max(state_bytes(self.plan.layout, costs).values())
            most = max(dict(self.plan.peak_bytes).values()) + int(state * rng.choice((0.0, 0.3, 1.0, 3.0)))
            self.profile = replace(self.profile, costs=replace(costs, memory_bytes=most))
            self.plan = initial_plan(self.job, self.state, self.profile)

    def decided(
        self, dead: Sequence[int], memory: float = 1.0, speeds: Mapping[int, float] | None = None
    ) -> Decision | None:
        """None if the job cannot go on."""
        state, costs = self.state, self.profile.costs
        for rank in dead:
            state = apply(state, RankDied(rank=rank, code=-9, cause="killed", t_s=0.0))
        workers = (replace(one, speed=(speeds or {}).get(one.worker, 1.0)) for one in state.workers)
        state = replace(state, workers=tuple(workers))
        if costs.memory_bytes is not None:
            costs = replace(costs, memory_bytes=int(costs.memory_bytes * memory))
        try:
            return decide(
                job=self.job,
                state=state,
                previous=self.plan,
                profile=replace(self.profile, costs=costs),
                config=CONFIG,
                now_s=0.0,
            )
        except OdysseyError:
            return None


def compared(seed: int, kind: str) -> tuple[Decision, Decision | None] | None:
    """(the cluster's, the better one's); None where there is nothing to compare."""
    cluster = Cluster(seed)
    rng, all_of_them = cluster.rng, range(cluster.workers)
    if cluster.workers < 4 or (kind == "memory" and cluster.profile.costs.memory_bytes is None):
        return None
    dead = rng.sample(all_of_them, rng.randint(2, min(5, cluster.workers - 1)))
    if kind == "dead":
        worse, better = cluster.decided(dead), cluster.decided(dead[:-1])
    elif kind == "memory":
        worse, better = cluster.decided(dead), cluster.decided(dead, memory=rng.choice((1.05, 1.3, 2.0)))
    else:
        who, speed = rng.choice(sorted(set(all_of_them) - set(dead))), rng.choice((0.3, 0.5, 0.8))
        faster = min(1.0, speed + rng.choice((0.1, 0.5)))
        worse, better = (
            cluster.decided(dead, speeds={who: speed}),
            cluster.decided(dead, speeds={who: faster}),
        )
    return None if worse is None else (worse, better)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    number, slower, worst = Counter[str](), Counter[str](), dict.fromkeys(KINDS, 1.0)
    impossible = 0
    for seed in range(options.clusters):
        kind = KINDS[seed % len(KINDS)]
        if (found := compared(seed, kind)) is None:
            continue
        worse, better = found
        number[kind] += 1
        if better is None:
            impossible += 1
            continue
        ratio = better.best.step_s / worse.best.step_s
        if ratio > ALIKE:
            slower[kind] += 1
            worst[kind] = max(worst[kind], ratio)
            if not options.json:
                names = [f"{one.best.option.name}, {one.best.option.note}" for one in (better, worse)]
                print(f"{seed} {kind}: {ratio:.4f}, {names[0]} in place of {names[1]}", flush=True)
    bars = [
        at_least("compared", number.total(), options.clusters / 4),
        at_most("better clusters that cannot go on", impossible, 0),
    ]
    for kind in KINDS:
        share = slower[kind] / taken(number[kind] or None, kind)
        bars.append(at_most(f"slower by more than 0.1 %, with better {kind} (share)", share, 0.0))
        bars.append(at_most(f"slower with better {kind} (worst)", worst[kind], ALIKE))
    return finish({"compared": dict(number)}, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
