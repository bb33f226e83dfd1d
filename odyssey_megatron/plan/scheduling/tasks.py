"""The tasks of a group of routes as numbers, with which orders are found and timed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile
from typing import NamedTuple

from odyssey_megatron.errors import LayoutInvalid, PlanInfeasible
from odyssey_megatron.plan.costs import Costs

TICKS_PER_S = 10**9
"""Scheduling counts in whole nanoseconds, so that equal times compare equal on every machine."""

ALWAYS = 2**30
"""A number of microbatches in flight that is never reached."""

_ALIKE = 1.03
"""Times within this factor of each other are taken to be one time, measured more than once."""
_FEW = 10
"""One in this many tasks is shorter than what is taken as the shortest time: an embedding is no measure for layers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A group of routes with workers and microbatches numbered from 0: equal shapes have equal orders."""

    routes: tuple[tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]], ...]
    """(microbatches, hops) of each route; a hop is (worker, first layer, last)."""
    caps: tuple[int, ...]
    """For each worker, the bytes of activations that it may keep."""
    speeds: tuple[float, ...]
    lags_s: tuple[tuple[int, int, float], ...] = ()
    """(sender, receiver, how many seconds longer a message takes) of slow links."""
    sums_s: tuple[float, ...] = ()
    """For each worker, the time of all its sums, if orders are to be compared by when these end; else empty."""

    def visits(self) -> list[tuple[int, int, int]]:
        """Return (microbatch, first layer, last) of each visit, as numbered in
        :mod:`odyssey_megatron.plan.scheduling.visits`.
        """
        routes = sorted((m, hops) for ids, hops in self.routes for m in ids)
        return [(m, first, last) for m, hops in routes for _, first, last in hops]


class Row(NamedTuple):
    """What all visits of one hop of a route have in common; times are in ticks."""

    worker: int
    forward: int
    input_grad: int
    weight_grad: int
    need: int
    """Bytes that stay from the forward on; ``early`` of them only until the input gradient."""
    early: int
    """Negative: bytes that the input gradient adds."""
    room: int
    """Bytes that may be live when the forward starts."""
    behind: int
    """Number of hops after this one on the route."""
    deeper: int
    """The same, but without limit if the route has visited this worker before."""
    scaled: int
    """``behind``, scaled down by the ratio of what fits at the route's first hop to what 1F1B would keep there."""
    starts: bool
    """Whether the hop is the first of its route."""
    down: int
    """Time of the message to the next hop."""
    up: int
    """Time of the message with the gradient to the hop before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """All tasks of a group: the forward, input gradient and weight gradient of each visit (microbatch, hop).

    The hops of a microbatch follow each other, and more urgent microbatches come first: a visit's index is its
    priority. A task is visit + (0 forward, 1 input gradient, 2 weight gradient) * number of visits.
    """

    visits: list[int]
    """For each visit, its number in :mod:`odyssey_megatron.plan.scheduling.visits`."""
    room: list[int]
    behind: list[int]
    deeper: list[int]
    scaled: list[int]
    """For each visit, as ``room``, ``behind`` and ``deeper``: the value of its :class:`Row`."""
    worker: list[int]
    ticks: list[int]
    size: list[int]
    """For each task, the bytes that it adds, or frees if negative."""
    then: list[int]
    """For each task, what its end makes ready: delay << bits | task; 0 for nothing."""
    sums: list[int]
    """For each worker, the time of its sums; empty if they do not count (``Shape.sums_s``)."""
    caps: tuple[int, ...]
    """For each worker, the bytes of activations that it may keep, if some input gradients add to them; else empty."""
    bits: int
    """Number of bits for what an event names: a task, or a worker, which are numbered after the tasks."""

    def codes(self, queue: Sequence[int]) -> array[int]:
        """Return the tasks of ``queue`` as codes of :mod:`odyssey_megatron.plan.scheduling.visits`."""
        visits, count = self.visits, len(self.visits)
        return array("I", [visits[task % count] * 8 + task // count for task in queue])


def by_number(shape: Shape) -> list[tuple[int, int]]:
    """Return (microbatch, its route) by number, most urgent first."""
    return sorted((m, route) for route, (ids, _) in enumerate(shape.routes) for m in ids)


def abreast(shape: Shape) -> list[tuple[int, int]]:
    """Return (microbatch, its route), most urgent first, such that all routes advance together.

    The i-th of a route's n microbatches is placed at (i + 1/2) / n of the step.
    """
    places = [
        ((2 * i + 1) / len(ids), m, route)
        for route, (ids, _) in enumerate(shape.routes)
        for i, m in enumerate(ids)
    ]
    return [(m, route) for _, m, route in sorted(places)]


def rows_of(shape: Shape, costs: Costs) -> list[list[Row]]:
    """Return the row of each hop of each route. Raises PlanInfeasible if a hop does not fit the memory."""
    spans: dict[tuple[int, int, int], tuple[int, int, int, int, int]] = {}
    depths: list[dict[int, int]] = [{} for _ in shape.caps]
    grown = [0] * len(shape.caps)
    for _, hops in shape.routes:
        if any(a[0] == b[0] for a, b in pairwise(hops)):
            raise LayoutInvalid(f"hops {hops}: two in a row on one worker must be one hop")
        for worker, first, last in hops:
            span = spans[worker, first, last] = _span(costs, first, last, shape.speeds[worker])
            depths[worker][first] = max(depths[worker].get(first, 0), span[3])
            grown[worker] = max(grown[worker], -span[4])
    rows, lag_s, late_s = [], costs.message_s(), {(a, b): longer_s for a, b, longer_s in shape.lags_s}
    for _, hops in shape.routes:
        row, share = list[Row](), 1.0
        for at, (worker, first, last) in enumerate(hops):
            span = spans[worker, first, last]
            kept = sum(need for depth, need in depths[worker].items() if depth > first)
            # What an input gradient adds must fit beside all that forwards have left.
            room = shape.caps[worker] - span[3] - kept - grown[worker]
            if room < 0:
                raise PlanInfeasible(f"layers [{first}:{last}) need {-room} more bytes of activations")
            behind, need = len(hops) - 1 - at, span[3]
            if at == 0 and need:
                share = min(1.0, ((room + need) // need) / (behind + 1))
            scaled = min(behind, max(0, round((behind + 1) * share) - 1))
            deeper = ALWAYS if worker in (before for before, *_ in hops[:at]) else behind
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
        sums=[round(sums_s * TICKS_PER_S) for sums_s in shape.sums_s],
        caps=shape.caps if any(row.early < 0 for row in values) else (),
        bits=bits,
    )


def numbered_tasks(shape: Shape, costs: Costs) -> Tasks:
    """Return the tasks of ``shape`` by number: visits are numbered as in
    :mod:`odyssey_megatron.plan.scheduling.visits`.
    """
    return tasks_of(shape, rows_of(shape, costs), by_number(shape))


def finished(tasks: Tasks, queues: Sequence[Sequence[int]]) -> list[int] | None:
    """Return when each worker is done, in ticks, if it runs its queue in order and as soon as it can.

    None: the workers wait for each other for ever.
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


def summed(tasks: Tasks, queues: Sequence[Sequence[int]], done: Sequence[int]) -> int:
    """Return when all have computed, in ticks, and summed, if each sums as soon as only weight gradients are left.

    Args:
        done: for each worker, when it has computed what is in its queue.
    """
    longest, first = max(done), 2 * len(tasks.visits)
    for queue, end, sums in zip(queues, done, tasks.sums, strict=bool(tasks.sums)):
        tail = takewhile(lambda task: task >= first, reversed(queue))
        longest = max(longest, end - sum(tasks.ticks[task] for task in tail) + sums)
    return longest


def rounded(tasks: Tasks, parts: int) -> Tasks:
    """Return ``tasks`` with times rounded to a unit of which about ``parts`` make up the shortest time.

    Messages take as many whole units as fit, which mostly are none. Orders are found with these times: hardly two
    measured times are equal, so a worker that takes whatever is ready would begin a weight gradient, for which nobody
    waits, when a task that all wait for becomes ready a microsecond later. In whole units they are ready together.
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
