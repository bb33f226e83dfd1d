"""Seating: from pipelines without workers to a layout in which the fewest bytes move."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Hop, Layout, Route, layout_from_routes
from odyssey_megatron.plan.placing.transfer import assign_seats
from odyssey_megatron.policy.shapes import ways
from odyssey_megatron.policy.shapes.cuts import recut
from odyssey_megatron.policy.shapes.kinds import Slow
from odyssey_megatron.policy.shapes.shares import Rate, deal, min_max_shares
from odyssey_megatron.policy.shapes.ways import ONCE, Way

Further = tuple[tuple[int, int, int], ...]
"""The hops of one microbatch: (seat, first layer, last). Seats are counted through all pipelines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShapes:
    """Pipelines without workers, each of whose stages is a *seat*. A replan chooses among shapes."""

    ends: tuple[tuple[int, ...], ...]
    """For each pipeline, where each stage ends, in the order of :mod:`odyssey_megatron.policy.shapes.ways` with
    ``way``.
    """
    shares: tuple[int, ...]
    """Number of microbatches of each pipeline."""
    estimate_s: float
    way: Way = ONCE
    slow: tuple[tuple[int, Slow], ...] = ()
    """(seat, the sort of slow worker that it is cut for)."""
    further: tuple[Further, ...] = ()
    """Routes of further microbatches, each of which goes through workers of several pipelines."""


def place(
    shape: PipelineShapes,
    workers: Collection[int],
    previous: Layout,
    costs: Costs,
    speeds: Mapping[int, float] | None = None,
    slow: Mapping[int, Slow] | None = None,
) -> Layout:
    """Return ``shape`` on actual workers, so that the fewest bytes move; microbatches are dealt out evenly in order.

    Args:
        speeds: pipelines with a worker of another speed are cut and loaded again, to what it can do.
        slow: workers besides the others, of the sorts that ``shape`` is cut for; instead of ``speeds``.

    Raises:
        PlanInfeasible: there are fewer workers than stages.
    """
    seats = [
        previous.with_tied(layer for first, last in spans for layer in range(first, last))
        for ends in shape.ends
        for spans in ways.spans(ends, shape.way)
    ]
    if len(seats) - len(shape.slow) > len(workers):
        raise PlanInfeasible(f"{len(seats)} stages need as many workers, {len(workers)} are alive")
    held: dict[int, list[int]] = {worker: [] for worker in workers}
    for layer, holders in enumerate(previous.all_holders):
        for worker in holders:
            if worker in held:
                held[worker].append(layer)
    taken = _slow_seats(seats, shape, slow or {}, previous, costs)
    others = iter(
        assign_seats(
            [layers for seat, layers in enumerate(seats) if seat not in taken], sorted(workers), held, costs
        )
    )
    seated = [taken[seat] if seat in taken else next(others) for seat in range(len(seats))]
    in_turn = iter(seated)
    pipelines = [tuple(next(in_turn) for _ in ends) for ends in shape.ends]
    if speeds:
        shape = _at_speed(shape, pipelines, costs, speeds)
    own = deal((*shape.shares, *(1 for _ in shape.further)))
    routes = (
        ways.route(pipeline, ends, shape.way, microbatches)
        for pipeline, ends, microbatches in zip(pipelines, shape.ends, own, strict=False)
    )
    further = (
        Route(microbatches=ids, hops=tuple(Hop(worker=seated[at], first=a, last=b) for at, a, b in hops))
        for ids, hops in zip(own[len(pipelines) :], shape.further, strict=True)
    )
    return layout_from_routes(len(costs.layers), (*routes, *further), tied=previous.tied)


def seated(
    layout: Layout,
    workers: Collection[int],
    previous: Layout,
    costs: Costs,
    speeds: Mapping[int, float] | None = None,
) -> Layout:
    """Return ``layout`` with its equal workers, or seats, exchanged for those of ``workers`` such that the fewest bytes
    move.
    """
    place, speeds = dict[int, int](), speeds or {}
    alike: dict[float, list[int]] = {}
    for worker in layout.workers:
        alike.setdefault(speeds.get(worker, 1.0), []).append(worker)
    for speed, seats in alike.items():
        there = [worker for worker in workers if speeds.get(worker, 1.0) == speed]
        held = {worker: previous.held_by(worker) for worker in there}
        found = assign_seats([layout.held_by(seat) for seat in seats], there, held, costs)
        place |= dict(zip(seats, found, strict=True))
    routes = tuple(
        replace(route, hops=tuple(replace(hop, worker=place[hop.worker]) for hop in route.hops))
        for route in layout.routes
    )
    return layout_from_routes(layout.num_layers, routes, tied=layout.tied)


def _slow_seats(
    seats: Sequence[Collection[int]],
    shape: PipelineShapes,
    slow: Mapping[int, Slow],
    previous: Layout,
    costs: Costs,
) -> dict[int, int]:
    """Return seat -> the slow worker that sits there: the one of its sort that lacks the fewest bytes."""
    taken: dict[int, int] = {}
    for seat, sort in shape.slow:
        there = [worker for worker, own in slow.items() if own == sort and worker not in taken.values()]
        if not there:
            raise PlanInfeasible(f"no worker of {sort.speed:.0%} of the speed is left")

        def lacks(worker: int, layers: Collection[int] = seats[seat]) -> tuple[int, int]:
            new = (layer for layer in layers if worker not in previous.all_holders[layer])
            return sum(costs.all_layers[layer].state_bytes for layer in new), worker

        taken[seat] = min(there, key=lacks)
    return taken


def _at_speed(
    shape: PipelineShapes, pipelines: Sequence[tuple[int, ...]], costs: Costs, speeds: Mapping[int, float]
) -> PipelineShapes:
    """Return ``shape`` with boundaries and shares for the speeds of the workers on its seats."""
    work = [costs.layers[layer].compute_s for layer in ways.in_turn(len(costs.layers), shape.way)]
    cuts, rates = [], []
    for pipeline, ends in zip(pipelines, shape.ends, strict=True):
        capacity = [speeds.get(worker, 1.0) for worker in pipeline]
        cut = recut(work, capacity, ends, shape.way) if min(capacity) < 1.0 else ends
        visits = ways.visits(cut, shape.way)
        times = [0.0] * len(pipeline)
        for place, a, b in visits:
            times[place] += costs.spans.compute_s(a, b) / capacity[place]
        at = times.index(max(times))
        before = visits[: [place for place, _, _ in visits].index(at)]
        head = sum(costs.spans.forward_s(a, b) / capacity[place] for place, a, b in before)
        cuts.append(cut)
        rates.append(Rate(head_s=head, each_s=times[at]))
    return PipelineShapes(
        ends=tuple(cuts),
        shares=min_max_shares(sum(shape.shares), rates),
        estimate_s=shape.estimate_s,
        way=shape.way,
    )
