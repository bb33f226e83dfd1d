"""Finding an order of a layout that takes about as long as the best one, and needs less memory.

An order fills the memory that it may use, to be a little faster. The user says by how much a plan may be slower if it
needs less memory (``--odyssey-slower-for-memory-percent``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.simulate import computed_before_s, step_end_s
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.memory import minimum_bytes
from odyssey_megatron.plan.scheduling.list_schedule import Solved
from odyssey_megatron.plan.scheduling.order import Group, Order, solve
from odyssey_megatron.plan.scheduling.tasks import numbered_tasks

_TRIES = 6
"""Number of bisections, after which at most a 64th of all that could be saved is missed."""
MOST_VISITS = 8192
"""The largest number of visits, of microbatches to stages, that are put in order once more in each try, at 10 to 40 µs
each. With more the order stays as it is."""


def leaner(
    order: Order,
    layout: Layout,
    costs: Costs,
    caps: Mapping[int, int],
    *,
    longest_s: float,
    most_visits: int = MOST_VISITS,
    thorough: bool = False,
) -> tuple[Order, float] | None:
    """Return an order whose fullest worker needs fewer bytes, and the time of its step, which is at most ``longest_s``.

    Returns None if none is found. The number of bytes that all workers must save is found by bisection. As the step's
    time is not monotone in it, the result is good, but not always the best. Deterministic.

    Args:
        caps: worker -> bytes of activations, with which ``order`` was found; with these workers are equally full.
        most_visits: the largest number of visits, in pipelines that are not alike, for which there is time.
        thorough: see ``order_routes``.
    """
    kinds = {id(one.solved): one for one in order.groups}
    if sum(len(one.solved.shape.visits()) for one in kinds.values()) > most_visits:
        return None
    floor = minimum_bytes(layout, costs)
    low = _unused(order, costs, caps)
    high = min(caps[worker] - floor[worker] for worker in caps)
    ends_s, found = computed_before_s(layout, costs, longest_s), None
    for _ in range(_TRIES):
        fewer = (low + high + 1) // 2
        if not low < fewer <= high:
            break
        new = _with_fewer(order, kinds, fewer, costs, ends_s, thorough)
        step_s = step_end_s(layout, costs, new.done_s, new.tails()) if new else longest_s
        if new is None or step_s > longest_s:
            high = fewer - 1
            continue
        found = new, step_s
        low = _unused(new, costs, caps)
    return found


def _with_fewer(
    order: Order,
    kinds: Mapping[int, Group],
    fewer: int,
    costs: Costs,
    ends_s: Mapping[int, float],
    thorough: bool,
) -> Order | None:
    """Return an order with ``fewer`` bytes less for every worker's activations; None: not in time, or it does not fit.

    ``kinds`` has one group of each kind in ``order``, and ``ends_s`` when each worker must be done.
    """
    found: dict[int, Solved] = {}
    for key, one in kinds.items():
        shape = one.solved.shape
        less = replace(shape, caps=tuple(cap - fewer for cap in shape.caps))
        try:
            solved = solve(less, costs, [ends_s[worker] for worker in one.workers], thorough)
        except PlanInfeasible:
            return None
        if solved is None:
            return None
        found[key] = solved
    groups = tuple(replace(one, solved=found[id(one.solved)]) for one in order.groups)
    done_s = dict(order.done_s)
    for one in groups:
        done_s.update(zip(one.workers, one.solved.done_s, strict=True))
    return Order(groups=groups, done_s=done_s)


def _unused(order: Order, costs: Costs, caps: Mapping[int, int]) -> int:
    """Return the least number of bytes that a worker has left of its cap for activations."""
    peaks: dict[int, list[int]] = {}
    for solved in {id(one.solved): one.solved for one in order.groups}.values():
        tasks = numbered_tasks(solved.shape, costs)
        count = len(tasks.visits)
        sizes = ([tasks.size[(code & 7) * count + (code >> 3)] for code in queue] for queue in solved.queues)
        peaks[id(solved)] = [max(accumulate(one), default=0) for one in sizes]
    return min(
        (
            caps[worker] - peak
            for one in order.groups
            for worker, peak in zip(one.workers, peaks[id(one.solved)], strict=True)
        ),
        default=0,
    )
