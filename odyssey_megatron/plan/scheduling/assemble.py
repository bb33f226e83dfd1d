"""Verified programs of whole plans, worked out once for each kind of group: 2,048 workers in a fraction of a second.

Groups of routes share no worker. So a schedule is correct if each group's is, and all workers sum their buckets in one
order, after which only weight gradients and further sums come. Equal groups differ in the numbers of their workers and
microbatches only.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from odyssey_megatron.plan.checking.verify import verify_lowered
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Hop, Layout, Route, layout_from_routes
from odyssey_megatron.plan.placing.memory import state_bytes
from odyssey_megatron.plan.schedule import Instr, Op
from odyssey_megatron.plan.scheduling.known import known
from odyssey_megatron.plan.scheduling.list_schedule import Solved
from odyssey_megatron.plan.scheduling.messages import with_turns
from odyssey_megatron.plan.scheduling.order import Order
from odyssey_megatron.plan.scheduling.programs import Programs
from odyssey_megatron.plan.scheduling.reductions import buckets, reduction_order, tail_length, with_reductions
from odyssey_megatron.plan.scheduling.visits import OPS, RECV_FORWARD, SEND_BACKWARD, SEND_FORWARD, Visits


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """The programs of all workers."""

    programs: Programs
    peak_bytes: tuple[tuple[int, int], ...]
    ahead: str = ""
    """See ``Plan.ahead``."""


def assemble(order: Order, layout: Layout, costs: Costs) -> Assembled:
    """Lower and verify ``order``.

    Raises:
        ScheduleInvalid: a group's schedule does not carry out its routes, deadlocks or exceeds its memory.
    """
    sums: dict[int, list[tuple[int, int]]] = {worker: [] for worker in order.done_s}
    for bucket in reduction_order(buckets(layout, costs), behind=layout.num_layers):
        for worker in bucket.holders:
            sums[worker].append((bucket.first, bucket.last))
    peaks = state_bytes(layout, costs)
    kinds: dict[int, tuple[Kind, list[str]]] = {}
    templates: dict[str, int] = {}
    found: dict[tuple[int, int, tuple[tuple[int, int], ...]], int] = {}
    groups: list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = []
    for group in order.groups:
        if id(group.solved) not in kinds:
            kind = lowered(group.solved, costs)
            kinds[id(group.solved)] = kind, kind.heads()
        kind, heads = kinds[id(group.solved)]
        seats = []
        for seat, worker in enumerate(group.workers):
            own = tuple(sums.pop(worker))
            if (id(kind), seat, own) not in found:
                template = kind.program(heads[seat], seat, own)
                found[id(kind), seat, own] = templates.setdefault(template, len(templates))
            seats.append((worker, found[id(kind), seat, own]))
            peaks[worker] += kind.peaks[seat]
        groups.append(((*group.microbatches, *group.workers), tuple(seats)))
    idle = [
        (worker, templates.setdefault(_text([*map(_sum, own), "STEP"]), len(templates)))
        for worker, own in sums.items()
    ]
    groups += [((), tuple(idle))] if idle else []
    programs = Programs(templates=tuple(templates), groups=tuple(groups))
    return Assembled(programs=programs, peak_bytes=tuple(peaks.items()))


def lowered(solved: Solved, costs: Costs) -> Kind:
    """Return the lowered and verified programs of ``solved``, looked up if known. Raises ScheduleInvalid."""
    there = known(costs.of_orders)
    found = there.kinds.get(id(solved))
    if found is not None and found[0] is solved:
        return found[1]
    kind = Kind(solved, costs)
    if there.orders.get(solved.shape) is solved:
        there.kinds.put(id(solved), (solved, kind), kind.size_bytes)
    return kind


class Kind:
    """The programs of one kind of group, as templates over its microbatches and its workers: see ``Programs``.

    The *head* of a program is all of it before the weight gradients at its end. Sums are added later, as they depend on
    the whole layout.
    """

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
        visits = Visits(layout, buckets(layout, costs))
        programs, turns = with_turns({seat: list(queue) for seat, queue in enumerate(solved.queues)}, visits)
        summing = with_reductions(programs, visits)
        peaks = verify_lowered(visits, summing, turns, costs, dict(enumerate(shape.caps)))
        self.peaks = [peaks[seat] for seat in range(len(shape.caps))]
        heads = list[str]()
        self.tails: list[list[tuple[int, int, int]]] = []
        """For each worker, the weight gradients that it ends with: (place of the microbatch, first layer, last)."""
        spans = list(zip(visits.first, visits.last, strict=True))
        named = {span: _texts(*span) for span in set(spans)}
        texts, seats = [named[span] for span in spans], layout.num_microbatches
        for program in programs.values():
            head = len(program) - tail_length(program, visits.reductions)
            parts, places = [], []
            for code in program[:head]:
                visit, kind = code >> 3, code & 7
                parts.append(texts[visit][kind])
                places.append(visits.microbatch[visit])
                if kind >= SEND_FORWARD:
                    peers = visits.before if kind in (RECV_FORWARD, SEND_BACKWARD) else visits.behind
                    places.append(seats + peers[visit])
            heads.append(" ".join(parts) % tuple(places))
            ends = [code >> 3 for code in program[head:]]
            self.tails.append([(visits.microbatch[one], *spans[one]) for one in ends])
        # Compressed, since many are kept: a group of 256 workers has a megabyte of very repetitive text.
        self._heads = zlib.compress("\n".join(heads).encode(), level=1)
        self.size_bytes = len(self._heads) + 100 * sum(map(len, self.tails))
        """About how much memory this object takes."""

    def heads(self) -> list[str]:
        """Return the head of each worker's program."""
        return zlib.decompress(self._heads).decode().split("\n")

    def program(self, head: str, seat: int, sums: Sequence[tuple[int, int]]) -> str:
        """Return the program of the worker in place ``seat``, with its head and the buckets ``sums`` to sum."""
        parts, op = [head], Op.WEIGHT_GRAD.value
        for first, last in sums:
            for place, start, stop in self.tails[seat]:
                low, high = max(start, first), min(stop, last)
                if low < high:
                    parts.append(f"{op}{{{place}}}[{low}:{high}]")
            parts.append(_sum((first, last)))
        return _text([*parts, "STEP"])


def _sum(bucket: tuple[int, int]) -> str:
    return str(Instr(Op.REDUCE_GRAD, first=bucket[0], last=bucket[1]))


def _text(parts: Sequence[str]) -> str:
    return " ".join(filter(None, parts))


def _texts(first: int, last: int) -> tuple[str, ...]:
    """Return each kind of instruction of a visit as text, with %d for a place whose number differs between groups."""
    return (
        *(f"{op.value}{{%d}}[{first}:{last}]" for op in OPS[:SEND_FORWARD]),
        f"{Op.SEND_FORWARD.value}{{%d}}[{last}]>{{%d}}",
        f"{Op.RECV_FORWARD.value}{{%d}}[{first}]<{{%d}}",
        f"{Op.SEND_BACKWARD.value}{{%d}}[{first}]>{{%d}}",
        f"{Op.RECV_BACKWARD.value}{{%d}}[{last}]<{{%d}}",
    )
