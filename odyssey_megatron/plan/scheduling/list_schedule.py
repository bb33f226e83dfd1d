"""Memory-bounded list scheduling: the order in which the workers of a group of routes compute.

The backward is split in input gradient (on the critical path) and weight gradient (fills bubbles). Each worker
keeps as many microbatches between forward and input gradient as 1F1B would (one more than there are stages
behind it). If it has fewer a forward is due; if that does not fit, a weight gradient makes room for it.
Otherwise input gradients go first, then forwards that fit, then weight gradients. With 1F1B's memory
that *is* 1F1B; if all workers have the memory of 1F1B's first stage it is a zero-bubble schedule. An input gradient
that adds to what is kept, and does not fit, waits for weight gradients in turn.

Orders are found with times in round numbers (``rounded``), too, and then timed with the real ones. A rule that takes
whatever is ready depends on what ends a microsecond earlier: with measured times alone its orders were 4 % longer in
the median, and up to 15 % (``tests/benchmarks/policies.py``, ``measured``).
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
from odyssey_megatron.plan.scheduling.reductions import Tail, tail_length
from odyssey_megatron.plan.scheduling.tasks import (
    ALWAYS,
    TICKS_PER_S,
    Row,
    Shape,
    Tasks,
    abreast,
    by_number,
    finished,
    rounded,
    rows_of,
    summed,
    tasks_of,
)
from odyssey_megatron.plan.scheduling.visits import INPUT_GRAD

_NEAR = 1.002
"""An order this near to a lower bound is taken without trying further rules."""

_TASKS = 8192
"""The largest number of visits times tries, unless there is only one try: deciding has to be quick, and a group may
have thousands of visits if many routes share workers.
"""

_ALONE, _MANY = (4, 0, 2), (0, 4, 2)
"""The times with which rules are tried, for a single route and for several that share workers. All rules are tried with
the first, and the best of them with the others (parts, as in ``rounded``; 0: the real times). For 1,200 shapes from
decisions for jobs of 8 to 128 workers, with layers of presets and unit layers, measured and not, the orders found are
0.3 % longer in the mean, and 5 % at most, than the shortest of all rules with six kinds of times. With a single kind
they are 1 % longer, and 6 % to 12 % at most; with the coarsest times 3 to 7 %, and up to 40 % if stages have unlike
layers.
"""

_PATIENT_ALONE, _PATIENT_MANY = (0.25, 0.5, 0.75), (0.5,)
"""Fractions of a weight gradient with which the best rule is tried again, for a single route and for several: a worker
rather waits for a forward or an input gradient that comes sooner than that, for which others wait in turn. For 190
shapes of the plans of ``tests/benchmarks/policies.py`` that were not near their lower bounds, orders became 0.2 %
shorter in the mean, a seventh of them by more than 0.5 %, and 2.5 % at most.
"""

_CLOSE = 1.05
"""An order that is late, but by less than this factor, is tried once more with finer times: that may be in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The order found for one shape."""

    shape: Shape
    done_s: tuple[float, ...]
    """For each worker, when its last weight gradient ends."""
    queues: tuple[array[int], ...]
    """For each worker, its compute instructions in order: codes as in
    :mod:`odyssey_megatron.plan.scheduling.visits`.
    """

    def tails(self) -> tuple[Tail, ...]:
        """Return, for each worker, the weight gradients that it ends with."""
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
    """Tasks that are to be put in order with other times."""

    tasks: Tasks
    by: Tasks
    """The tasks with these other times."""
    longer: float
    """The largest factor by which the other times make a task longer; no order becomes longer by more."""
    work: Counter[int]
    """Worker -> the time of all its tasks, by the other times."""
    patience: float = 0.0
    """As in ``_PATIENT_ALONE``."""


class _Found(NamedTuple):
    late: bool
    """Whether some worker is done too late."""
    longest: int
    """When all have computed, and summed (:func:`odyssey_megatron.plan.scheduling.tasks.summed`)."""
    done: list[int]
    queues: list[list[int]]
    tasks: Tasks


def best_order(shape: Shape, costs: Costs, before_s: Sequence[float] | None = None) -> Solved | None:
    """Return the best order of a few rules, which say what microbatches are urgent, and how many are kept in flight.

    Routes that share workers are tried by number and abreast. With less memory than 1F1B needs, its number in
    flight cannot be kept; then a number in proportion, and none (input gradients always first), are tried too.

    Args:
        before_s: when each worker must be done at the latest. Returns None if no order is found that keeps to it,
            which mostly shows early.
    """
    numbered, side_by_side, rows = by_number(shape), abreast(shape), rows_of(shape, costs)
    enough = _NEAR * _least(shape, rows)
    ends = [inf if before_s is None else before_s[seat] * TICKS_PER_S - 1 for seat in range(len(shape.caps))]
    tries = max(1, _TASKS // max(1, sum(len(rows[route]) for _, route in numbered)))
    urgencies = [numbered] if side_by_side == numbered else [numbered, side_by_side]
    alone, best, rule = len(urgencies) == 1, None, None
    first, *others = _ALONE if alone else _MANY
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
        if again.by is not one.by:  # the times are the same where costs are equal
            tries -= 1
            found = _better(best, again, target, ends)
            best, rule = (best, rule) if found is best else (found, (again, target))
    if best is not None and rule is not None:
        best = _with_patience(best, rule, ends, enough, tries, alone=alone, hurried=before_s is not None)
    if best is None or best.late:
        return None
    return Solved(
        shape=shape,
        done_s=tuple(ticks / TICKS_PER_S for ticks in best.done),
        queues=tuple(map(best.tasks.codes, best.queues)),
    )


def _with_patience(
    best: _Found,
    rule: tuple[_Try, list[int]],
    ends: Sequence[float],
    enough: float,
    tries: int,
    *,
    alone: bool,
    hurried: bool,
) -> _Found | None:
    """Return the better one of ``best``, which ``rule`` has found, and what patient rules find.

    ``alone``: of a single route. ``hurried``: an order is wanted that is done in time, as where a recovery waits.
    """
    one, target = rule
    # Of rules that are equally good the first was taken, and another may be better with patience. Of 500 orders of
    # routes that visit workers twice 37 became more than 0.1 % shorter, by 2.4 % at most, for 12 % more time.
    targets = _targets(one.tasks)[:2] if alone and not hurried else [target]
    found: _Found | None = best
    for patience in _PATIENT_ALONE if alone else _PATIENT_MANY:
        for again in targets:
            if tries <= 0 or found is None or (not found.late and found.longest <= enough):
                return found
            tries -= 1
            found = _better(found, one._replace(patience=patience), again, ends)
    return found


def _targets(tasks: Tasks) -> list[list[int]]:
    """Return each rule's targets: for each visit, how many microbatches its worker keeps in flight.

    With -1 input gradients go first. If all forwards that fit do, more weight gradients are left for the end, and sums
    run beside these.
    """
    # A worker that is visited again frees memory soonest if deeper forwards go first.
    found = [tasks.behind] if tasks.deeper == tasks.behind else [tasks.deeper, tasks.behind]
    found += [[ALWAYS] * len(tasks.behind)] if tasks.sums else []
    return found if tasks.scaled == tasks.behind else [*found, tasks.scaled, [-1] * len(tasks.scaled)]


def _try(tasks: Tasks, parts: int) -> _Try:
    """Return a try of ``tasks`` with times in ``parts`` as in ``rounded``; 0: with the real times."""
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
    """Return the better one of ``best`` and the order that a rule finds: one in time, else the shorter one.

    The rule is given up once some worker cannot be done within ``spare`` times the time that it has.
    """
    shortest = inf if best is None or best.late else best.longest
    latest = [one.longer * min(shortest - 1, spare * end) - one.work[seat] for seat, end in enumerate(ends)]
    found = _list_schedule(one.by, target, latest, one.patience)
    if found is None:
        return best
    done, queues = found
    # Who waited for a forward that then did not fit might have computed something else: nobody waits so in a job.
    if one.by is not one.tasks or one.patience:
        timed = finished(one.tasks, queues)
        assert timed is not None, "what was list-scheduled runs"
        done = timed
    late = any(queue and at > end for queue, at, end in zip(queues, done, ends, strict=True))
    new = _Found(late, summed(one.tasks, queues, done), done, queues, one.tasks)
    return new if best is None or new[:2] < best[:2] else best


def _least(shape: Shape, rows: list[list[Row]]) -> int:
    """Return a lower bound in ticks: all work of a worker, from when the first activation can reach it; or all but
    weight gradients, and its sums.
    """
    head: dict[int, int] = {}
    work, weights, last = (
        [0] * len(shape.caps),
        [0] * len(shape.caps),
        [round(sums_s * TICKS_PER_S) for sums_s in shape.sums_s],
    )
    last = last or [0] * len(shape.caps)
    for (ids, _), hops in zip(shape.routes, rows, strict=True):
        reached = 0
        for row in hops if ids else ():
            head[row.worker] = min(head.get(row.worker, reached), reached)
            work[row.worker] += len(ids) * (row.forward + row.input_grad)
            weights[row.worker] += len(ids) * row.weight_grad
            reached += row.forward + row.down
    return max((head[at] + work[at] + max(weights[at], last[at]) for at in head), default=0)


def _list_schedule(
    tasks: Tasks, target: list[int], latest: list[float], patience: float
) -> tuple[list[int], list[list[int]]] | None:
    """Schedule by the clock; return when each worker is done, and the tasks that it runs; None if one is late.

    A forward is due while its worker has at most ``target[visit]`` microbatches in flight. ``latest`` is when each
    worker must start at the latest, to be busy from then on; each task that it runs moves this on, in place.
    """
    count, worker, ticks, size, then = len(tasks.visits), tasks.worker, tasks.ticks, tasks.size, tasks.then
    room, caps = tasks.room, tasks.caps
    forwards, input_grads, weight_grads = ([list[int]() for _ in latest] for _ in range(3))
    live, in_flight, done = [0] * len(latest), [0] * len(latest), [0] * len(latest)
    free, queues, coming = [True] * len(latest), *([list[int]() for _ in latest] for _ in range(2))
    # An event is time << bits | what: the forward or input gradient that is ready, or 2 count + a free worker.
    bits, mask = tasks.bits, (1 << tasks.bits) - 1
    # Forwards are ready at first at a route's first hop: those visits whose input gradient nobody waits for.
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
            first, kept = forward[0] if forward else -1, live[seat]
            visit = first if first < 0 or kept <= room[first] else _admissible(forward, kept, room)
            due = first >= 0 and in_flight[seat] <= target[first if visit < 0 else visit]
            full = caps and input_grad and kept + size[input_grad[0]] > caps[seat]
            if visit >= 0 and (due or not input_grad):
                task = visit
                _take(forward, visit)
                in_flight[seat] += 1
            elif input_grad and not ((due or full) and weight_grad):
                task = heappop(input_grad)
                heappush(weight_grad, task + count)
                in_flight[seat] -= 1
            elif weight_grad and (
                due or full or not _soon(coming[seat], now, patience * ticks[weight_grad[0]])
            ):
                task = heappop(weight_grad)
            else:
                continue
            if now > latest[seat]:
                return None
            latest[seat] += ticks[task]
            live[seat] = kept + size[task]
            queues[seat].append(task)
            heappush(events, (end := now + ticks[task]) << bits | 2 * count + seat)
            free[seat], done[seat] = False, end
            if then[task]:
                heappush(events, ready := (end << bits) + then[task])
                heappush(coming[worker[ready & mask]], ready >> bits)
    return done, queues


def _soon(coming: list[int], now: int, within: float) -> bool:
    """Return whether the next of the times ``coming``, a heap, is less than ``within`` from ``now``; drop past ones."""
    while coming and coming[0] <= now:
        heappop(coming)
    return bool(coming) and coming[0] - now < within


def _take(ready: list[int], visit: int) -> None:
    if visit == ready[0]:
        heappop(ready)
    else:
        ready.remove(visit)
        heapify(ready)


def _admissible(ready: list[int], live: int, room: list[int]) -> int:
    """Return the most urgent forward that fits, -1 if none does. The first of ``ready``, which is a heap, does not.

    No deadlock: a forward fits only if one microbatch at each deeper visit to the same worker still does, so the
    deepest forward that is pending anywhere can always run.
    """
    # One is found only on workers that are visited at several depths: their visits differ in room.
    return min((visit for visit in ready if live <= room[visit]), default=-1)
