"""The one generator of schedules: memory-bounded, deterministic list scheduling over any routes.

The backward is split in input gradient (on the critical path) and weight gradient (fills bubbles). A worker
that is free takes, in this order: an input gradient, a forward if its activations fit, a weight
gradient. On uniform pipelines at 1F1B's memory that rule *is* 1F1B: warm-up stops when the cap is
reached, and each further forward must wait for a weight gradient. Passes then add messages and reductions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from odyssey_megatron.errors import LayoutInvalid, PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout, Route
from odyssey_megatron.plan.memory import activation_caps, minimum_bytes
from odyssey_megatron.plan.messages import add_messages, add_reductions
from odyssey_megatron.plan.schedule import Instr, Op, Schedule

TICKS_PER_S = 10**9
"""Scheduling counts in whole nanoseconds, so that equal times compare equal on every machine."""


_Code = tuple[Op, int, int, int]
"""(op, microbatch, first, last), microbatches counted within the group of routes that share workers."""


def build_schedule(
    layout: Layout,
    costs: Costs,
    *,
    in_flight_cap: Mapping[int, int] | None = None,
    speeds: Mapping[int, float] | None = None,
) -> Schedule:
    """The program of every worker for one step of ``layout``.

    Args:
        in_flight_cap: worker -> bytes of activations it may keep; None = what 1F1B keeps at its place.
        speeds: worker -> relative speed; 1.0 where missing.

    Raises:
        LayoutInvalid: two hops in a row on one worker (they must be one hop).
        PlanInfeasible: a cap is below what any order needs.
    """
    order = order_routes(layout, costs, in_flight_cap=in_flight_cap, speeds=speeds)
    return lower(order, layout)


def lower(order: Order, layout: Layout) -> Schedule:
    """The passes from a compute order to what the interpreter runs."""
    return add_reductions(add_messages(order.schedule(), layout), layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What each worker computes and in which order. Cheap to make; instructions are only made on demand."""

    done_s: dict[int, float]
    """Worker -> when its last weight gradient ends."""
    codes: tuple[tuple[int, tuple[int, ...], Sequence[_Code]], ...]
    """(worker, the microbatch ids that its codes count in, codes), ascending by worker."""

    def schedule(self) -> Schedule:
        """Compute instructions only."""
        programs = []
        for worker, ids, codes in self.codes:
            program = tuple(Instr(op, ids[m], first, last) for op, m, first, last in codes)
            programs.append((worker, program))
        return Schedule(programs=tuple(programs))


def order_routes(
    layout: Layout,
    costs: Costs,
    *,
    in_flight_cap: Mapping[int, int] | None = None,
    speeds: Mapping[int, float] | None = None,
) -> Order:
    """The scheduling itself; arguments and errors as :func:`build_schedule`."""
    caps = activation_caps(layout, costs) if in_flight_cap is None else in_flight_cap
    _check_caps(layout, costs, caps)
    speeds = speeds or {}
    found: dict[int, tuple[tuple[int, ...], Sequence[_Code]]] = dict.fromkeys(layout.workers, ((), ()))
    known: dict[_Shape, tuple[list[int], tuple[list[_Code], ...]]] = {}
    done_s = dict.fromkeys(layout.workers, 0.0)
    for routes in independent(layout.routes):
        workers = sorted({hop.worker for route in routes for hop in route.hops})
        microbatches = tuple(sorted(m for route in routes for m in route.microbatches))
        shape = _shape(routes, workers, microbatches, caps, speeds)
        if shape not in known:
            known[shape] = _list_schedule(_tasks(shape, costs), len(workers))
        for worker, ticks, codes in zip(workers, *known[shape], strict=True):
            found[worker] = (microbatches, codes)
            done_s[worker] = ticks / TICKS_PER_S
    return Order(
        done_s=done_s,
        codes=tuple((worker, *order) for worker, order in found.items()),
    )


def independent(routes: tuple[Route, ...]) -> list[list[Route]]:
    """The routes in groups that share no worker: each can be scheduled alone, and equal groups only once."""
    parent: dict[int, int] = {}

    def root(worker: int) -> int:
        while parent.setdefault(worker, worker) != worker:
            worker = parent[worker]
        return worker

    for route in routes:
        for hop in route.hops:
            parent[root(hop.worker)] = root(route.hops[0].worker)
    groups: dict[int, list[Route]] = {}
    for route in sorted(routes, key=lambda route: route.microbatches):
        groups.setdefault(root(route.hops[0].worker), []).append(route)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class _Shape:
    """A group of routes with workers and microbatches numbered from 0: equal shapes, equal orders."""

    routes: tuple[tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]], ...]
    caps: tuple[int, ...]
    speeds: tuple[float, ...]


def _shape(
    routes: list[Route],
    workers: list[int],
    microbatches: tuple[int, ...],
    caps: Mapping[int, int],
    speeds: Mapping[int, float],
) -> _Shape:
    seat = {worker: i for i, worker in enumerate(workers)}
    number = {microbatch: i for i, microbatch in enumerate(microbatches)}
    return _Shape(
        routes=tuple(
            (
                tuple(number[m] for m in route.microbatches),
                tuple((seat[hop.worker], hop.first, hop.last) for hop in route.hops),
            )
            for route in routes
        ),
        caps=tuple(caps[worker] for worker in workers),
        speeds=tuple(speeds.get(worker, 1.0) for worker in workers),
    )


def _check_caps(layout: Layout, costs: Costs, caps: Mapping[int, int]) -> None:
    for worker, need in minimum_bytes(layout, costs).items():
        if caps[worker] < need:
            raise PlanInfeasible(
                f"worker {worker} may keep {caps[worker]} bytes of activations, its routes need at "
                f"least {need}. Allow that much, or give the worker fewer layers."
            )


@dataclass(slots=True)
class _Tasks:
    """One entry a visit (microbatch, hop), in parallel lists; visit i + 1 follows i unless ``ends[i]``."""

    codes: list[tuple[int, int, int]]
    worker: list[int]
    forward: list[int]
    input_grad: list[int]
    weight_grad: list[int]
    need: list[int]
    room: list[int]
    """Activations that may be live when this visit's forward starts."""
    urgency: list[int]
    starts: list[bool]
    ends: list[bool]
    lag: int


def _tasks(shape: _Shape, costs: Costs) -> _Tasks:
    tasks = _Tasks([], [], [], [], [], [], [], [], [], [], round(costs.message_s() * TICKS_PER_S))
    spans: dict[tuple[int, int, int], tuple[int, int, int, int]] = {}
    depths: list[dict[int, int]] = [{} for _ in shape.caps]
    for _, hops in shape.routes:
        for worker, first, last in hops:
            span = spans[worker, first, last] = _span(costs, first, last, shape.speeds[worker])
            depths[worker][first] = max(depths[worker].get(first, 0), span[3])
    for microbatches, hops in shape.routes:
        if any(a[0] == b[0] for a, b in pairwise(hops)):
            raise LayoutInvalid(f"hops {hops}: two in a row on one worker must be one hop")
        table = []
        for worker, first, last in hops:
            deeper = sum(need for depth, need in depths[worker].items() if depth > first)
            span = spans[worker, first, last]
            table.append((worker, first, last, *span, shape.caps[worker] - span[3] - deeper))
        # Routes that share workers advance in step: the i-th of n stands at (i + 1/2) / n of the way.
        count = len(microbatches)
        for index, microbatch in enumerate(microbatches):
            place = (2 * index + 1) * 10**6 // count * 10**6 + microbatch
            for at, (worker, first, last, forward, input_grad, weight_grad, need, room) in enumerate(table):
                tasks.codes.append((microbatch, first, last))
                tasks.worker.append(worker)
                tasks.forward.append(forward)
                tasks.input_grad.append(input_grad)
                tasks.weight_grad.append(weight_grad)
                tasks.need.append(need)
                tasks.room.append(room)
                tasks.urgency.append(place)
                tasks.starts.append(at == 0)
                tasks.ends.append(at == len(table) - 1)
    return tasks


def _span(costs: Costs, first: int, last: int, speed: float) -> tuple[int, int, int, int]:
    layers = costs.layers[first:last]
    scale = TICKS_PER_S / speed
    return (
        round(sum(layer.forward_s for layer in layers) * scale),
        round(sum(layer.input_grad_s for layer in layers) * scale),
        round(sum(layer.weight_grad_s for layer in layers) * scale),
        sum(layer.activation_bytes for layer in layers),
    )


def _list_schedule(tasks: _Tasks, num_workers: int) -> tuple[list[int], tuple[list[_Code], ...]]:
    """Runs the clock over the tasks; returns when each worker is done, and its order.

    No deadlock: a forward is admitted only if one microbatch at each deeper visit to the same worker still
    fits, so the deepest forward that is pending anywhere can always run.
    """
    count, worker, lag = len(tasks.codes), tasks.worker, tasks.lag
    forwards: list[list[tuple[int, int]]] = [[] for _ in range(num_workers)]
    input_grads: list[list[tuple[int, int]]] = [[] for _ in range(num_workers)]
    weight_grads: list[list[tuple[int, int]]] = [[] for _ in range(num_workers)]
    live, free = [0] * num_workers, [True] * num_workers
    done = [0] * num_workers
    orders: list[list[_Code]] = [[] for _ in range(num_workers)]
    # Events: (time, what). what < count: the forward of that visit is ready; < 2 count: its input gradient;
    # else: a worker is free.
    events = [(0, visit) for visit in range(count) if tasks.starts[visit]]
    while events:
        now = events[0][0]
        touched = set()
        while events and events[0][0] == now:
            what = heappop(events)[1]
            if what < count:
                seat = worker[what]
                heappush(forwards[seat], (tasks.urgency[what], what))
            elif what < 2 * count:
                what -= count
                seat = worker[what]
                heappush(input_grads[seat], (tasks.urgency[what], what))
            else:
                seat = what - 2 * count
                free[seat] = True
            touched.add(seat)
        for seat in touched:
            if not free[seat]:
                continue
            if input_grads[seat]:
                urgency, visit = heappop(input_grads[seat])
                heappush(weight_grads[seat], (urgency, visit))
                end, op = now + tasks.input_grad[visit], Op.INPUT_GRAD
                if not tasks.starts[visit]:
                    heappush(events, (end + lag, count + visit - 1))
            elif forwards[seat] and (visit := _admit(forwards[seat], live[seat], tasks.room)) >= 0:
                live[seat] += tasks.need[visit]
                end, op = now + tasks.forward[visit], Op.FORWARD
                heappush(events, (end, count + visit) if tasks.ends[visit] else (end + lag, visit + 1))
            elif weight_grads[seat]:
                visit = heappop(weight_grads[seat])[1]
                live[seat] -= tasks.need[visit]
                end, op = now + tasks.weight_grad[visit], Op.WEIGHT_GRAD
            else:
                continue
            free[seat], done[seat] = False, end
            orders[seat].append((op, *tasks.codes[visit]))
            heappush(events, (end, 2 * count + seat))
    return done, tuple(orders)


def _admit(ready: list[tuple[int, int]], live: int, room: list[int]) -> int:
    """Takes the most urgent forward that fits out of ``ready``; -1 if none does."""
    if live <= room[ready[0][1]]:
        return heappop(ready)[1]
    # Only workers that are visited at several depths get further: their visits differ in room.
    for item in sorted(ready)[1:]:
        if live <= room[item[1]]:
            ready.remove(item)
            ready.sort()
            return item[1]
    return -1
