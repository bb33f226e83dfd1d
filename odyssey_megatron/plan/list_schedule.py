"""Memory-bounded list scheduling: the order in which the workers of a group of routes compute.

The backward is split in input gradient (on the critical path) and weight gradient (fills bubbles). A worker
that is free keeps as many microbatches between forward and input gradient as 1F1B would (one more than there
are stages behind it): below that number a forward is due, and a weight gradient runs if it must make
room for it. Otherwise input gradients go first, then forwards that fit, then weight gradients. At 1F1B's memory
that *is* 1F1B; where all workers have the memory of 1F1B's first stage it is a zero-bubble schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

from odyssey_megatron.errors import LayoutInvalid, PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.schedule import Op

TICKS_PER_S = 10**9
"""Scheduling counts in whole nanoseconds, so that equal times compare equal on every machine."""

_NEAR = 1.002
"""An order this near to a lower bound is taken without trying further rules."""

_LARGE = 512
"""Microbatches of a group from which on only one rule is tried."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A group of routes with workers and microbatches numbered from 0: equal shapes, equal orders."""

    routes: tuple[tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]], ...]
    caps: tuple[int, ...]
    speeds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The order of one shape."""

    shape: Shape
    done_s: tuple[float, ...]
    """Per worker, when its last weight gradient ends."""
    queues: tuple[tuple[tuple[Op, int, int, int], ...], ...]
    """Per worker, (op, microbatch, first, last) in order."""


@dataclass(slots=True)
class Tasks:
    """One entry a visit (microbatch, hop), in parallel lists.

    The hops of a microbatch follow each other, and more urgent microbatches come first: a visit's index is
    its priority.
    """

    visits: list[tuple[int, int, int]]
    """(microbatch, first layer, last)."""
    worker: list[int]
    forward: list[int]
    input_grad: list[int]
    weight_grad: list[int]
    need: list[int]
    """Bytes that stay from the forward on; ``early`` of them until the input gradient only."""
    early: list[int]
    room: list[int]
    """Bytes that may be live when this visit's forward starts."""
    behind: list[int]
    """Hops after this one; 0 for the last."""
    starts: list[bool]
    lag: int


def best_order(shape: Shape, costs: Costs) -> Solved:
    """The best of a few rules: which microbatches are urgent, and how many forwards are due.

    Routes that share workers are tried by number and abreast. With less memory than 1F1B needs its number in
    flight cannot be kept; then a number in proportion, and none (input gradients always first), are tried too.
    """
    by_number, abreast = _by_number(shape), _abreast(shape)
    # Large groups get one try: deciding has to be quick, and many routes average out.
    alone = abreast == by_number or len(by_number) > _LARGE
    best: tuple[Tasks, list[int], list[list[int]]] | None = None
    for urgency in (by_number,) if alone else (by_number, abreast):
        tasks = _tasks(shape, costs, urgency)
        scaled, enough = _scaled(tasks), _NEAR * _least_ticks(tasks)
        targets = [tasks.behind] if scaled == tasks.behind else [tasks.behind, scaled, [-1] * len(scaled)]
        for target in targets:
            if best is None or max(best[1]) > enough:
                one = (tasks, *_list_schedule(tasks, target, len(shape.caps)))
                best = one if best is None or max(one[1]) < max(best[1]) else best
    assert best is not None  # the first rule has always run
    tasks, done, queues = best
    count = len(tasks.visits)
    return Solved(
        shape=shape,
        done_s=tuple(ticks / TICKS_PER_S for ticks in done),
        queues=tuple(tuple((_OPS[item // count], *tasks.visits[item % count]) for item in q) for q in queues),
    )


def _least_ticks(tasks: Tasks) -> int:
    """No order is shorter: a worker has all its work to do from when the first activation can reach it."""
    head: dict[int, int] = {}
    work: dict[int, int] = {}
    reached = 0
    for visit, worker in enumerate(tasks.worker):
        forward = tasks.forward[visit]
        reached = 0 if tasks.starts[visit] else reached + tasks.lag
        head[worker] = min(head.get(worker, reached), reached)
        reached += forward
        work[worker] = work.get(worker, 0) + forward + tasks.input_grad[visit] + tasks.weight_grad[visit]
    return max((head[worker] + work[worker] for worker in work), default=0)


def _scaled(tasks: Tasks) -> list[int]:
    """``behind``, scaled down by what fits where the route starts over what 1F1B would keep there."""
    scaled, share = [], 1.0
    for behind, starts, room, need in zip(tasks.behind, tasks.starts, tasks.room, tasks.need, strict=True):
        if starts:
            share = min(1.0, ((room + need) // need) / (behind + 1)) if need else 1.0
        scaled.append(min(behind, max(0, round((behind + 1) * share) - 1)))
    return scaled


def _by_number(shape: Shape) -> list[tuple[int, int]]:
    """(microbatch, its route), most urgent first."""
    return sorted((m, route) for route, (ids, _) in enumerate(shape.routes) for m in ids)


def _abreast(shape: Shape) -> list[tuple[int, int]]:
    """All routes advance in step: the i-th of a route's n microbatches stands at (i + 1/2) / n of the way."""
    places = [
        ((2 * i + 1) / len(ids), m, route)
        for route, (ids, _) in enumerate(shape.routes)
        for i, m in enumerate(ids)
    ]
    return [(m, route) for _, m, route in sorted(places)]


def _tasks(shape: Shape, costs: Costs, urgency: list[tuple[int, int]]) -> Tasks:
    spans: dict[tuple[int, int, int], tuple[int, int, int, int, int]] = {}
    depths: list[dict[int, int]] = [{} for _ in shape.caps]
    for _, hops in shape.routes:
        if any(a[0] == b[0] for a, b in pairwise(hops)):
            raise LayoutInvalid(f"hops {hops}: two in a row on one worker must be one hop")
        for worker, first, last in hops:
            span = spans[worker, first, last] = _span(costs, first, last, shape.speeds[worker])
            depths[worker][first] = max(depths[worker].get(first, 0), span[3])
    rows = []
    for _, hops in shape.routes:
        row = []
        for at, (worker, first, last) in enumerate(hops):
            span = spans[worker, first, last]
            deeper = sum(need for depth, need in depths[worker].items() if depth > first)
            room = shape.caps[worker] - span[3] - deeper
            if room < 0:
                raise PlanInfeasible(f"layers [{first}:{last}) need {-room} more bytes of activations")
            row.append(((first, last), (worker, *span, room, len(hops) - 1 - at, at == 0)))
        rows.append(row)
    visits = [(m, *layers) for m, route in urgency for layers, _ in rows[route]]
    values = [value for _, route in urgency for _, value in rows[route]]
    return Tasks(
        visits=visits,
        worker=[value[0] for value in values],
        forward=[value[1] for value in values],
        input_grad=[value[2] for value in values],
        weight_grad=[value[3] for value in values],
        need=[value[4] for value in values],
        early=[value[5] for value in values],
        room=[value[6] for value in values],
        behind=[value[7] for value in values],
        starts=[value[8] for value in values],
        lag=round(costs.message_s() * TICKS_PER_S),
    )


def _span(costs: Costs, first: int, last: int, speed: float) -> tuple[int, int, int, int, int]:
    layers = costs.layers[first:last]
    scale = TICKS_PER_S / speed
    return (
        round(sum(layer.forward_s for layer in layers) * scale),
        round(sum(layer.input_grad_s for layer in layers) * scale),
        round(sum(layer.weight_grad_s for layer in layers) * scale),
        sum(layer.activation_bytes for layer in layers),
        sum(layer.early_bytes for layer in layers),
    )


_OPS = (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)


def _list_schedule(tasks: Tasks, target: list[int], num_workers: int) -> tuple[list[int], list[list[int]]]:
    """Runs the clock over the tasks; returns when each worker is done, and what it runs.

    A forward is due while the worker has at most ``target[visit]`` microbatches in flight.
    What is run: visit + (0 forward, 1 input gradient, 2 weight gradient) * number of visits.
    No deadlock: a forward is admitted only if one microbatch at each deeper visit to the same worker still
    fits, so the deepest forward that is pending anywhere can always run.
    """
    count, worker, lag, behind = len(tasks.visits), tasks.worker, tasks.lag, tasks.behind
    need, early, room, starts = tasks.need, tasks.early, tasks.room, tasks.starts
    forwards, input_grads, weight_grads = ([list[int]() for _ in range(num_workers)] for _ in range(3))
    live, in_flight, done = [0] * num_workers, [0] * num_workers, [0] * num_workers
    free, queues = [True] * num_workers, [list[int]() for _ in range(num_workers)]
    # An event is time << bits | what. what < count: the forward of that visit is ready; < 2 count: its
    # input gradient; else: a worker is free.
    mask = (1 << (bits := (2 * count + num_workers).bit_length())) - 1
    events = [visit for visit in range(count) if starts[visit]]
    while events:
        now = events[0] >> bits
        touched = set()
        while events and events[0] >> bits == now:
            kind, what = divmod(heappop(events) & mask, count)
            seat = worker[what] if kind < 2 else what + (kind - 2) * count
            if kind < 2:
                heappush((forwards, input_grads)[kind][seat], what)
            else:
                free[seat] = True
            touched.add(seat)
        for seat in filter(free.__getitem__, touched):
            forward, input_grad, weight_grad = forwards[seat], input_grads[seat], weight_grads[seat]
            visit = _admissible(forward, live[seat], room) if forward else -1
            due = bool(forward) and in_flight[seat] <= target[forward[0] if visit < 0 else visit]
            if visit >= 0 and (due or not input_grad):
                forward.remove(visit)
                heapify(forward)
                live[seat] += need[visit]
                in_flight[seat] += 1
                queues[seat].append(visit)
                end = now + tasks.forward[visit]
                after = end + lag << bits | visit + 1 if behind[visit] else end << bits | count + visit
                heappush(events, after)
            elif input_grad and not (due and weight_grad):
                visit = heappop(input_grad)
                heappush(weight_grad, visit)
                live[seat] -= early[visit]
                in_flight[seat] -= 1
                queues[seat].append(count + visit)
                end = now + tasks.input_grad[visit]
                if not starts[visit]:
                    heappush(events, end + lag << bits | count + visit - 1)
            elif weight_grad:
                visit = heappop(weight_grad)
                live[seat] -= need[visit] - early[visit]
                queues[seat].append(2 * count + visit)
                end = now + tasks.weight_grad[visit]
            else:
                continue
            free[seat], done[seat] = False, end
            heappush(events, end << bits | 2 * count + seat)
    return done, queues


def _admissible(ready: list[int], live: int, room: list[int]) -> int:
    """The most urgent forward that fits, -1 if none does."""
    if live <= room[ready[0]]:
        return ready[0]
    # Only workers that are visited at several depths get further: their visits differ in room.
    return min((visit for visit in ready if live <= room[visit]), default=-1)
