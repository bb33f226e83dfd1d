"""Local improvement of orders from list scheduling, for groups with few visits.

If workers have little memory, a step's time depends on which weight gradient makes room for which forward, and no rule
of the list schedule is right everywhere. With few visits there is time to try: some tasks of a worker are moved to
run earlier or later, and the change is kept if the order does not become longer.
"""

from __future__ import annotations

from random import Random

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.scheduling.list_schedule import Solved
from odyssey_megatron.plan.scheduling.tasks import TICKS_PER_S, Tasks, finished, numbered_tasks, summed

_AT_ONCE = (1, 1, 1, 2, 3)
"""The numbers of neighbouring tasks that are moved together, from which one is drawn."""

_FAR = 1 / 3
"""The largest share of a worker's tasks that a move goes past."""


def polished(solved: Solved, costs: Costs, tries: int, seed: int = 0) -> Solved:
    """Return an order that is shorter than ``solved``, or ``solved`` itself. Deterministic.

    ``tries`` is the number of moves to try; each takes a third of a microsecond for each task.
    """
    tasks, caps, rng = numbered_tasks(solved.shape, costs), solved.shape.caps, Random(seed)
    count = len(tasks.visits)
    best = [[(code & 7) * count + (code >> 3) for code in queue] for queue in solved.queues]
    done = finished(tasks, best)
    assert done is not None, "what was list-scheduled runs"
    first = longest = summed(tasks, best, done)
    for _ in range(tries):
        seat = rng.randrange(len(best))
        moved = _moved(best[seat], rng)
        if moved is None or not _fits(moved, tasks, caps[seat]):
            continue
        before, best[seat] = best[seat], moved
        ends = finished(tasks, best)
        if ends is None or (now := summed(tasks, best, ends)) > longest:
            best[seat] = before
        else:
            done, longest = ends, now
    if longest >= first:  # if it is no shorter, keep the list schedule's
        return solved
    return Solved(
        shape=solved.shape,
        done_s=tuple(ticks / TICKS_PER_S for ticks in done),
        queues=tuple(map(tasks.codes, best)),
    )


def _moved(queue: list[int], rng: Random) -> list[int] | None:
    """Return ``queue`` with some neighbouring tasks moved; None if that changes nothing."""
    if len(queue) < 2:
        return None
    first, count = rng.randrange(len(queue)), rng.choice(_AT_ONCE)
    far = rng.choice((-1, 1)) * rng.randint(1, max(2, int(len(queue) * _FAR)))
    rest = queue[:first] + queue[first + count :]
    at = min(len(rest), max(0, first + far))
    found = rest[:at] + queue[first : first + count] + rest[at:]
    return None if found == queue else found


def _fits(queue: list[int], tasks: Tasks, cap: int) -> bool:
    """Whether each visit's tasks are in order in ``queue``, and activations stay within ``cap`` bytes."""
    live, done, count = 0, set[int](), len(tasks.visits)
    for task in queue:
        if task >= count and task - count not in done:
            return False
        done.add(task)
        live += tasks.size[task]
        if live > cap:
            return False
    return True
