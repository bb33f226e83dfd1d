"""The exact answer where layouts are free, on small cases, by OR-tools CP-SAT: what the planner is measured against.

Any worker may hold any layers and compute any of them for any microbatch, as often as it likes; a visit computes
consecutive layers at once and keeps what their backward needs. So this is every layout that a plan can have, with every
schedule, within each worker's memory.

python -m tests.policy.exact_layouts          # solves the cases again and rewrites exact_layouts.json
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from odyssey_megatron.plan.costs import Costs, LayerCost
from tests.plan import samples

OPTIMA = Path(__file__).with_name("exact_layouts.json")
KINDS = "forward_s", "input_grad_s", "weight_grad_s"


@dataclass(frozen=True, kw_only=True)
class Case:
    """So many workers, alike but for ``speeds``, and so many microbatches."""

    workers: int
    microbatches: int
    costs: Costs
    """Times are whole numbers, also on slow workers; embedding and head cost nothing."""
    speeds: tuple[float, ...] = ()
    """Of the first workers; the others have 1.0."""

    @property
    def layers(self) -> tuple[LayerCost, ...]:
        """Those that cost something."""
        return self.costs.layers[1:-1]

    def speed(self, worker: int) -> float:
        return self.speeds[worker] if worker < len(self.speeds) else 1.0


def case(
    workers: int,
    microbatches: int,
    *times: tuple[int, int, int],
    memory_bytes: int | None = None,
    speeds: tuple[float, ...] = (),
) -> Case:
    """``times``: of each layer; it takes 4 bytes of state, and of each microbatch as many as its forward takes."""
    layers = tuple(samples.layer(*one, activation_bytes=one[0], state_bytes=3) for one in times)
    costs = Costs(
        layers=(samples.FREE, *layers, samples.FREE),
        message_bytes=0,
        link_latency_s=0.0,
        link_bytes_per_s=float("inf"),
        memory_bytes=memory_bytes,
    )
    return Case(workers=workers, microbatches=microbatches, costs=costs, speeds=speeds)


def cases() -> Iterator[tuple[str, Case]]:
    """By name."""
    equal, long = (1, 1, 1), (2, 3, 2)
    for workers, layers, microbatches in (
        (2, 2, 2), (2, 2, 3), (2, 3, 3), (2, 4, 3), (2, 4, 4), (3, 2, 2), (3, 2, 3), (3, 2, 4), (3, 3, 2), (3, 3, 3),
        (3, 3, 4), (3, 4, 2), (3, 4, 3), (4, 2, 3), (4, 3, 3), (4, 4, 2), (4, 4, 3), (2, 2, 6), (2, 3, 6), (3, 3, 6),
        (2, 4, 6), (4, 4, 4),
    ):  # fmt: skip
        free = case(workers, microbatches, *[equal] * layers)
        share = -(-layers // workers)  # layers of a stage in one pipeline, if they are spread out evenly
        for name, memory_bytes in (
            ("free", None),
            ("tight", 4 * share + share * min(workers, microbatches)),
            ("tighter", 4 * share + share * max(1, min(workers, microbatches) - 1)),
        ):
            found = replace(free, costs=replace(free.costs, memory_bytes=memory_bytes))
            yield f"{workers} workers, {layers} layers, {microbatches} microbatches, {name}", found
    for workers, times, microbatches in (
        (2, (long, equal), 3), (2, (equal, long), 3), (2, (equal, equal, long), 3), (3, (equal, long, equal), 3),
        (3, (equal, equal, long), 3), (3, (long, equal, equal), 2), (3, (equal, long), 3), (2, (long, long, equal), 2),
    ):  # fmt: skip
        heavy = [place for place, one in enumerate(times) if one == long]
        yield (
            f"{workers} workers, {len(times)} layers, {microbatches}, heavy {heavy}",
            case(workers, microbatches, *times),
        )
    for workers, layers, microbatches, speeds in (
        (2, 2, 3, (0.5,)), (2, 3, 3, (0.5,)), (3, 2, 3, (0.5,)), (3, 3, 3, (0.5,)), (3, 3, 2, (0.5, 0.5)),
        (3, 4, 2, (0.5,)),
    ):  # fmt: skip
        name = f"{workers} workers, {layers} layers, {microbatches} microbatches, at {speeds}"
        yield name, case(workers, microbatches, *[equal] * layers, speeds=speeds)


class _Problem:
    """What any layout and schedule of a case must keep to."""

    def __init__(self, one: Case):
        from ortools.sat.python import cp_model

        self.case, self.model = one, cp_model.CpModel()
        self.layers, self.workers = range(len(one.layers)), range(one.workers)
        work = sum(layer.compute_s for layer in one.layers) * one.microbatches
        self.horizon = round(work / min(map(one.speed, self.workers)))
        least = math.ceil(work / sum(map(one.speed, self.workers)) - 1e-9)
        self.makespan = self.model.new_int_var(least, self.horizon, "makespan")
        self.busy: list[list[Any]] = [[] for _ in self.workers]
        self.held: list[list[tuple[Any, int]]] = [[] for _ in self.workers]
        self.holds = [[self.model.new_bool_var("") for _ in self.layers] for _ in self.workers]
        firsts = [self.microbatch() for _ in range(one.microbatches)]
        for ours, theirs in pairwise(firsts):  # microbatches are alike
            self.model.add(ours <= theirs)
        for worker in self.workers:
            self.model.add_no_overlap(self.busy[worker])
            if one.costs.memory_bytes is not None:
                self.memory(worker, one.costs.memory_bytes)
        self.alike()
        self.model.minimize(self.makespan)

    def time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def microbatch(self) -> Any:
        """One more of them; when its first forward begins."""
        model, layers = self.model, self.layers
        on = [[model.new_bool_var("") for _ in self.workers] for _ in layers]
        start, end = ([[self.time() for _ in KINDS] for _ in layers] for _ in range(2))
        since, until = ([self.time() for _ in layers] for _ in range(2))
        for layer in layers:
            cost = self.case.layers[layer]
            model.add_exactly_one(on[layer])
            for worker in self.workers:
                here = on[layer][worker]
                model.add_implication(here, self.holds[worker][layer])
                for kind, name in enumerate(KINDS):
                    seconds = round(getattr(cost, name) / self.case.speed(worker))
                    one = model.new_optional_interval_var(
                        start[layer][kind], seconds, end[layer][kind], here, ""
                    )
                    self.busy[worker].append(one)
                kept = model.new_optional_interval_var(since[layer], self.time(), until[layer], here, "")
                self.held[worker].append((kept, cost.activation_bytes))
            model.add(start[layer][1] >= end[layer][0])
            model.add(start[layer][2] >= end[layer][1])
            model.add(since[layer] <= start[layer][0])
            model.add(until[layer] >= end[layer][2])
            model.add(self.makespan >= end[layer][2])
        for upper, lower in pairwise(layers):
            model.add(start[lower][0] >= end[upper][0])
            model.add(start[upper][1] >= end[lower][1])
            for worker in self.workers:  # one visit: at once in each direction, and kept together
                both = [on[upper][worker], on[lower][worker]]
                for ours, theirs in (
                    (start[lower][0], end[upper][0]), (start[upper][1], end[lower][1]),
                    (start[lower][2], end[upper][2]), (since[upper], since[lower]), (until[upper], until[lower]),
                ):  # fmt: skip
                    model.add(ours == theirs).only_enforce_if(both)
                model.add(start[upper][2] >= end[upper][1]).only_enforce_if(both)
        return start[0][0]

    def memory(self, worker: int, limit_bytes: int) -> None:
        """States of what is held, and activations from forward to weight gradient."""
        held = zip(self.case.layers, self.holds[worker], strict=True)
        room = self.model.new_int_var(0, limit_bytes, "")
        self.model.add(room == limit_bytes - sum(layer.kept_bytes * here for layer, here in held))
        kept, sizes = zip(*self.held[worker], strict=True)
        self.model.add_cumulative(kept, sizes, room)

    def alike(self) -> None:
        """Of workers of speed 1 the first has the most of the first layers."""
        alike = [worker for worker in self.workers if self.case.speed(worker) == 1.0]
        weights = [2**layer for layer in reversed(self.layers)]
        ranks = [sum(w * h for w, h in zip(weights, self.holds[one], strict=True)) for one in alike]
        for ours, theirs in pairwise(ranks):
            self.model.add(ours >= theirs)


def optimum_s(one: Case, limit_s: float = 120.0) -> tuple[float, bool]:
    """(shortest time from the first forward to the last weight gradient, whether that is proved)."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 2
    status = solver.solve(_Problem(one).model)
    if status == cp_model.INFEASIBLE:
        return float("inf"), True
    return solver.objective_value, status == cp_model.OPTIMAL


def main() -> None:
    """Solves all cases and writes the optima."""
    limit_s = float(sys.argv[1]) if len(sys.argv) > 1 else 120.0
    found = {}
    for name, one in cases():
        seconds, proved = optimum_s(one, limit_s)
        print(f"{name}: {seconds} {'' if proved else '(not proved)'}", flush=True)
        if proved:
            found[name] = seconds
    OPTIMA.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
