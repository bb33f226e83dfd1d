"""Verified programs, worked out once for each kind of group: 2,048 workers in a fraction of a second.

Groups of routes share no worker, so a schedule is correct if each group's is and all workers
reduce their blocks in one order. Equal groups differ in worker and microbatch ids only.
"""

from __future__ import annotations

from dataclasses import dataclass

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.known import known
from odyssey_megatron.plan.layout import Hop, Layout, Route, layout_from_routes
from odyssey_megatron.plan.list_schedule import Solved
from odyssey_megatron.plan.memory import state_bytes
from odyssey_megatron.plan.messages import reduction_order, with_messages, with_reductions
from odyssey_megatron.plan.order import Order
from odyssey_megatron.plan.programs import Programs
from odyssey_megatron.plan.schedule import Instr, Op
from odyssey_megatron.plan.verify import verify_codes
from odyssey_megatron.plan.visits import OPS, RECV_FORWARD, SEND_BACKWARD, SEND_FORWARD, Visits


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """The programs of all workers."""

    programs: Programs
    peak_bytes: tuple[tuple[int, int], ...]
    ahead: str = ""
    """See ``Plan.ahead``."""


def assemble(order: Order, layout: Layout, costs: Costs) -> Assembled:
    """Lowers and verifies ``order``.

    Raises:
        ScheduleInvalid: a group's schedule does not carry out its routes, deadlocks or exceeds its memory.
    """
    tails: dict[int, str] = dict.fromkeys(order.done_s, "")
    for block in reduction_order(layout):
        text = str(Instr(Op.REDUCE_GRAD, first=block.first, last=block.last)) + " "
        for worker in block.holders:
            tails[worker] += text
    peaks = state_bytes(layout, costs)
    kinds: dict[int, Kind] = {}
    templates: dict[str, int] = {}
    groups: list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = []
    for group in order.groups:
        kind = kinds.get(id(group.solved))
        if kind is None:
            kind = kinds[id(group.solved)] = _kind(group.solved, costs)
        seats = []
        for worker, head, peak in zip(group.workers, kind.templates, kind.peaks, strict=True):
            template = f"{head} {tails.pop(worker)}STEP"
            seats.append((worker, templates.setdefault(template, len(templates))))
            peaks[worker] += peak
        groups.append(((*group.microbatches, *group.workers), tuple(seats)))
    idle = [(worker, templates.setdefault(f"{tail}STEP", len(templates))) for worker, tail in tails.items()]
    groups += [((), tuple(idle))] if idle else []
    programs = Programs(templates=tuple(templates), groups=tuple(groups))
    return Assembled(programs=programs, peak_bytes=tuple(peaks.items()))


def _kind(solved: Solved, costs: Costs) -> Kind:
    there = known(costs)
    found = there.kinds.get(id(solved))
    if found is not None and found[0] is solved:
        return found[1]
    kind = Kind(solved, costs)
    if there.orders.get(solved.shape) is solved:
        there.kinds.put(id(solved), (solved, kind), sum(map(len, kind.templates)))
    return kind


class Kind:
    """The programs of a group as templates over (its microbatches, its workers): see ``Programs``."""

    def __init__(self, solved: Solved, costs: Costs) -> None:
        shape = solved.shape
        routes = tuple(
            Route(
                microbatches=ids,
                hops=tuple(Hop(worker=worker, first=first, last=last) for worker, first, last in hops),
            )
            for ids, hops in shape.routes
        )
        layout = layout_from_routes(len(costs.layers), routes, tied=costs.tied is not None)
        visits = Visits(layout)
        programs = with_messages({seat: list(queue) for seat, queue in enumerate(solved.queues)}, visits)
        timeline = verify_codes(
            visits,
            with_reductions(programs, visits),
            costs,
            in_flight_cap=dict(enumerate(shape.caps)),
            speeds=dict(enumerate(shape.speeds)),
        )
        self.peaks = [peak for _, peak in timeline.activation_bytes]
        self.templates: list[str] = []
        spans = list(zip(visits.first, visits.last, strict=True))
        named = {span: _texts(*span) for span in set(spans)}
        texts, seats = [named[span] for span in spans], layout.num_microbatches
        for program in programs.values():
            parts, places = [], []
            for code in program:
                visit, kind = code >> 3, code & 7
                parts.append(texts[visit][kind])
                places.append(visits.microbatch[visit])
                if kind >= SEND_FORWARD:
                    peers = visits.before if kind in (RECV_FORWARD, SEND_BACKWARD) else visits.behind
                    places.append(seats + peers[visit])
            self.templates.append(" ".join(parts) % tuple(places))


def _texts(first: int, last: int) -> tuple[str, ...]:
    """Per kind, an instruction as text: %d for the place of a number that differs between equal groups."""
    return (
        *(f"{op.value}{{%d}}[{first}:{last}]" for op in OPS[:SEND_FORWARD]),
        f"{Op.SEND_FORWARD.value}{{%d}}[{last}]>{{%d}}",
        f"{Op.RECV_FORWARD.value}{{%d}}[{first}]<{{%d}}",
        f"{Op.SEND_BACKWARD.value}{{%d}}[{first}]>{{%d}}",
        f"{Op.RECV_BACKWARD.value}{{%d}}[{last}]<{{%d}}",
    )
