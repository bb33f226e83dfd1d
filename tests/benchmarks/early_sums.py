"""What a step would gain if blocks that are done early were summed at once, not at the end of workers' programs.

    python tests/benchmarks/early_sums.py --json

By the planner's clock, of plans whose routes visit each worker once, twice or four times. There each sum begins when
the last of its holders has the block's last weight gradient, one after the other on each worker, in the order in which
they can. What that would hold up elsewhere is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from odyssey_megatron.plan.checking.simulate import simulate, sum_s
from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.plan.layout import Layout, layout_from_routes, pipeline_route
from odyssey_megatron.plan.schedule import Op, Program
from odyssey_megatron.plan.scheduling.generate import build_schedule
from odyssey_megatron.plan.scheduling.reductions import buckets_of
from tests.benchmarks.bars import at_most, finish

LAYERS, REPLICAS, LAYER_S = 32, 2, 0.01
CASES = [*itertools.product((1, 2, 4), (8, 16, 32), (0.05, 0.15))]
"""(visits of each of four stages, microbatches of a pipeline, sums of a worker as a part of what it computes)."""


def layout_of(visits: int, microbatches: int) -> Layout:
    """Down the stages and up again, and so on: where a route turns a worker has twice as many layers in a row."""
    stages = [stage for leg in range(visits) for stage in (range(4), range(3, -1, -1))[leg % 2]]
    ends = [LAYERS * (at + 1) // len(stages) + 1 + (at + 1 == len(stages)) for at in range(len(stages))]
    runs = [[*run] for _, run in itertools.groupby(zip(stages, ends, strict=True), key=lambda one: one[0])]
    return layout_from_routes(
        LAYERS + 2,
        tuple(
            pipeline_route(
                tuple(run[0][0] * REPLICAS + replica for run in runs),
                tuple(run[-1][1] for run in runs),
                tuple(range(replica, microbatches * REPLICAS, REPLICAS)),
            )
            for replica in range(REPLICAS)
        ),
    )


def costs_of(microbatches: int, part: float) -> Costs:
    end = LayerCost(
        forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0, activation_bytes=1, weight_bytes=1, gradient_bytes=0,
        optimizer_bytes=1, state_bytes=1,
    )  # fmt: skip
    size = 10**9
    middle = replace(end, forward_s=LAYER_S, input_grad_s=LAYER_S, weight_grad_s=LAYER_S, gradient_bytes=size)
    link_bytes_per_s = size / (part * 3 * LAYER_S * microbatches) * 2 * (REPLICAS - 1) / REPLICAS
    layers = (end, *[middle] * LAYERS, end)
    return Costs(
        layers=layers,
        message_bytes=1,
        link_latency_s=1e-9,
        link_bytes_per_s=link_bytes_per_s,
        bucket_bytes=size,
    )


def gain(visits: int, microbatches: int, part: float) -> float:
    """Of a step, a part of it."""
    layout, costs = layout_of(visits, microbatches), costs_of(microbatches, part)
    schedule = build_schedule(layout, costs)
    timeline = simulate(schedule, layout, costs)
    programs, spans = dict(schedule.programs), dict(timeline.spans)
    blocks = buckets_of(programs.values(), layout)

    def done_s(program: Program, times: tuple[tuple[float, float], ...], first: int, last: int) -> float:
        return max(
            end_s
            for instr, (_, end_s) in zip(program, times, strict=True)
            if instr.op in (Op.WEIGHT_GRAD, Op.BACKWARD) and max(instr.first, first) < min(instr.last, last)
        )

    ready = {
        one: max(done_s(programs[worker], spans[worker], one.first, one.last) for worker in one.holders)
        for one in blocks
    }
    free_s = dict.fromkeys(programs, 0.0)
    for one in sorted(blocks, key=ready.__getitem__):
        begins_s = max(ready[one], *(free_s[worker] for worker in one.holders))
        free_s.update(dict.fromkeys(one.holders, begins_s + sum_s(costs, one, layout.copies)))
    return max(0.0, 1 - max(*free_s.values(), *ready.values()) / timeline.step_s)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = {case: gain(*case) for case in CASES}
    most = {visits: max(of for case, of in found.items() if case[0] == visits) for visits, _, _ in CASES}
    bars = [
        at_most(f"gain_with_{visits}_visits", of, 0.0 if visits == 1 else 0.06) for visits, of in most.items()
    ]
    rows = [
        {"visits": a, "microbatches": b, "sums": c, "gain": round(of, 4)} for (a, b, c), of in found.items()
    ]
    return finish({"rows": rows}, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
