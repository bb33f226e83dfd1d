"""Memory-bounded list scheduling: the order in which the workers of a group of routes compute.

The backward is split in input gradient (on the critical path) and weight gradient (fills bubbles). A worker
that is free keeps as many microbatches between forward and input gradient as 1F1B would (one more than there
are stages behind it): below that number a forward is due, and a weight gradient runs if it must make
room for it. Otherwise input gradients go first, then forwards that fit, then weight gradients. At 1F1B's memory
that *is* 1F1B; where all workers have the memory of 1F1B's first stage it is a zero-bubble schedule.

It goes by times in round numbers (``rounded``), too, and what it finds is timed by the real ones: a rule that takes
what is there depends on what ends a microsecond earlier. By measured times alone its orders were 4 % longer in the
median, and up to 15 % (``tests/benchmarks/policies.py``, ``measured``).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.reductions import Tail, tail_length
from odyssey_megatron.plan.tasks import (
    TICKS_PER_S,
    Row,
    Shape,
    Tasks,
    abreast,
    by_number,
    finished,
    rounded,
    rows_of,
    tasks_of,
)
from odyssey_megatron.plan.visits import INPUT_GRAD

_NEAR = 1.002
"""An order this near to a lower bound is taken without trying further rules."""

_TASKS = 8192
"""Visits times tries, at the most, but for one try: deciding has to be quick. Where many routes share workers one group
may have thousands.
"""

_ALONE, _MANY = (4, 0, 2), (0, 4, 2)
"""By which times rules are tried, of one route and of several that share workers: all rules by the first, and the best
of them by the others (parts, as of ``rounded``, or 0 for the real times). Of 1,200 shapes from decisions for jobs of 8
to 128 workers, of presets and of unit layers, measured and not, that is 0.3 % longer than the shortest of all rules by
six times in the mean, and 5 % at most. One try alone is 1 % longer, and 6 % to 12 % at most; by the coarsest times it
is 3 to 7 % longer, and up to 40 % where stages have unlike layers.
"""

_CLOSE = 1.05
"""Orders that take so many times the time that there is are looked at once more: a finer try may be in time."""


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
        known = {hop[1:]: hop[1:] for _, hops in self.shape.routes for hop in hops}
        spans = [known[visit[1:]] for visit in visits]
        for queue, speed in zip(self.queues, self.shape.speeds, strict=True):
            at = len(queue) - tail_length(queue, 8 * len(visits))
            before, lead = queue[at - 1] if at else 0, None
            if before & 7 == INPUT_GRAD and visits[before >> 3][1] == 0:
                lead = spans[before >> 3]
            found.append(Tail(tuple(spans[code >> 3] for code in queue[at:]), speed, lead))
        return tuple(found)


class _Try(NamedTuple):
    """Tasks, to be put in order by other times."""

    tasks: Tasks
    by: Tasks
    longer: float
    """How many times as long as it is a task is by those times, at most: so is no order longer, then."""
    work: Counter[int]
    """Of each worker, by those times."""


class _Found(NamedTuple):
    late: bool
    """Somebody is done too late."""
    longest: int
    done: list[int]
    queues: list[list[int]]
    tasks: Tasks


def best_order(shape: Shape, costs: Costs, before_s: Sequence[float] | None = None) -> Solved | None:
    """The best of a few rules: which microbatches are urgent, and how many forwards are due.

    ``before_s``: when each worker must be done at the latest. None if no order is found in which all are; mostly that
    shows early.

    Routes that share workers are tried by number and abreast. With less memory than 1F1B needs its number in
    flight cannot be kept; then a number in proportion, and none (input gradients always first), are tried too.
    """
    numbered, side_by_side, rows = by_number(shape), abreast(shape), rows_of(shape, costs)
    enough = _NEAR * _least(shape, rows)
    ends = [inf if before_s is None else before_s[seat] * TICKS_PER_S - 1 for seat in range(len(shape.caps))]
    tries = max(1, _TASKS // max(1, sum(len(rows[route]) for _, route in numbered)))
    urgencies = [numbered] if side_by_side == numbered else [numbered, side_by_side]
    (first, *others), best, rule = _ALONE if len(urgencies) == 1 else _MANY, None, None
    for urgency in urgencies:
        one = _try(tasks_of(shape, rows, urgency), first)
        for target in _targets(one.tasks):
            if tries and (best is None or best.late or best.longest > enough):
                tries -= 1
                found = _better(best, one, target, ends, _CLOSE)
                best, rule = (best, rule) if found is best else (found, (one, target))
    for parts in others:
        if best is None or rule is None or not tries or (not best.late and best.longest <= enough):
            break
        (one, target), again = rule, _try(rule[0].tasks, parts)
        if again.by is not one.by:  # as they are where costs are equal
            tries -= 1
            best = _better(best, again, target, ends)
    if best is None or best.late:
        return None
    return Solved(
        shape=shape,
        done_s=tuple(ticks / TICKS_PER_S for ticks in best.done),
        queues=tuple(map(best.tasks.codes, best.queues)),
    )


def _targets(tasks: Tasks) -> list[list[int]]:
    """How many microbatches each visit's worker is to have in flight, by each rule; -1: input gradients go first."""
    # A worker that is visited again soonest gives back what it keeps if deeper forwards go first.
    found = [tasks.behind] if tasks.deeper == tasks.behind else [tasks.deeper, tasks.behind]
    return found if tasks.scaled == tasks.behind else [*found, tasks.scaled, [-1] * len(tasks.scaled)]


def _try(tasks: Tasks, parts: int) -> _Try:
    """``parts``: as of ``rounded``; 0: by the real times."""
    by = rounded(tasks, parts) if parts else tasks
    by = tasks if by == tasks else by
    pairs = {*zip(tasks.ticks, by.ticks, strict=True)}
    work: Counter[int] = Counter()
    for seat, ticks in zip(by.worker, by.ticks, strict=True):
        work[seat] += ticks
    return _Try(tasks, by, max([1.0, *(after / before for before, after in pairs if before)]), work)


def _better(
    best: _Found | None, one: _Try, target: list[int], ends: Sequence[float], spare: float = 1.0
) -> _Found | None:
    """``best``, or the order that a rule finds: rather one in time, and of two the shorter one. Given up where somebody
    cannot be done within ``spare`` times the time that there is.
    """
    shortest = inf if best is None or best.late else best.longest
    latest = [one.longer * min(shortest - 1, spare * end) - one.work[seat] for seat, end in enumerate(ends)]
    found = _list_schedule(one.by, target, latest)
    if found is None:
        return best
    done, queues = found
    if one.by is not one.tasks:
        timed = finished(one.tasks, queues)
        assert timed is not None, "what was list-scheduled runs"
        done = timed
    late = any(queue and at > end for queue, at, end in zip(queues, done, ends, strict=True))
    new = _Found(late, max(done), done, queues, one.tasks)
    return new if best is None or new[:2] < best[:2] else best


def _least(shape: Shape, rows: list[list[Row]]) -> int:
    """No order is shorter than all work of a worker, from when the first activation can reach it."""
    head: dict[int, int] = {}
    work = [0] * len(shape.caps)
    for (ids, _), hops in zip(shape.routes, rows, strict=True):
        reached = 0
        for row in hops if ids else ():
            head[row.worker] = min(head.get(row.worker, reached), reached)
            work[row.worker] += len(ids) * (row.forward + row.input_grad + row.weight_grad)
            reached += row.forward + row.down
    return max((head[worker] + work[worker] for worker in head), default=0)


def _list_schedule(
    tasks: Tasks, target: list[int], latest: list[float]
) -> tuple[list[int], list[list[int]]] | None:
    """Runs the clock; returns when each worker is done, and the tasks that it runs.

    None as soon as some worker cannot be done in time any more: ``latest`` is when each may start at the latest, to be
    busy from then on (running something moves that on, here).
    A forward is due while the worker has at most ``target[visit]`` microbatches in flight.
    """
    count, worker, ticks, size, then = len(tasks.visits), tasks.worker, tasks.ticks, tasks.size, tasks.then
    room = tasks.room
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
            first = forward[0] if forward else -1
            visit = (
                first if first < 0 or live[seat] <= room[first] else _admissible(forward, live[seat], room)
            )
            due = first >= 0 and in_flight[seat] <= target[first if visit < 0 else visit]
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
    """The most urgent forward that fits, -1 if none does; the most urgent of all does not.

    No deadlock: a forward fits only if one microbatch at each deeper visit to the same worker still does, so the
    deepest forward that is pending anywhere can always run.
    """
    # Only workers that are visited at several depths get further: their visits differ in room.
    return min((visit for visit in ready if live <= room[visit]), default=-1)
