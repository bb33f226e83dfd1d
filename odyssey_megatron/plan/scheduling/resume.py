"""How an interrupted step goes on: what is left of a plan's schedule when survivors keep what they have done.

A table says how far a worker is with a step. It has a row for each microbatch, with a byte for each layer: the level
(0 nothing, 1 forward, 2 input gradient, 3 weight gradient), plus :data:`BEGINS` in the first layer of a visit. The sum
of all survivors' tables describes all of them, since a microbatch passes a layer on one worker only. The dead worker's
part is 0 again. All results here follow from the new plan and that sum, so all survivors come to the same ones.

Only the dead worker's own work is done again, except for forwards that others have run ahead
(``plan/scheduling/eager.py``): these enter the tables of the workers to which the new plan gives them. A survivor has
kept what it has computed for others, and sends it once more if it has not been used yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from odyssey_megatron.plan.layout import Hop, Layout
from odyssey_megatron.plan.schedule import COMPUTE, MESSAGE, Instr, Op, Program
from odyssey_megatron.plan.scheduling.visits import BACKED, FINISHED, FORWARDED

BEGINS = 4
"""Added to a visit's level in its first layer, to tell two adjacent visits apart that are equally far."""

Table = Sequence[Sequence[int]]
"""How far a step is, as [microbatch][layer]: see the module's docstring."""

Visit = tuple[int, int, int]
"""(microbatch, first layer, last)."""

REACHES = {Op.FORWARD: FORWARDED, Op.INPUT_GRAD: BACKED, Op.WEIGHT_GRAD: FINISHED, Op.BACKWARD: FINISHED}
"""Compute instruction -> the level to which it brings a visit."""


_BACKWARD = (Op.SEND_BACKWARD, Op.RECV_BACKWARD)


def done_visits(row: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (first layer, last, level) of the visits that have begun by a microbatch's row, ascending."""
    edges = [at for at, code in enumerate(row) if code >= BEGINS or at == 0 or code != row[at - 1] % BEGINS]
    return [
        (first, last, row[first] - BEGINS)
        for first, last in pairwise([*edges, len(row)])
        if row[first] >= BEGINS
    ]


def fits(layout: Layout, worker: int, table: Table) -> bool:
    """Whether each visit that ``worker`` has begun lies within one of its hops in ``layout``.

    Otherwise another worker would do the visit again, and its weight gradients would count twice. ``table`` is the
    worker's own.
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
    """Return those eager forwards of ``worker`` (``ahead``) that are its own work under ``layout``.

    ``table`` is its own. Visits that begin or end within a block are left out: the step could not go on with them.
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


def rest(program: Program, table: Table, cuts: Collection[int]) -> Program | None:
    """Return what is left of a worker's ``program``, in the same order; None if the step must be done from its start.

    Each worker finds its own part, and the parts fit together. Nobody waits for ever: what an instruction needs stands
    before it in the verified schedule, so it also does in what is left, or has been done. Messages whose contents have
    been computed already are sent and received first, in one order of all of them; then those of the schedule follow.

    Args:
        program: the worker's program in the new plan, whose layout every survivor's own table :func:`fits`.
        table: the sum of all survivors' tables.
        cuts: the first layers of the new plan's blocks.
    """
    messages = [one for one in program if one.op in MESSAGE and not _is_through(one, table, at_receiver=True)]
    made = {one for one in messages if _is_through(one, table, at_receiver=False)}
    left = sorted(made, key=lambda one: (one.microbatch, one.first, one.op in _BACKWARD))
    ahead = set(messages) - made
    for instr in program:
        if instr.op in MESSAGE:
            left += [instr] * (instr in ahead)
        elif instr.op in COMPUTE:
            undone = _undone(instr, _pieces(instr, row := table[instr.microbatch]))
            if any(
                not {one.first, one.last % len(row)} <= {0, *cuts}
                for one in undone
                if one.op is not Op.WEIGHT_GRAD
            ):
                return None  # layers that are one model chunk now would have to run apart
            left += undone
        elif instr.op is not Op.EAGER_FORWARD:
            left.append(instr)
    return tuple(left)


def _is_through(message: Instr, table: Table, *, at_receiver: bool) -> bool:
    """Whether the sender has computed ``message``, or, with ``at_receiver``, the receiver has used it."""
    forward = message.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
    layer = message.first - (forward != at_receiver)
    return table[message.microbatch][layer] % BEGINS >= (FORWARDED if forward else BACKED)


def _pieces(instr: Instr, row: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the layers of ``instr`` as (first, last, level), cut where earlier visits began and ended."""
    inside = range(instr.first + 1, instr.last)
    edges = [at for at in inside if row[at] >= BEGINS or row[at] != row[at - 1] % BEGINS]
    ends = pairwise([instr.first, *edges, instr.last])
    return [(first, last, row[first] % BEGINS) for first, last in ends]


def _undone(instr: Instr, pieces: Sequence[tuple[int, int, int]]) -> list[Instr]:
    """Return ``instr`` as an instruction for each of its pieces that is not as far yet."""
    found = []
    for first, last, level in pieces if instr.op is Op.FORWARD else reversed(pieces):
        op = Op.WEIGHT_GRAD if instr.op is Op.BACKWARD and level == BACKED else instr.op
        if level < REACHES[op]:
            found.append(Instr(op, instr.microbatch, first, last))
    return found
