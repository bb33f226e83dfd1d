"""The form in which a generation is sent: a head that all ranks read, and a part for each worker.

The head says who the members are and who holds what. A part says what one worker computes, sends and receives, with
the layers that move. The programs of equal pipelines are one text, which each worker fills with its own numbers. All
routes are sent as well, since ranks must know which way others' microbatches went when numbers are not finite.

Lists of numbers are text as in :mod:`odyssey_megatron.plan.sending.runs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from odyssey_megatron.codec import to_json
from odyssey_megatron.plan.layout import Hop, Layout, Route
from odyssey_megatron.plan.placing.slices import EVERYTHING, Span
from odyssey_megatron.plan.plan import Plan, Transfer
from odyssey_megatron.plan.scheduling.programs import Programs
from odyssey_megatron.plan.sending.generation import Generation
from odyssey_megatron.plan.sending.runs import from_runs, to_runs

Holders = tuple[tuple[int, str], ...]
"""(number of layers in a row, their holders), for all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShape:
    """What every rank knows of the plan; see ``Plan`` and ``Layout``."""

    cell_size: int
    policy: str
    holders: Holders
    keepers: Holders
    """The rings of keepers, with 1 added to each worker, so that ``NOBODY`` is 0."""
    copies: int
    tied: bool
    blocks: str
    """The first layer of each block."""
    num_microbatches: int
    senders: str
    """The workers that hold nothing any more, and send what they had: each has a part, too."""
    step_s: float
    bound_s: float
    transition_s: float
    keeps_messages: bool
    ahead: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every rank knows of the generation; see ``Generation``."""

    number: int
    members: str
    dead: str
    why: str
    plan_hash: str
    decide_s: float
    planned: bool
    incarnations: tuple[tuple[int, int], ...]
    fresh: str
    first: bool
    """Whether nobody holds anything yet."""
    shape: PlanShape
    timed: tuple[str, str] = ("", "")
    """The workers of the pairs that time links, as two lists."""
    shapes: tuple[tuple[int, int], ...] = ()


Moves = tuple[str, str, str, str, str, str]
"""Transfers, as six lists: first layer, source, target, first share, last share, number of layers in a row. The shares
are empty if all transfers are of whole layers, and the numbers if each is of one layer.
"""

NO_MOVES: Moves = ("", "", "", "", "", "")

NO_PROGRAM = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPart:
    """What concerns one worker."""

    routes: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    """(microbatches, spans of layers) of each route through it, which may visit it more than once."""
    template: int
    """Index of its program's template; ``NO_PROGRAM``: it holds nothing any more."""
    numbers: str
    """The numbers that fill the template."""
    held: str
    """The layers that it holds already."""
    transfers: Moves
    """The transfers that it sends and receives."""


NO_PART = WorkerPart(routes=(), template=NO_PROGRAM, numbers="", held="", transfers=NO_MOVES)
"""The part of a worker that holds and sends nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The texts of one generation."""

    head: str
    parts: Mapping[int, str]
    """Worker -> its part, for workers that hold or send anything."""
    templates: tuple[str, ...]
    routes: str
    """All routes, one a line: microbatches, workers, and the end of each hop."""


def to_wire(generation: Generation, cell_size: int) -> Sent:
    """Return the texts of ``generation``, which has its whole plan, as the coordinator knows it."""
    plan = generation.plan
    head = Head(
        number=generation.number,
        members=to_runs(generation.members),
        dead=to_runs(generation.dead),
        why=generation.why,
        plan_hash=generation.plan_hash,
        decide_s=generation.decide_s,
        planned=generation.planned,
        incarnations=generation.incarnations,
        fresh=to_runs(generation.fresh),
        first=generation.previous is None,
        shape=_shape(plan, cell_size),
        timed=(to_runs([one for one, _ in generation.timed]), to_runs([one for _, one in generation.timed])),
        shapes=generation.shapes,
    )
    return Sent(
        head=to_json(head),
        parts=_parts(plan, generation.previous),
        templates=plan.programs.templates,
        routes=_routes_text(plan.layout),
    )


def from_wire(head: Head, worker: int, part: WorkerPart = NO_PART, template: str = "") -> Generation:
    """Return the generation as ``worker`` knows it, with the part of the plan that concerns it.

    Args:
        template: the text of the template that ``part`` names.

    Raises:
        ValueError: the head or the part is malformed.
    """
    plan, held = _own_plan(head.shape, worker, part, template), from_runs(part.held)
    alone = tuple((worker,) if layer in held else () for layer in range(plan.layout.num_layers))
    previous = None if head.first else Layout(holders=alone, routes=(), tied=head.shape.tied)
    return Generation(
        number=head.number,
        members=from_runs(head.members),
        dead=from_runs(head.dead),
        why=head.why,
        previous=previous,
        plan=plan,
        plan_hash=head.plan_hash,
        decide_s=head.decide_s,
        planned=head.planned,
        incarnations=head.incarnations,
        fresh=from_runs(head.fresh),
        timed=tuple(zip(*map(from_runs, head.timed), strict=True)),
        shapes=head.shapes,
    )


def has_part(shape: PlanShape, worker: int) -> bool:
    """Whether ``worker`` holds or sends anything."""
    return any(worker in from_runs(text) for text in {shape.senders, *(text for _, text in shape.holders)})


def with_all_routes(layout: Layout, text: str) -> Layout:
    """Return ``layout``, as one worker knows it, with all routes from ``text`` (``Sent.routes``). Raises ValueError."""
    routes = []
    for line in text.splitlines():
        microbatches, workers, ends = map(from_runs, line.split(" "))
        spans = zip(workers, (0, *ends), ends, strict=False)
        hops = tuple(Hop(worker=worker, first=first, last=last) for worker, first, last in spans)
        routes.append(Route(microbatches=microbatches, hops=hops))
    return replace(layout, routes=tuple(routes), step_microbatches=0)


def _shape(plan: Plan, cell_size: int) -> PlanShape:
    layout = plan.layout
    return PlanShape(
        cell_size=cell_size,
        policy=plan.policy,
        holders=_packed(layout.holders),
        keepers=_packed(tuple(tuple(one + 1 for one in ring) for ring in layout.keepers)),
        copies=layout.copies,
        tied=layout.tied,
        blocks=to_runs([block.first for block in layout.blocks()]),
        num_microbatches=layout.num_microbatches,
        senders=to_runs(sorted({one.source for one in plan.transfers}.difference(layout.workers))),
        step_s=plan.step_s,
        bound_s=plan.bound_s,
        transition_s=plan.transition_s,
        keeps_messages=plan.keeps_messages,
        ahead=plan.ahead,
    )


class _Alike(NamedTuple):
    """Transfers of the same span of ``num_layers`` layers in a row, from one worker to another."""

    layer: int
    source: int
    target: int
    span: Span
    num_layers: int


def _by_worker(transfers: Iterable[Transfer]) -> Mapping[int, Sequence[_Alike]]:
    """Return what each worker sends and receives, in order."""
    found: dict[int, list[_Alike]] = defaultdict(list)
    for (_, source, target, span), alike in groupby(
        enumerate(transfers), lambda at: (at[1].layer - at[0], at[1].source, at[1].target, at[1].span)
    ):
        rows = list(alike)
        one = _Alike(rows[0][1].layer, source, target, span, len(rows))
        found[source].append(one)
        found[target].append(one)
    return found


def _moves(found: Sequence[_Alike]) -> Moves:
    if not found:
        return NO_MOVES
    layers, sources, targets, spans, counts = zip(*found, strict=True)
    cut, several = any(span != EVERYTHING for span in spans), any(count != 1 for count in counts)
    return (
        to_runs(layers),
        to_runs(sources),
        to_runs(targets),
        to_runs([span[0] for span in spans if cut]),
        to_runs([span[1] for span in spans if cut]),
        to_runs(counts if several else ()),
    )


def _transfers(moves: Moves) -> tuple[Transfer, ...]:
    """Return the transfers of ``moves``: the inverse of :func:`_moves`. Raises ValueError."""
    layers, sources, targets, starts, stops, counts = map(from_runs, moves)
    spans = [*zip(starts, stops, strict=True)] or [EVERYTHING] * len(layers)
    rows = zip(layers, sources, targets, spans, counts or [1] * len(layers), strict=True)
    return tuple(
        Transfer(layer=layer + more, source=source, target=target, span=span)
        for layer, source, target, span, count in rows
        for more in range(count)
    )


def _packed(layers: tuple[tuple[int, ...], ...]) -> Holders:
    return tuple((len(list(alike)), to_runs(workers)) for workers, alike in groupby(layers))


def _unpacked(holders: Holders) -> tuple[tuple[int, ...], ...]:
    return tuple(workers for count, text in holders for workers in (from_runs(text),) * count)


def _parts(plan: Plan, previous: Layout | None) -> dict[int, str]:
    layout = plan.layout
    routes: dict[int, list[tuple[str, tuple[tuple[int, int], ...]]]] = defaultdict(list)
    for route in layout.routes:
        spans: dict[int, tuple[tuple[int, int], ...]] = {}
        for hop in route.hops:
            spans[hop.worker] = (*spans.get(hop.worker, ()), (hop.first, hop.last))
        microbatches = to_runs(route.microbatches)
        for worker, own in spans.items():
            routes[worker].append((microbatches, own))
    held: dict[int, list[int]] = defaultdict(list)
    for layer, workers in enumerate(previous.holders if previous else ()):
        for worker in workers:
            held[worker].append(layer)
    moving = _by_worker(plan.transfers)
    seats = {worker: (NO_PROGRAM, "") for worker in moving}
    for numbers, group in plan.programs.groups:
        text = to_runs(numbers)
        seats |= {worker: (template, text) for worker, template in group}
    return {
        worker: to_json(
            WorkerPart(
                routes=tuple(routes.get(worker, ())),
                template=template,
                numbers=numbers,
                held=to_runs(held.get(worker, ())),
                transfers=_moves(moving.get(worker, ())),
            )
        )
        for worker, (template, numbers) in seats.items()
    }


def _own_plan(shape: PlanShape, worker: int, part: WorkerPart, template: str) -> Plan:
    routes = tuple(
        Route(
            microbatches=from_runs(text),
            hops=tuple(Hop(worker=worker, first=first, last=last) for first, last in spans),
        )
        for text, spans in part.routes
    )
    layout = Layout(
        holders=_unpacked(shape.holders),
        routes=routes,
        keepers=tuple(tuple(one - 1 for one in ring) for ring in _unpacked(shape.keepers)),
        copies=shape.copies,
        cuts=from_runs(shape.blocks),
        step_microbatches=shape.num_microbatches,
        tied=shape.tied,
    )
    return Plan(
        policy=shape.policy,
        layout=layout,
        programs=Programs(templates=(template,), groups=((from_runs(part.numbers), ((worker, 0),)),)),
        transfers=_transfers(part.transfers),
        step_s=shape.step_s,
        bound_s=shape.bound_s,
        transition_s=shape.transition_s,
        peak_bytes=(),
        keeps_messages=shape.keeps_messages,
        ahead=shape.ahead,
    )


def _routes_text(layout: Layout) -> str:
    return "\n".join(
        f"{to_runs(route.microbatches)} {to_runs([hop.worker for hop in route.hops])} "
        f"{to_runs([hop.last for hop in route.hops])}"
        for route in layout.routes
    )
