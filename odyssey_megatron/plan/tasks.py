"""What there is to run of a group of routes, in numbers: what orders are found with, and timed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from odyssey_megatron.errors import LayoutInvalid, PlanInfeasible
from odyssey_megatron.plan.costs import Costs

TICKS_PER_S = 10**9
"""Scheduling counts in whole nanoseconds, so that equal times compare equal on every machine."""

_ALWAYS = 2**30

_ALIKE = 1.03
"""Times that are at most so many times the shortest of them are taken for one, measured more than once."""
_FEW = 10
"""The shortest time is that of which one in so many tasks is shorter: an embedding alone is no measure for layers."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def codes(self, queue: Sequence[int]) -> array[int]:
        """The tasks of ``queue``, numbered as :mod:`odyssey_megatron.plan.visits` does."""
        visits, count = self.visits, len(self.visits)
        return array("I", [visits[task % count] * 8 + task // count for task in queue])


def by_number(shape: Shape) -> list[tuple[int, int]]:
    """(microbatch, its route), most urgent first."""
    return sorted((m, route) for route, (ids, _) in enumerate(shape.routes) for m in ids)


def abreast(shape: Shape) -> list[tuple[int, int]]:
    """All routes advance in step: the i-th of a route's n microbatches stands at (i + 1/2) / n of the way."""
    places = [
        ((2 * i + 1) / len(ids), m, route)
        for route, (ids, _) in enumerate(shape.routes)
        for i, m in enumerate(ids)
    ]
    return [(m, route) for _, m, route in sorted(places)]


def rows_of(shape: Shape, costs: Costs) -> list[list[Row]]:
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


def tasks_of(shape: Shape, rows: list[list[Row]], urgency: list[tuple[int, int]]) -> Tasks:
    first = [0, *accumulate(len(rows[route]) for _, route in by_number(shape))]
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


def numbered_tasks(shape: Shape, costs: Costs) -> Tasks:
    """Those of ``shape``, by number: their visits are as :mod:`odyssey_megatron.plan.visits` numbers them."""
    return tasks_of(shape, rows_of(shape, costs), by_number(shape))


def finished(tasks: Tasks, queues: Sequence[Sequence[int]]) -> list[int] | None:
    """When each worker is done, in ticks, if each runs its tasks in the order of its queue and as soon as it can; None
    if they wait for each other for ever.
    """
    ticks, then, bits, mask = tasks.ticks, tasks.then, tasks.bits, (1 << tasks.bits) - 1
    count = len(tasks.visits)
    ready = [0 if not then[count + visit] else -1 for visit in range(count)] + [-1] * count + [0] * count
    at, now = [0] * len(queues), [0] * len(queues)
    waiting: dict[int, int] = {}
    left, awake = sum(map(len, queues)), [*range(len(queues))]
    while awake:
        seat = awake.pop()
        queue, i, time = queues[seat], at[seat], now[seat]
        while i < len(queue):
            task = queue[i]
            if ready[task] > time:
                time = ready[task]
            elif ready[task] < 0:
                waiting[task] = seat
                break
            time += ticks[task]
            i += 1
            left -= 1
            if following := then[task]:
                other = following & mask
                ready[other] = time + (following >> bits)
                if other in waiting:
                    awake.append(waiting.pop(other))
        at[seat], now[seat] = i, time
    return None if left else now


def rounded(tasks: Tasks, parts: int) -> Tasks:
    """``tasks`` whose times are multiples of one, ``parts`` of which are about the shortest, and whose messages take as
    many of it as fit: mostly none. To find orders with.

    Who takes what is there has begun a weight gradient, for which nobody waits, when what all wait for comes a
    microsecond later. Of measured times, hardly two are equal; of these, what takes as many parts ends at once.
    """
    known = sorted(filter(None, tasks.ticks))
    part = max(1, known[len(known) // _FEW] // parts) if known else 1
    times, shortest = {0: 0}, 0
    for ticks in dict.fromkeys(known):
        if ticks > shortest * _ALIKE:
            shortest = ticks
        times[ticks] = round(shortest / part) * part
    mask = (1 << tasks.bits) - 1
    return replace(
        tasks,
        ticks=[times[ticks] for ticks in tasks.ticks],
        then=[((one >> tasks.bits) // part * part << tasks.bits) + (one & mask) for one in tasks.then],
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
