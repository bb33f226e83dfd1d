"""Of the orders of a layout that take about as long as the best one, one that needs less memory.

An order fills the memory that it may use, to be a little faster. How much slower a plan may be for how much less memory
is the user's to say (``--odyssey-slower-for-memory-percent``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.list_schedule import Solved
from odyssey_megatron.plan.memory import minimum_bytes
from odyssey_megatron.plan.order import Group, Order, solve
from odyssey_megatron.plan.simulate import computed_before_s, step_end_s
from odyssey_megatron.plan.tasks import numbered_tasks

_TRIES = 6
"""What is left to find is a 64th of all that could be saved."""
MOST_VISITS = 8192
"""Of microbatches to stages, that are put in order once more each try, 10 to 40 µs each; of more the order stays."""


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
    """An order whose fullest worker needs fewer bytes, and its step, of at most ``longest_s``; None if none was found.

    All workers may use so many bytes fewer, which is bisected: whether it is in time is not monotone, so that it is a
    good one, not the best. Deterministic.

    Args:
        caps: that ``order`` was found with: worker -> bytes of activations; workers are equally full then.
        most_visits: of pipelines that are unlike, up to which there is time.
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
    """``order`` with ``fewer`` bytes of activations for every worker; None if it is not in time, or does not fit."""
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
    """Bytes that every worker has left of its ``caps`` for activations, at the least."""
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
