"""The exact answer on small cases, by OR-tools CP-SAT: what the list scheduler is measured against.

python -m tests.plan.exact          # solves the cases again and rewrites exact_optima.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Hop, Layout, Route, layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.memory import minimum_bytes
from odyssey_megatron.policy.routes.rerouting import reroute
from tests.plan.samples import layer, uniform_costs
from tests.plan.test_generate import pipelines

OPTIMA = Path(__file__).with_name("exact_optima.json")

TIMES = {
    "equal": {},
    "long forward": {"forward_s": 2.0, "input_grad_s": 2.0, "weight_grad_s": 1.0},
    "long backward": {"forward_s": 2.0, "input_grad_s": 3.0, "weight_grad_s": 2.0},
}


def mixed_costs(*forwards: float) -> Costs:
    """Layers of different length: (f, f, f) each; activations grow with the length."""
    layers = tuple(layer(f, f, f, activation_bytes=int(f)) for f in forwards)
    return Costs(layers=layers, message_bytes=0, link_latency_s=0.0, link_bytes_per_s=1.0)


def cases() -> Iterator[tuple[str, Layout, Costs, dict[int, int], dict[int, float]]]:
    """(name, layout, costs, bytes of activations for each worker, speeds)."""
    for name, times in TIMES.items():
        for stages, microbatches in ((2, 5), (3, 4), (3, 6), (4, 4), (4, 6)):
            for cap in (stages, stages + 1):
                layout = pipelines(stages, 1, microbatches)
                yield (
                    f"pipeline {stages}x{microbatches}, {name}, cap {cap}",
                    layout,
                    uniform_costs(stages, **times),
                    dict.fromkeys(layout.workers, cap),
                    {},
                )
    for stages, replicas, microbatches, dead in (
        (2, 2, 3, 0), (2, 2, 3, 2), (3, 2, 3, 0), (3, 2, 3, 2), (3, 2, 3, 4), (2, 3, 3, 3),
        (3, 3, 2, 3), (3, 3, 2, 6),
    ):  # fmt: skip
        for cap in (stages, stages + 1):
            before = pipelines(stages, replicas, microbatches)
            costs = uniform_costs(stages)
            layout = reroute(before, set(before.workers) - {dead}, costs)
            caps = dict.fromkeys(layout.workers, cap)
            yield (
                f"reroute {stages}x{replicas}x{microbatches} without {dead}, cap {cap}",
                layout,
                costs,
                caps,
                {},
            )
    for forwards in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 3, 2)):
        layout = pipelines(3, 1, 5)
        costs = mixed_costs(*forwards)
        yield f"stages {forwards}", layout, costs, dict.fromkeys(layout.workers, 6), {}
    for replicas, stages, microbatches, dead in ((2, 4, 4, 2), (3, 4, 3, 6), (3, 4, 3, 9), (4, 2, 4, 1)):
        before = pipelines(stages, replicas, microbatches)
        costs = uniform_costs(stages)
        layout = reroute(before, set(before.workers) - {dead}, costs)
        caps = dict.fromkeys(layout.workers, stages + 1)
        yield f"reroute, larger {stages}x{replicas}x{microbatches} without {dead}", layout, costs, caps, {}
    for slow in (0, 1, 2):
        layout = pipelines(3, 1, 5)
        caps = dict.fromkeys(layout.workers, 3)
        yield f"worker {slow} at half speed", layout, uniform_costs(3), caps, {slow: 0.5}
    for name, layout in _special():
        costs = uniform_costs(layout.num_layers)
        least = minimum_bytes(layout, costs)
        caps = {worker: max(4, least[worker]) for worker in layout.workers}
        yield name, layout, costs, caps, {}


def _special() -> Iterator[tuple[str, Layout]]:
    there_and_back = (
        Hop(worker=0, first=0, last=1), Hop(worker=1, first=1, last=2), Hop(worker=0, first=2, last=3),
    )  # fmt: skip
    yield "there and back", layout_from_routes(3, (Route(microbatches=(0, 1, 2, 3), hops=there_and_back),))
    yield (
        "ragged, one shared stage",
        layout_from_routes(
            4,
            (
                pipeline_route((0, 1), (2, 4), (0, 2, 4)),
                pipeline_route((2, 3, 1), (1, 2, 4), (1, 3)),
            ),
        ),
    )


def optimum_s(
    layout: Layout, costs: Costs, caps: dict[int, int], speeds: dict[int, float], limit_s: float = 120.0
) -> tuple[float, bool]:
    """(shortest time from the first forward to the last weight gradient, whether that is proved)."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    kinds = ("forward_s", "input_grad_s", "weight_grad_s")
    horizon = 0
    for route in layout.routes:
        for hop in route.hops:
            total = sum(one.compute_s for one in costs.layers[hop.first : hop.last])
            horizon += len(route.microbatches) * round(total / speeds.get(hop.worker, 1.0))
    busy: dict[int, list] = {worker: [] for worker in layout.workers}
    held: dict[int, list] = {worker: [] for worker in layout.workers}
    end_of_all = model.new_int_var(0, horizon, "makespan")
    for route in layout.routes:
        before_same_route = None
        for microbatch in route.microbatches:
            firsts, before, gradients = [], None, []
            for hop in route.hops:
                times = [
                    round(sum(getattr(one, kind) for one in costs.layers[hop.first : hop.last])
                          / speeds.get(hop.worker, 1.0))
                    for kind in kinds
                ]  # fmt: skip
                starts = [model.new_int_var(0, horizon, f"{kind}{microbatch}{hop}") for kind in kinds]
                for start, seconds in zip(starts, times, strict=True):
                    busy[hop.worker].append(model.new_fixed_size_interval_var(start, seconds, ""))
                model.add(starts[1] >= starts[0] + times[0])
                model.add(starts[2] >= starts[1] + times[1])
                model.add(end_of_all >= starts[2] + times[2])
                if before is not None:
                    model.add(starts[0] >= before[0] + before[1])
                before = (starts[0], times[0])
                gradients.append((starts[1], times[1]))
                size = model.new_int_var(0, horizon, "")
                end = model.new_int_var(0, horizon, "")
                model.add(end == starts[2] + times[2])
                activations = sum(layer.activation_bytes for layer in costs.layers[hop.first : hop.last])
                held[hop.worker].append((model.new_interval_var(starts[0], size, end, ""), activations))
                firsts.append(starts)
            for upper, lower in pairwise(gradients):
                model.add(upper[0] >= lower[0] + lower[1])
            if before_same_route is not None:
                # Microbatches of one route are alike, so each kind may go in their order.
                for ours, theirs in zip(firsts, before_same_route, strict=True):
                    for mine, other in zip(ours, theirs, strict=True):
                        model.add(mine >= other)
            before_same_route = firsts
    for worker in layout.workers:
        model.add_no_overlap(busy[worker])
        model.add_cumulative([i for i, _ in held[worker]], [size for _, size in held[worker]], caps[worker])
    model.minimize(end_of_all)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    return solver.objective_value, status == cp_model.OPTIMAL


def main() -> None:
    """Solves all cases and writes the optima."""
    found = {}
    for name, layout, costs, caps, speeds in cases():
        seconds, proved = optimum_s(layout, costs, caps, speeds)
        print(f"{name}: {seconds} {'' if proved else '(not proved)'}", flush=True)
        if proved:
            found[name] = seconds
    OPTIMA.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
