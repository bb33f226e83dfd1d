"""The bound of a layout is below the optimum where gradients are summed and memory is short, by OR-tools CP-SAT."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from odyssey_megatron.plan.checking.bound import lower_bound_s
from odyssey_megatron.plan.checking.simulate import simulate
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.memory import minimum_bytes
from odyssey_megatron.plan.scheduling.generate import build_schedule
from odyssey_megatron.plan.scheduling.reductions import buckets, until_passed
from tests.plan.samples import layer, uniform_costs

LONGEST_S = 400


def pipelines(seed):
    """(layout, costs, caps) of two equal small pipelines; all times are whole seconds."""
    rng = Random(seed)
    stages, each, microbatches = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 4)
    seats, ends = range(stages), tuple(each * (at + 1) for at in range(stages))
    routes = (
        pipeline_route(
            tuple(stages * one + at for at in seats),
            ends,
            tuple(range(microbatches * one, microbatches * (one + 1))),
        )
        for one in range(2)
    )
    layout = layout_from_routes(stages * each, tuple(routes))
    layers = tuple(layer(rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 3)) for _ in range(ends[-1]))
    costs = replace(
        uniform_costs(ends[-1]),
        layers=layers,
        bucket_bytes=rng.choice((0, 2)),
        link_bytes_per_s=1 / rng.choice((1, 2, 4, 8)),
    )
    more = each * rng.randint(0, 3)
    return layout, costs, {worker: least + more for worker, least in minimum_bytes(layout, costs).items()}


def optimum_s(layout, costs, caps):
    """The least step of the first pipeline. The other one does as much at the same time, so that sums wait for nobody.

    Parts of weight gradients may run in any order, so that this is no longer than any program's step.
    """
    from ortools.sat.python import cp_model

    model, spans, route = cp_model.CpModel(), costs.spans, layout.routes[0]
    step = model.new_int_var(0, LONGEST_S, "")

    def task(seconds):
        start = model.new_int_var(0, LONGEST_S, "")
        one = model.new_fixed_size_interval_var(start, round(seconds), "")
        model.add(step >= one.end_expr())
        return one

    ways = {microbatch: [] for microbatch in route.microbatches}
    for hop in route.hops:
        at, busy, held = (hop.first, hop.last), [], []
        own = [one for one in buckets(layout, costs) if one.first < hop.last and hop.first < one.last]
        sums = [task(spans.gradient_bytes(one.first, one.last) / costs.link_bytes_per_s) for one in own]
        for way in ways.values():
            forward, back = task(spans.forward_s(*at)), task(spans.input_grad_s(*at))
            parts = [
                task(spans.weight_grad_s(max(hop.first, one.first), min(hop.last, one.last))) for one in own
            ]
            model.add(back.start_expr() >= forward.end_expr())
            ends = model.new_int_var(0, LONGEST_S, "")
            for one, part, total in zip(own, parts, sums, strict=True):
                runs_s = 0 if hop.first else round(spans.input_grad_s(0, until_passed(at, one.first)))
                model.add(part.start_expr() >= back.end_expr())
                model.add(ends >= part.end_expr())
                model.add(total.start_expr() >= part.end_expr() - runs_s)
                model.add(total.start_expr() >= forward.end_expr())
            size = model.new_int_var(0, LONGEST_S, "")
            held.append(model.new_interval_var(forward.start_expr(), size, ends, ""))
            way.append((forward, back))
            busy += [forward, back, *parts]
        model.add_no_overlap(busy)
        model.add_no_overlap(sums)
        kept = spans.activation_bytes(*at)
        model.add_cumulative(held, [kept] * len(held), caps[hop.worker])
    for way in ways.values():
        for (upper, back), (lower, deeper) in pairwise(way):
            model.add(lower.start_expr() >= upper.end_expr())
            model.add(back.start_expr() >= deeper.end_expr())
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value


@pytest.mark.parametrize("seed", range(30))
def test_no_step_is_below_the_bound(seed):
    layout, costs, caps = pipelines(seed)
    best_s = optimum_s(layout, costs, caps)
    assert lower_bound_s(layout, costs, in_flight_cap=caps) <= best_s + 1e-9
    schedule = build_schedule(layout, costs, in_flight_cap=caps)
    assert best_s <= simulate(schedule, layout, costs).step_s + 1e-9
