"""Local improvement of what list scheduling has found, for groups with few visits.

Where workers have little memory, which weight gradient makes room for which forward decides how long a step takes, and
no rule of the list schedule is right everywhere. With few visits there is time to try: some tasks of a worker run
earlier or later, and what is no longer is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.list_schedule import TICKS_PER_S, Shape, Solved, tasks_of

_AT_ONCE = (1, 1, 1, 2, 3)
"""Tasks that change their place together."""

_FAR = 1 / 3
"""Of a worker's tasks, how many a move goes past at most."""

Queues = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What each task takes, numbered as in ``plan/visits.py``: 8 * visit + kind."""

    ticks: Sequence[int]
    size: Sequence[int]
    """Bytes that it adds, or frees if negative."""
    after: Sequence[int]
    """The task of another worker that it waits for; -1: none."""
    lag: Sequence[int]
    """How long the message from there takes."""


def polished(solved: Solved, costs: Costs, tries: int, seed: int = 0) -> Solved:
    """No longer than ``solved``; the same arguments give the same order.

    ``tries``: each takes a third of a microsecond for each task.
    """
    work, caps, rng = _work(solved.shape, costs), solved.shape.caps, Random(seed)
    best: Queues = [[*queue] for queue in solved.queues]
    done = _run(best, work)
    assert done is not None, "what was list-scheduled runs"
    first = max(done)
    for _ in range(tries):
        seat = rng.randrange(len(best))
        moved = _moved(best[seat], rng)
        if moved is None or not _fits(moved, work, caps[seat]):
            continue
        before, best[seat] = best[seat], moved
        ends = _run(best, work)
        if ends is None or max(ends) > max(done):
            best[seat] = before
        else:
            done = ends
    if max(done) >= first:  # of orders that are as long, the list schedule's
        return solved
    return Solved(
        shape=solved.shape,
        done_s=tuple(ticks / TICKS_PER_S for ticks in done),
        queues=tuple(array("I", queue) for queue in best),
    )


def _work(shape: Shape, costs: Costs) -> _Work:
    tasks = tasks_of(shape, costs)
    count = len(tasks.visits)

    def code(task: int) -> int:
        kind, at = divmod(task, count)
        return 8 * tasks.visits[at] + kind

    ticks, size, after, lag = [0] * (8 * count), [0] * (8 * count), [-1] * (8 * count), [0] * (8 * count)
    mask = (1 << tasks.bits) - 1
    for task, then in enumerate(tasks.then):
        ticks[code(task)], size[code(task)] = tasks.ticks[task], tasks.size[task]
        behind = then & mask
        if then and behind != task + count:  # its own input gradient needs no message
            after[code(behind)], lag[code(behind)] = code(task), then >> tasks.bits
    return _Work(ticks=ticks, size=size, after=after, lag=lag)


def _moved(queue: list[int], rng: Random) -> list[int] | None:
    """``queue`` with some neighbours elsewhere; None if that changes nothing."""
    if len(queue) < 2:
        return None
    first, count = rng.randrange(len(queue)), rng.choice(_AT_ONCE)
    far = rng.choice((-1, 1)) * rng.randint(1, max(2, int(len(queue) * _FAR)))
    rest = queue[:first] + queue[first + count :]
    at = min(len(rest), max(0, first + far))
    found = rest[:at] + queue[first : first + count] + rest[at:]
    return None if found == queue else found


def _fits(queue: list[int], work: _Work, cap: int) -> bool:
    """Whether each visit's tasks come in their order, within ``cap``."""
    live, done = 0, set[int]()
    for task in queue:
        if task & 7 and task - 1 not in done:
            return False
        done.add(task)
        live += work.size[task]
        if live > cap:
            return False
    return True


def _run(queues: Queues, work: _Work) -> list[int] | None:
    """When each worker is done; None if they wait for each other for ever."""
    ticks, after, lag = work.ticks, work.after, work.lag
    ends, at, now = [-1] * len(ticks), [0] * len(queues), [0] * len(queues)
    waiting: dict[int, int] = {}
    left, ready = sum(map(len, queues)), [*range(len(queues))]
    while ready:
        seat = ready.pop()
        queue, i, time = queues[seat], at[seat], now[seat]
        while i < len(queue):
            task = queue[i]
            other = after[task]
            if other >= 0:
                if ends[other] < 0:
                    waiting[other] = seat
                    break
                time = max(time, ends[other] + lag[task])
            time += ticks[task]
            ends[task] = time
            i += 1
            left -= 1
            if task in waiting:
                ready.append(waiting.pop(task))
        at[seat], now[seat] = i, time
    return None if left else now
