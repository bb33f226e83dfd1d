"""Instructions as integers ("codes"), on which lowering, ``verify()`` and the clock work.

A visit is one hop of one microbatch. Visits are numbered by microbatch and hop, so ``visit + 1`` is the next hop of
the same microbatch. The code of a visit's instruction is ``visit * 8 + kind``. After all of these come the codes of the
reductions of the buckets, in layer order; of ``STEP``; of the eager forward of each visit; and of the part of each
visit's weight gradient in each bucket. So all facts about an instruction are found by its visit, without hashing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from odyssey_megatron.errors import LayoutInvalid, ScheduleInvalid
from odyssey_megatron.plan.layout import Block, Layout, Route
from odyssey_megatron.plan.schedule import COMPUTE, MESSAGE, Instr, Op, Program, Schedule

OPS = (
    Op.FORWARD,
    Op.INPUT_GRAD,
    Op.WEIGHT_GRAD,
    Op.BACKWARD,
    Op.SEND_FORWARD,
    Op.RECV_FORWARD,
    Op.SEND_BACKWARD,
    Op.RECV_BACKWARD,
)
FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD, SEND_FORWARD, RECV_FORWARD, SEND_BACKWARD, RECV_BACKWARD = range(
    8
)
"""Kinds of a visit's instructions. From 4 on they are messages, of which the odd ones are receives."""

NEEDS = (RECV_FORWARD - FORWARD, RECV_BACKWARD - INPUT_GRAD, 0, RECV_BACKWARD - BACKWARD)
"""For each kind of compute instruction, what to add to its code to get the receive that it waits for; 0: none."""

TO_NEXT = 8 + RECV_FORWARD - SEND_FORWARD
TO_PREVIOUS = -8 + RECV_BACKWARD - SEND_BACKWARD
"""What to add to a send's code to get that of its receive, which belongs to the next or the previous visit."""

NOTHING, FORWARDED, BACKED, FINISHED = range(4)
"""How far a visit is: nothing has run, or its forward has, or its input gradient, or its weight gradient."""

_KIND = {op: kind for kind, op in enumerate(OPS)}

Codes = dict[int, list[int]]
"""Worker -> its program as codes."""


class Visits:
    """The visits of ``layout``, as parallel lists, and the conversion between instructions and codes.

    Args:
        buckets: the buckets in which gradients are summed, in layer order (``plan/scheduling/reductions.py``); by
            default the blocks.

    Raises:
        LayoutInvalid: a route does not go through all layers in order, hop by hop to another worker.
    """

    def __init__(self, layout: Layout, buckets: Sequence[Block] | None = None) -> None:
        routes = layout.routes
        numbered = sorted((m, at) for at, route in enumerate(routes) for m in route.microbatches)
        if [m for m, _ in numbered] != list(range(len(numbered))):
            raise LayoutInvalid(f"microbatches {[m for m, _ in numbered]} are not numbered from 0, each once")
        rows = [_rows(route, layout.num_layers) for route in routes]
        table = [(m, *row) for m, at in numbered for row in rows[at]]
        self.layout = layout
        self.microbatch = [row[0] for row in table]
        self.worker = [row[1] for row in table]
        self.first = [row[2] for row in table]
        self.last = [row[3] for row in table]
        self.before = [row[4] for row in table]
        """For each visit, the worker that its activation comes from; -1 at a route's first hop."""
        self.behind = [row[5] for row in table]
        """For each visit, the worker that its result goes to; -1 at the last hop."""
        self.buckets = tuple(buckets or layout.blocks())
        self.bucket_at = {bucket.first: i for i, bucket in enumerate(self.buckets)}
        self.reductions = 8 * len(table)
        """The code of the first bucket's reduction."""
        self.step = self.reductions + len(self.buckets)
        self.eager = self.step + 1
        """The code of the first visit's eager forward."""
        self.pieces = self.eager + len(table)
        """The code of the part of the first visit's weight gradient in the first bucket."""

    def piece(self, visit: int, bucket: int) -> int:
        """Return the code of the weight gradient of ``visit`` within ``bucket``; -1 if it has no layer there."""
        first, last, one = self.first[visit], self.last[visit], self.buckets[bucket]
        if one.first <= first and last <= one.last:
            return visit * 8 + WEIGHT_GRAD
        if one.last <= first or last <= one.first:
            return -1
        return self.pieces + visit * len(self.buckets) + bucket

    def span_of_piece(self, code: int) -> tuple[int, int, int]:
        """Return (visit, first layer, last) of a code that :meth:`piece` gave for a part of a visit."""
        visit, bucket = divmod(code - self.pieces, len(self.buckets))
        one = self.buckets[bucket]
        return visit, max(one.first, self.first[visit]), min(one.last, self.last[visit])

    def decode(self, program: Sequence[int]) -> Program:
        """Return the instructions of ``program``."""
        return tuple(map(self._instr, program))

    def _instr(self, code: int) -> Instr:
        if code == self.step:
            return Instr(Op.STEP)
        if code >= self.pieces:
            visit, first, last = self.span_of_piece(code)
            return Instr(Op.WEIGHT_GRAD, self.microbatch[visit], first, last)
        if code > self.step:
            visit = code - self.eager
            return Instr(Op.EAGER_FORWARD, self.microbatch[visit], self.first[visit], self.last[visit])
        if code >= self.reductions:
            block = self.buckets[code - self.reductions]
            return Instr(Op.REDUCE_GRAD, first=block.first, last=block.last)
        visit, kind = code >> 3, code & 7
        microbatch, first, last = self.microbatch[visit], self.first[visit], self.last[visit]
        if kind < SEND_FORWARD:
            return Instr(OPS[kind], microbatch, first, last)
        if kind in (SEND_FORWARD, RECV_BACKWARD):
            return Instr(OPS[kind], microbatch, last, -1, self.behind[visit])
        return Instr(OPS[kind], microbatch, first, -1, self.before[visit])

    def encode(self, schedule: Schedule) -> Codes:
        """Return the codes of ``schedule``: the inverse of :meth:`decode`, for all workers.

        Raises:
            ScheduleInvalid: the layout has no such instruction on this worker.
        """
        visits = {key: visit for visit, key in enumerate(zip(self.microbatch, self.first, strict=True))}
        own = defaultdict[tuple[int, int], list[int]](list)
        for visit, key in enumerate(zip(self.microbatch, self.worker, strict=True)):
            own[key].append(visit)
        buckets = {(one.first, one.last): i for i, one in enumerate(self.buckets)}
        found: Codes = {}
        for worker, program in schedule.programs:
            codes = found[worker] = []
            for at, instr in enumerate(program):
                if instr.op in COMPUTE:
                    code = self._compute(worker, instr, visits, own[instr.microbatch, worker])
                elif instr.op in MESSAGE:
                    code = self._message(worker, instr, visits)
                elif instr.op is Op.STEP:
                    code = self.step
                elif instr.op is Op.EAGER_FORWARD:
                    code = self._eager(instr, visits)
                else:
                    code = self._reduction(worker, buckets.get((instr.first, instr.last)))
                if isinstance(code, str):
                    raise ScheduleInvalid(where(worker, at, program) + code)
                codes.append(code)
        return found

    def _compute(
        self, worker: int, instr: Instr, visits: dict[tuple[int, int], int], own: Sequence[int]
    ) -> int | str:
        visit = visits.get((instr.microbatch, instr.first), -1)
        if visit >= 0 and (worker, instr.last) == (self.worker[visit], self.last[visit]):
            return visit * 8 + _KIND[instr.op]
        if instr.op is Op.WEIGHT_GRAD and (code := self._part(instr, own)) >= 0:
            return code
        return f"microbatch {instr.microbatch} is not routed through these layers here"

    def _part(self, instr: Instr, own: Sequence[int]) -> int:
        """Return the code of a weight gradient of a part of one of the visits in ``own``; -1 if there is no such
        part.
        """
        inside = [i for i, one in enumerate(self.buckets) if one.first <= instr.first < one.last]
        for visit in own if inside else ():
            code = self.piece(visit, inside[0])
            if code >= self.pieces and self.span_of_piece(code)[1:] == (instr.first, instr.last):
                return code
        return -1

    def _eager(self, instr: Instr, visits: dict[tuple[int, int], int]) -> int | str:
        visit = visits.get((instr.microbatch, instr.first), -1)
        if visit < 0 or instr.last != self.last[visit]:
            return f"no worker computes microbatch {instr.microbatch} through these layers in one piece"
        return self.eager + visit

    def _message(self, worker: int, instr: Instr, visits: dict[tuple[int, int], int]) -> int | str:
        op, microbatch, edge, _, peer = instr
        deeper = visits.get((microbatch, edge), -1)
        crossing = (self.before[deeper], self.worker[deeper]) if edge > 0 and deeper >= 0 else None
        above = op is Op.SEND_FORWARD or op is Op.RECV_BACKWARD
        if crossing != ((worker, peer) if above else (peer, worker)):
            return f"nothing crosses so at layer {edge}; the route says {crossing}"
        return (deeper - above) * 8 + _KIND[op]

    def _reduction(self, worker: int, bucket: int | None) -> int | str:
        if bucket is None or worker not in self.buckets[bucket].holders:
            return NO_BLOCK
        return self.reductions + bucket


NO_BLOCK = "is no block of this worker, or reduced twice"


def _rows(route: Route, num_layers: int) -> list[tuple[int, int, int, int, int]]:
    """Return (worker, first layer, last, worker before, worker after) of each hop; -1 for none."""
    workers = (-1, *(hop.worker for hop in route.hops), -1)
    rows, at = [], 0
    for i, hop in enumerate(route.hops):
        if hop.first != at or hop.last <= at or hop.worker == workers[i]:
            raise LayoutInvalid(f"{hop} does not go on, on another worker, from layer {at} in {route}")
        rows.append((hop.worker, hop.first, hop.last, workers[i], workers[i + 2]))
        at = hop.last
    if at != num_layers:
        raise LayoutInvalid(f"{route} ends at layer {at} of {num_layers}")
    return rows


def where(worker: int, at: int, program: Program) -> str:
    """Return the beginning of a message about a place in a program: where it is, and what is around it."""
    shown = " ".join(
        f"»{instr}«" if i == at else str(instr)
        for i, instr in enumerate(program[max(0, at - 3) : at + 3], max(0, at - 3))
    )
    return f"worker {worker}, position {at}: … {shown} …: "
