"""An interrupted step goes on: what is left of a plan's schedule when survivors keep what they have done.

How far a worker is with a step is a table, a row for each microbatch with a byte for each layer: the level (nothing, 1
forward, 2 input gradient, 3 weight gradient), plus :data:`BEGINS` where one of its visits begins. The sum of all
survivors' tables says the same of all of them, since a microbatch passes a layer on one worker only. The dead one's
part is nothing again. All here is a function of the new plan and that sum, so every survivor comes to the same result.

Only the dead worker's own work is done again, and of that not the forwards that others have run ahead
(``plan/eager.py``): they enter the tables of those to whom the new plan gives them. What a survivor has computed for
others it has kept, and sends once more where it has not been used; whoever has used something already is not sent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from odyssey_megatron.errors import ScheduleInvalid
from odyssey_megatron.plan.layout import Hop, Layout, Route
from odyssey_megatron.plan.messages import with_messages
from odyssey_megatron.plan.schedule import COMPUTE, MESSAGE, Instr, Op, Program, Schedule
from odyssey_megatron.plan.verify import verify_codes
from odyssey_megatron.plan.visits import BACKED, FINISHED, FORWARDED, NOTHING, Visits

BEGINS = 4
"""Added to a visit's level in its first layer: where two visits in a row are equally far, it tells them apart."""

Table = Sequence[Sequence[int]]
"""[microbatch][layer]: see above."""

Visit = tuple[int, int, int]
"""(microbatch, first layer, last)."""

REACHES = {Op.FORWARD: FORWARDED, Op.INPUT_GRAD: BACKED, Op.WEIGHT_GRAD: FINISHED, Op.BACKWARD: FINISHED}
"""Instruction -> the level that it brings a visit to."""


def done_visits(row: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first, last, level) of the visits that a row tells of, ascending."""
    edges = [at for at, code in enumerate(row) if code >= BEGINS or at == 0 or code != row[at - 1] % BEGINS]
    return [
        (first, last, row[first] - BEGINS)
        for first, last in pairwise([*edges, len(row)])
        if row[first] >= BEGINS
    ]


def fits(layout: Layout, worker: int, table: Table) -> bool:
    """Whether each visit that ``worker`` has begun lies within one of its hops in ``layout``.

    Otherwise somebody else would do it again, and its weight gradients would count twice.
    """
    hops: dict[int, list[Hop]] = {}
    for route in layout.routes:
        if mine := [hop for hop in route.hops if hop.worker == worker]:
            hops |= dict.fromkeys(route.microbatches, mine)
    return all(
        any(hop.first <= first and last <= hop.last for hop in hops.get(microbatch, ()))
        for microbatch, row in enumerate(table)
        for first, last, _ in done_visits(row)
    )


def usable(layout: Layout, worker: int, table: Table, ahead: Iterable[Visit]) -> list[Visit]:
    """Which forwards that ``worker`` has run ahead are its own work under ``layout``.

    ``table`` is its own. Where a visit begins or ends in the middle of a block, the step could not go on with it.
    """
    cuts = {block.first for block in layout.blocks()} | {layout.num_layers}
    paths = {m: route.hops for route in layout.routes for m in route.microbatches}
    return [
        (microbatch, first, last)
        for microbatch, first, last in ahead
        if {first, last} <= cuts
        and not any(table[microbatch][first:last])
        and any(
            hop.worker == worker and hop.first <= first and last <= hop.last
            for hop in paths.get(microbatch, ())
        )
    ]


def resume(layout: Layout, schedule: Schedule, table: Table) -> Schedule | None:
    """What is left of ``schedule`` for each worker, in the same order; None if the step must be done from its start.

    Args:
        layout: of the new plan; every survivor's own table :func:`fits` it.
        schedule: of the new plan.
        table: the sum of all survivors' tables.
    """
    cuts = {block.first for block in layout.blocks()}
    routes, done = [], list[int]()
    paths = {m: route.hops for route in layout.routes for m in route.microbatches}
    for microbatch, row in enumerate(table):
        visits_done = done_visits(row)
        pieces = [piece for hop in paths[microbatch] for piece in _pieces(hop, visits_done)]
        if any(hop.first not in cuts for hop, _ in pieces):
            return None  # layers that are one model chunk now would have to run apart
        routes.append(Route(microbatches=(microbatch,), hops=tuple(hop for hop, _ in pieces)))
        done += [level for _, level in pieces]
    visits = Visits(layout, tuple(routes))
    try:
        codes = visits.encode(Schedule(programs=_rest(schedule, visits, done)))
        ends = visits.reductions
        computing = {worker: [code for code in program if code < ends] for worker, program in codes.items()}
        whole = {
            worker: program + [code for code in codes[worker] if code >= ends]
            for worker, program in with_messages(computing, visits, done).items()
        }
        verify_codes(visits, whole, done=done)  # I7
    except ScheduleInvalid:
        return None
    return Schedule(programs=tuple((worker, visits.decode(program)) for worker, program in whole.items()))


def _pieces(hop: Hop, visits_done: Sequence[tuple[int, int, int]]) -> list[tuple[Hop, int]]:
    """``hop`` cut where the visits begin and end that are done already, with how far each piece is."""
    at, pieces = hop.first, []
    inside = [visit for visit in visits_done if hop.first <= visit[0] < hop.last]
    for first, last, level in [*inside, (hop.last, hop.last, NOTHING)]:
        if at < first:
            pieces.append((Hop(worker=hop.worker, first=at, last=first), NOTHING))
        if first < last:
            pieces.append((Hop(worker=hop.worker, first=first, last=last), level))
        at = last
    return pieces


def _rest(schedule: Schedule, visits: Visits, done: Sequence[int]) -> tuple[tuple[int, Program], ...]:
    """The compute instructions and reductions that are left; an instruction of a hop as one of each of its pieces."""
    places = {key: visit for visit, key in enumerate(zip(visits.microbatch, visits.first, strict=True))}
    programs = []
    for worker, program in schedule.programs:
        rest = list[Instr]()
        for instr in program:
            if instr.op in COMPUTE:
                visit = places[instr.microbatch, instr.first]
                pieces = [visit]
                while visits.last[pieces[-1]] < instr.last:
                    pieces.append(pieces[-1] + 1)
                for piece in pieces if instr.op is Op.FORWARD else reversed(pieces):
                    op = instr.op
                    if op is Op.BACKWARD and done[piece] == BACKED:
                        op = Op.WEIGHT_GRAD
                    if done[piece] < REACHES[op]:
                        rest.append(Instr(op, instr.microbatch, visits.first[piece], visits.last[piece]))
            elif instr.op not in MESSAGE and instr.op is not Op.EAGER_FORWARD:
                rest.append(instr)
        programs.append((worker, tuple(rest)))
    return tuple(programs)
