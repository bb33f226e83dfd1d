"""Memory-bounded list scheduling: the order in which the workers of a group of routes compute.

The backward is split in input gradient (on the critical path) and weight gradient (fills bubbles). A worker
that is free keeps as many microbatches between forward and input gradient as 1F1B would (one more than there
are stages behind it): below that number a forward is due, and a weight gradient runs if it must make
room for it. Otherwise input gradients go first, then forwards that fit, then weight gradients. At 1F1B's memory
that *is* 1F1B; where all workers have the memory of 1F1B's first stage it is a zero-bubble schedule.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from odyssey_megatron.errors import LayoutInvalid, PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.reductions import Tail, tail_length
from odyssey_megatron.plan.visits import INPUT_GRAD

TICKS_PER_S = 10**9
"""Scheduling counts in whole nanoseconds, so that equal times compare equal on every machine."""

_NEAR = 1.002
"""An order this near to a lower bound is taken without trying further rules."""

_ALWAYS = 2**30

_LARGE = 512
"""Microbatches of a group from which on only one rule is tried."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A group of routes with workers and microbatches numbered from 0: equal shapes, equal orders."""

    routes: tuple[tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]], ...]
    caps: tuple[int, ...]
    speeds: tuple[float, ...]
    lags_s: tuple[tuple[int, int, float], ...] = ()
    """(sender, receiver, what a message between them takes longer than others), of slow links."""

    def visits(self) -> list[tuple[int, int, int]]:
        """(microbatch, first layer, last) of each, as :mod:`odyssey_megatron.plan.visits` numbers them."""
        routes = sorted((m, hops) for ids, hops in self.routes for m in ids)
        return [(m, first, last) for m, hops in routes for _, first, last in hops]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The order of one shape."""

    shape: Shape
    done_s: tuple[float, ...]
    """Per worker, when its last weight gradient ends."""
    queues: tuple[array[int], ...]
    """Per worker, what it computes: codes as in :mod:`odyssey_megatron.plan.visits`."""

    def tails(self) -> tuple[Tail, ...]:
        """Per worker, the weight gradients that it ends with."""
        visits, found = self.shape.visits(), []
        for queue, speed in zip(self.queues, self.shape.speeds, strict=True):
            at = len(queue) - tail_length(queue, 8 * len(visits))
            before, lead = queue[at - 1] if at else 0, None
            if before & 7 == INPUT_GRAD and visits[before >> 3][1] == 0:
                lead = visits[before >> 3][1:]
            found.append(Tail(tuple(visits[code >> 3][1:] for code in queue[at:]), speed, lead))
        return tuple(found)


class Row(NamedTuple):
    """What all visits of a route's hop have in common; times in ticks."""

    worker: int
    forward: int
    input_grad: int
    weight_grad: int
    need: int
    """Bytes that stay from the forward on; ``early`` of them until the input gradient only."""
    early: int
    room: int
    """Bytes that may be live when the forward starts."""
    behind: int
    """Hops after this one; 0 for the last."""
    deeper: int
    """The same, and without end for all visits to a worker but its first on the route."""
    scaled: int
    """``behind``, scaled down by what fits where the route starts over what 1F1B would keep there."""
    starts: bool
    down: int
    """Of the message to the next hop, and of its gradient's to the one before: how long it takes."""
    up: int


@dataclass(slots=True, kw_only=True)
class Tasks:
    """What there is to run: the forward, input gradient and weight gradient of each visit (microbatch, hop).

    The hops of a microbatch follow each other, and more urgent microbatches come first: a visit's place is its
    priority. A task is visit + (0 forward, 1 input gradient, 2 weight gradient) * number of visits.
    """

    visits: list[int]
    """As :mod:`odyssey_megatron.plan.visits` numbers them."""
    room: list[int]
    behind: list[int]
    deeper: list[int]
    scaled: list[int]
    """Of each visit, as in its :class:`Row`."""
    worker: list[int]
    ticks: list[int]
    size: list[int]
    """Of each task: bytes that it adds, or frees if negative."""
    then: list[int]
    """What each task's end makes ready: delay << bits | task; 0 for nothing."""
    bits: int
    """Enough for a task or a worker behind all tasks that an event can name."""


def best_order(shape: Shape, costs: Costs, before_s: Sequence[float] | None = None) -> Solved | None:
    """The best of a few rules: which microbatches are urgent, and how many forwards are due.

    ``before_s``: when each worker must be done at the latest. None if some worker is not, which mostly shows after a
    tenth of the work.

    Routes that share workers are tried by number and abreast. With less memory than 1F1B needs its number in
    flight cannot be kept; then a number in proportion, and none (input gradients always first), are tried too.
    """
    by_number, abreast = _by_number(shape), _abreast(shape)
    rows = _rows(shape, costs)
    work, least = _least(shape, rows)
    # Large groups get one try: deciding has to be quick, and many routes average out.
    alone = abreast == by_number or len(by_number) > _LARGE
    best: tuple[Tasks, list[int], list[list[int]]] | None = None
    ends = [inf if before_s is None else before_s[seat] * TICKS_PER_S for seat in range(len(work))]
    for urgency in (by_number,) if alone else (by_number, abreast):
        tasks = _tasks(shape, rows, urgency)
        # A worker that is visited again soonest gives back what it keeps if deeper forwards go first.
        targets = [tasks.behind] if tasks.deeper == tasks.behind else [tasks.deeper, tasks.behind]
        if tasks.scaled != tasks.behind:
            targets += [tasks.scaled, [-1] * len(tasks.scaled)]
        for target in targets:
            shortest = inf if best is None else max(best[1])
            if shortest > _NEAR * least:
                latest = [min(shortest, end) - 1 - whole for end, whole in zip(ends, work, strict=True)]
                one = _list_schedule(tasks, target, latest)
                best = best if one is None else (tasks, *one)
    if best is None:
        return None
    tasks, done, queues = best
    count, visits = len(tasks.visits), tasks.visits
    return Solved(
        shape=shape,
        done_s=tuple(ticks / TICKS_PER_S for ticks in done),
        queues=tuple(
            array("I", [visits[item % count] * 8 + item // count for item in queue]) for queue in queues
        ),
    )


def tasks_of(shape: Shape, costs: Costs) -> Tasks:
    """Those of ``shape``, by number."""
    return _tasks(shape, _rows(shape, costs), _by_number(shape))


def _least(shape: Shape, rows: list[list[Row]]) -> tuple[list[int], int]:
    """All work of each worker; and no order is shorter than that, from when the first activation can reach it."""
    head: dict[int, int] = {}
    work = [0] * len(shape.caps)
    for (ids, _), hops in zip(shape.routes, rows, strict=True):
        reached = 0
        for row in hops if ids else ():
            head[row.worker] = min(head.get(row.worker, reached), reached)
            work[row.worker] += len(ids) * (row.forward + row.input_grad + row.weight_grad)
            reached += row.forward + row.down
    return work, max((head[worker] + work[worker] for worker in head), default=0)


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


def _rows(shape: Shape, costs: Costs) -> list[list[Row]]:
    """Per route, what its hops take."""
    spans: dict[tuple[int, int, int], tuple[int, int, int, int, int]] = {}
    depths: list[dict[int, int]] = [{} for _ in shape.caps]
    for _, hops in shape.routes:
        if any(a[0] == b[0] for a, b in pairwise(hops)):
            raise LayoutInvalid(f"hops {hops}: two in a row on one worker must be one hop")
        for worker, first, last in hops:
            span = spans[worker, first, last] = _span(costs, first, last, shape.speeds[worker])
            depths[worker][first] = max(depths[worker].get(first, 0), span[3])
    rows, lag_s, late_s = [], costs.message_s(), {(a, b): longer_s for a, b, longer_s in shape.lags_s}
    for _, hops in shape.routes:
        row, share = list[Row](), 1.0
        for at, (worker, first, last) in enumerate(hops):
            span = spans[worker, first, last]
            kept = sum(need for depth, need in depths[worker].items() if depth > first)
            room = shape.caps[worker] - span[3] - kept
            if room < 0:
                raise PlanInfeasible(f"layers [{first}:{last}) need {-room} more bytes of activations")
            behind, need = len(hops) - 1 - at, span[3]
            if at == 0 and need:
                share = min(1.0, ((room + need) // need) / (behind + 1))
            scaled = min(behind, max(0, round((behind + 1) * share) - 1))
            deeper = _ALWAYS if worker in (before for before, *_ in hops[:at]) else behind
            to = (hops[at + 1][0] if behind else -1, hops[at - 1][0] if at else -1)
            ways = (round((lag_s + late_s.get((worker, one), 0.0)) * TICKS_PER_S) for one in to)
            row.append(Row(worker, *span, room, behind, deeper, scaled, at == 0, *ways))
        rows.append(row)
    return rows


def _tasks(shape: Shape, rows: list[list[Row]], urgency: list[tuple[int, int]]) -> Tasks:
    first = [0, *accumulate(len(rows[route]) for _, route in _by_number(shape))]
    values = [row for _, route in urgency for row in rows[route]]
    count = len(values)
    bits = (2 * count + len(shape.caps)).bit_length()
    return Tasks(
        visits=[first[m] + at for m, route in urgency for at in range(len(rows[route]))],
        room=[row.room for row in values],
        behind=[row.behind for row in values],
        deeper=[row.deeper for row in values],
        scaled=[row.scaled for row in values],
        worker=[row.worker for row in values] * 3,
        ticks=[
            *(row.forward for row in values),
            *(row.input_grad for row in values),
            *(row.weight_grad for row in values),
        ],
        size=[
            *(row.need for row in values),
            *(-row.early for row in values),
            *(row.early - row.need for row in values),
        ],
        then=[
            *(
                (row.down << bits) + visit + 1 if row.behind else count + visit
                for visit, row in enumerate(values)
            ),
            *(0 if row.starts else (row.up << bits) + count + visit - 1 for visit, row in enumerate(values)),
            *(0 for _ in values),
        ],
        bits=bits,
    )


def _span(costs: Costs, first: int, last: int, speed: float) -> tuple[int, int, int, int, int]:
    spans, scale = costs.spans, TICKS_PER_S / speed
    return (
        round(spans.forward_s(first, last) * scale),
        round(spans.input_grad_s(first, last) * scale),
        round(spans.weight_grad_s(first, last) * scale),
        spans.activation_bytes(first, last),
        spans.early_bytes(first, last),
    )


def _list_schedule(
    tasks: Tasks, target: list[int], latest: list[float]
) -> tuple[list[int], list[list[int]]] | None:
    """Runs the clock; returns when each worker is done, and the tasks that it runs.

    None as soon as some worker cannot be done in time any more: ``latest`` is when each may start at the latest, to be
    busy from then on (running something moves that on, here).
    A forward is due while the worker has at most ``target[visit]`` microbatches in flight.
    """
    count, worker, ticks, size, then = len(tasks.visits), tasks.worker, tasks.ticks, tasks.size, tasks.then
    forwards, input_grads, weight_grads = ([list[int]() for _ in latest] for _ in range(3))
    live, in_flight, done = [0] * len(latest), [0] * len(latest), [0] * len(latest)
    free, queues = [True] * len(latest), [list[int]() for _ in latest]
    # An event is time << bits | what: the forward or input gradient that is ready, or 2 count + a free worker.
    bits, mask = tasks.bits, (1 << tasks.bits) - 1
    # At a route's first hop, whose input gradient nobody waits for, the forwards are ready.
    events = [visit for visit in range(count) if not then[count + visit]]
    while events:
        now = events[0] >> bits
        touched = set()
        while events and events[0] >> bits == now:
            what = heappop(events) & mask
            if what < 2 * count:
                seat = worker[what]
                heappush((forwards if what < count else input_grads)[seat], what)
            else:
                seat = what - 2 * count
                free[seat] = True
            touched.add(seat)
        for seat in filter(free.__getitem__, touched):
            forward, input_grad, weight_grad = forwards[seat], input_grads[seat], weight_grads[seat]
            visit = _admissible(forward, live[seat], tasks.room) if forward else -1
            due = bool(forward) and in_flight[seat] <= target[forward[0] if visit < 0 else visit]
            if visit >= 0 and (due or not input_grad):
                task = visit
                _take(forward, visit)
                in_flight[seat] += 1
            elif input_grad and not (due and weight_grad):
                task = heappop(input_grad)
                heappush(weight_grad, task + count)
                in_flight[seat] -= 1
            elif weight_grad:
                task = heappop(weight_grad)
            else:
                continue
            if now > latest[seat]:
                return None
            latest[seat] += ticks[task]
            live[seat] += size[task]
            queues[seat].append(task)
            end = now + ticks[task]
            free[seat], done[seat] = False, end
            heappush(events, end << bits | 2 * count + seat)
            if then[task]:
                heappush(events, (end << bits) + then[task])
    return done, queues


def _take(ready: list[int], visit: int) -> None:
    if visit == ready[0]:
        heappop(ready)
    else:
        ready.remove(visit)
        heapify(ready)


def _admissible(ready: list[int], live: int, room: list[int]) -> int:
    """The most urgent forward that fits, -1 if none does.

    No deadlock: a forward fits only if one microbatch at each deeper visit to the same worker still does, so the
    deepest forward that is pending anywhere can always run.
    """
    if live <= room[ready[0]]:
        return ready[0]
    # Only workers that are visited at several depths get further: their visits differ in room.
    return min((visit for visit in ready if live <= room[visit]), default=-1)
