"""How an interrupted step goes on: what is left of a plan's schedule when survivors keep what they have done.

A table says how far a worker is with a step. It has a row for each microbatch, with a byte for each layer: the level
(0 nothing, 1 forward, 2 input gradient, 3 weight gradient), plus :data:`BEGINS` in the first layer of a visit.

A microbatch passes a layer on one worker only, and :func:`fits` makes sure that this is still the worker that has begun
it. So the own table says what is left to compute. Of its neighbours a worker needs to know which messages they have
computed already, and which they have used: the levels of the layers on both sides of each cut between blocks. These
are two bits each (:func:`levels_at`). Their sum over all survivors describes all of them, and the dead worker's part
is 0 again. All results here follow from the new plan, the own table and that sum.

Only the dead worker's own work is done again, except for forwards that others have run ahead
(``plan/scheduling/eager.py``): these enter the tables of the workers to which the new plan gives them. A survivor has
kept what it has computed for others, and sends it once more if it has not been used yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from odyssey_megatron.plan.layout import Hop, Layout
from odyssey_megatron.plan.schedule import COMPUTE, MESSAGE, Instr, Op, Program
from odyssey_megatron.plan.scheduling.visits import BACKED, FINISHED, FORWARDED

BEGINS = 4
"""Added to a visit's level in its first layer, to tell two adjacent visits apart that are equally far."""

Rows = Mapping[int, Sequence[int]]
"""A worker's own table: microbatch -> the code of each layer, for the microbatches that it has begun."""

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


def cuts_of(layout: Layout) -> frozenset[int]:
    """Return the layers at which blocks begin, and the number of layers."""
    return frozenset({0, layout.num_layers, *(block.first for block in layout.blocks())})


def fits(layout: Layout, worker: int, rows: Rows) -> bool:
    """Whether each visit that ``worker`` has begun lies within one of its hops in ``layout``.

    Otherwise another worker would do the visit again, and its weight gradients would count twice. ``rows`` are the
    worker's own.
    """
    hops: dict[int, list[Hop]] = {}
    for route in layout.routes:
        if mine := [hop for hop in route.hops if hop.worker == worker]:
            hops |= dict.fromkeys(route.microbatches, mine)
    return all(
        any(hop.first <= first and last <= hop.last for hop in hops.get(microbatch, ()))
        for microbatch, row in rows.items()
        for first, last, _ in done_visits(row)
    )


def usable(layout: Layout, worker: int, rows: Rows, ahead: Iterable[Visit]) -> list[Visit]:
    """Return those eager forwards of ``worker`` (``ahead``) that are its own work under ``layout``.

    ``rows`` are its own. Visits that begin or end within a block are left out: the step could not go on with them.
    """
    cuts = cuts_of(layout)
    paths = {m: route.hops for route in layout.routes for m in route.microbatches}
    return [
        (microbatch, first, last)
        for microbatch, first, last in ahead
        if {first, last} <= cuts
        and not any(rows.get(microbatch, ())[first:last])
        and any(
            hop.worker == worker and hop.first <= first and last <= hop.last
            for hop in paths.get(microbatch, ())
        )
    ]


def runs_apart(program: Program, rows: Rows, cuts: frozenset[int]) -> bool:
    """Whether layers that are one model chunk now would have to run apart, so that the step must be done again.

    Forwards that are :func:`usable` change nothing about that, as they begin and end at cuts.

    Args:
        program: a worker's program in a new plan.
        rows: its own, which :func:`fits` the new plan.
        cuts: see :func:`cuts_of`.
    """
    return any(
        not {one.first, one.last} <= cuts
        for instr in program
        if instr.op in COMPUTE and instr.microbatch in rows
        for one in _undone(instr, rows)
        if one.op is not Op.WEIGHT_GRAD
    )


def layers_at(cuts: frozenset[int]) -> list[int]:
    """Return the layers on both sides of each cut between two blocks, ascending."""
    inner = sorted(cuts)[1:-1]
    return sorted({layer for cut in inner for layer in (cut - 1, cut)})


def levels_at(cuts: frozenset[int], table: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Return the levels of the :func:`layers_at` these ``cuts``, of each microbatch, in two bits each.

    No two workers have the same bits, so the sum of their arrays has the bits of all, and none is carried.

    Args:
        table: how far a worker is, [microbatches, layers].
    """
    levels = (table[:, layers_at(cuts)] % BEGINS).ravel()
    in_fours = np.pad(levels, (0, -levels.size % _A_WORD)).reshape(-1, 4)
    in_bytes: npt.NDArray[np.uint8] = (in_fours << _SHIFTS).sum(axis=1, dtype=np.uint8)
    return in_bytes.view(np.int32)


_A_WORD = 16
"""Number of levels in a word of 32 bits."""
_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)


class Levels:
    """The levels of all workers together at the ``cuts``: the sum of their :func:`levels_at`."""

    def __init__(self, cuts: frozenset[int], total: npt.NDArray[np.int32]):
        self._bytes = total.tobytes()
        self._columns = {layer: at for at, layer in enumerate(layers_at(cuts))}

    def at(self, microbatch: int, layer: int) -> int:
        """Return how far ``microbatch`` is at ``layer``, which is one of the :func:`layers_at` the cuts."""
        number = microbatch * len(self._columns) + self._columns[layer]
        return self._bytes[number // 4] >> number % 4 * 2 & 3


def rest(program: Program, rows: Rows, levels: Levels) -> Program:
    """Return what is left of a worker's ``program``, in the same order.

    Each worker finds its own part, and the parts fit together. Nobody waits for ever: what an instruction needs stands
    before it in the verified schedule, so it also does in what is left, or has been done. Messages whose contents have
    been computed already are sent and received first, in one order of all of them; then those of the schedule follow.

    Args:
        program: the worker's program in the new plan, which no survivor :func:`runs_apart`.
        rows: its own, which :func:`fits` the new plan, as those of every survivor do.
        levels: those of all survivors.
    """
    messages = [
        one for one in program if one.op in MESSAGE and not _is_through(one, levels, at_receiver=True)
    ]
    made = {one for one in messages if _is_through(one, levels, at_receiver=False)}
    left = sorted(made, key=lambda one: (one.microbatch, one.first, one.op in _BACKWARD))
    ahead = set(messages) - made
    for instr in program:
        if instr.op in MESSAGE:
            left += [instr] * (instr in ahead)
        elif instr.op in COMPUTE:
            left += _undone(instr, rows)
        elif instr.op is not Op.EAGER_FORWARD:
            left.append(instr)
    return tuple(left)


def _is_through(message: Instr, levels: Levels, *, at_receiver: bool) -> bool:
    """Whether the sender has computed ``message``, or, with ``at_receiver``, the receiver has used it."""
    forward = message.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
    layer = message.first - (forward != at_receiver)
    return levels.at(message.microbatch, layer) >= (FORWARDED if forward else BACKED)


def _pieces(instr: Instr, row: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the layers of ``instr`` as (first, last, level), cut where earlier visits began and ended."""
    inside = range(instr.first + 1, instr.last)
    edges = [at for at in inside if row[at] >= BEGINS or row[at] != row[at - 1] % BEGINS]
    ends = pairwise([instr.first, *edges, instr.last])
    return [(first, last, row[first] % BEGINS) for first, last in ends]


def _undone(instr: Instr, rows: Rows) -> list[Instr]:
    """Return ``instr`` as an instruction for each of its pieces that is not as far yet."""
    if instr.microbatch not in rows:
        return [instr]
    pieces, found = _pieces(instr, rows[instr.microbatch]), []
    for first, last, level in pieces if instr.op is Op.FORWARD else reversed(pieces):
        op = Op.WEIGHT_GRAD if instr.op is Op.BACKWARD and level == BACKED else instr.op
        if level < REACHES[op]:
            found.append(Instr(op, instr.microbatch, first, last))
    return found
