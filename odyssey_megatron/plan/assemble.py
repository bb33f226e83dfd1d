"""A verified schedule as text, worked out once for each kind of group: 2,048 workers in a fraction of a second.

Groups of routes share no worker, so a schedule is correct if each group's is and all workers
reduce their blocks in one order. Equal groups differ in worker and microbatch ids only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Hop, Layout, Route, layout_from_routes
from odyssey_megatron.plan.list_schedule import Solved
from odyssey_megatron.plan.memory import state_bytes
from odyssey_megatron.plan.messages import add_messages, add_reductions, reduction_order
from odyssey_megatron.plan.order import Group, Order
from odyssey_megatron.plan.schedule import COMPUTE, SEND, Instr, Op
from odyssey_megatron.plan.verify import verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """The programs of all workers."""

    text: str
    """As ``Schedule.to_text()`` of the same programs."""
    peak_bytes: tuple[tuple[int, int], ...]


def assemble(order: Order, layout: Layout, costs: Costs) -> Assembled:
    """Lowers, verifies and writes out ``order``.

    Raises:
        ScheduleInvalid: a group's schedule does not carry out its routes, deadlocks or exceeds its memory.
    """
    tails: dict[int, list[str]] = {worker: [] for worker in order.done_s}
    for block in reduction_order(layout):
        text = str(Instr(Op.REDUCE_GRAD, first=block.first, last=block.last))
        for worker in block.holders:
            tails[worker].append(text)
    heads: dict[int, str] = {}
    peaks = state_bytes(layout, costs)
    known: dict[int, _Kind] = {}
    for group in order.groups:
        kind = known.get(id(group.solved))
        if kind is None:
            kind = known[id(group.solved)] = _Kind(group.solved, costs)
        ids = (*group.microbatches, *group.workers)
        for worker, template, pick, peak in zip(
            group.workers, kind.templates, kind.picks, kind.peaks, strict=True
        ):
            heads[worker] = template % pick(ids)
            peaks[worker] += peak
    lines = [
        " ".join([f"{worker}:", *([heads[worker]] if worker in heads else []), *tail, "STEP"])
        for worker, tail in tails.items()
    ]
    return Assembled(text="\n".join(lines), peak_bytes=tuple(peaks.items()))


_NAME = {op: op.value for op in Op}  # ``value`` is a slow property


class _Kind:
    """The programs of a group with its own numbers, as %-templates over (microbatch ids, worker ids)."""

    def __init__(self, solved: Solved, costs: Costs) -> None:
        shape = solved.shape
        routes = tuple(
            Route(
                microbatches=ids,
                hops=tuple(Hop(worker=worker, first=first, last=last) for worker, first, last in hops),
            )
            for ids, hops in shape.routes
        )
        layout = layout_from_routes(len(costs.layers), routes)
        seats = tuple(range(len(shape.caps)))
        count = layout.num_microbatches
        alone = Group(workers=seats, microbatches=tuple(range(count)), solved=solved)
        order = Order(groups=(alone,), done_s=dict.fromkeys(seats, 0.0))
        schedule = add_messages(order.schedule(), layout)
        timeline = verify(
            layout,
            add_reductions(schedule, layout),
            costs,
            in_flight_cap=dict(enumerate(shape.caps)),
            speeds=dict(enumerate(shape.speeds)),
        )
        self.peaks = [peak for _, peak in timeline.activation_bytes]
        self.templates: list[str] = []
        self.picks: list[Callable[[tuple[int, ...]], tuple[int, ...]]] = []
        for _, program in schedule.programs:
            parts, places = [], []
            for op, microbatch, first, last, peer in program:
                places.append(microbatch)
                if op in COMPUTE:
                    parts.append(f"{_NAME[op]}%d[{first}:{last}]")
                else:
                    parts.append(f"{_NAME[op]}%d[{first}]{'>' if op in SEND else '<'}%d")
                    places.append(count + peer)
            self.templates.append(" ".join(parts))
            self.picks.append(_picker(places))


def _picker(places: list[int]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """As ``itemgetter``, also for a single place."""
    if len(places) == 1:
        return lambda ids: (ids[places[0]],)
    return itemgetter(*places)
