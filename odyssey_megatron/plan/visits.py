"""Instructions as integers: what lowering, ``verify()`` and the clock work on.

A visit is one hop of one microbatch. Visits are numbered by microbatch and hop, so ``visit + 1`` is the next hop of
the same microbatch. An instruction of a visit is ``visit * 8 + kind``; then come the reductions of the layout's blocks,
in layer order, ``STEP``, and the eager forward of each visit. All that the rules need to know of an instruction is
found by its visit, without hashing.
"""

from __future__ import annotations

from collections.abc import Sequence

from odyssey_megatron.errors import LayoutInvalid, ScheduleInvalid
from odyssey_megatron.plan.layout import Layout, Route
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
"""Kinds: from 4 on messages, the odd ones of them received."""

NEEDS = (RECV_FORWARD - FORWARD, RECV_BACKWARD - INPUT_GRAD, 0, RECV_BACKWARD - BACKWARD)
"""From the code of each kind of compute instruction to the receive that it waits for; a weight gradient for none."""

NOTHING, FORWARDED, BACKED, FINISHED = range(4)
"""How far a visit is: its forward, its input gradient, its weight gradient has run."""

_KIND = {op: kind for kind, op in enumerate(OPS)}

Codes = dict[int, list[int]]
"""Worker -> its program."""


class Visits:
    """The visits of ``layout``, in parallel lists, and the two directions between instructions and integers.

    Raises:
        LayoutInvalid: a route does not go through all layers in order, hop by hop to another worker.
    """

    def __init__(self, layout: Layout) -> None:
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
        """The worker that the activation comes from; -1 at a route's first hop."""
        self.behind = [row[5] for row in table]
        """The worker that it goes to; -1 at the last hop."""
        self.blocks = layout.blocks()
        self.reductions = 8 * len(table)
        """The code of the first block's reduction."""
        self.step = self.reductions + len(self.blocks)
        self.eager = self.step + 1
        """The code of the first visit's eager forward."""

    def decode(self, program: Sequence[int]) -> Program:
        """The instructions of ``program``."""
        return tuple(map(self._instr, program))

    def _instr(self, code: int) -> Instr:
        if code == self.step:
            return Instr(Op.STEP)
        if code > self.step:
            visit = code - self.eager
            return Instr(Op.EAGER_FORWARD, self.microbatch[visit], self.first[visit], self.last[visit])
        if code >= self.reductions:
            block = self.blocks[code - self.reductions]
            return Instr(Op.REDUCE_GRAD, first=block.first, last=block.last)
        visit, kind = code >> 3, code & 7
        microbatch, first, last = self.microbatch[visit], self.first[visit], self.last[visit]
        if kind < SEND_FORWARD:
            return Instr(OPS[kind], microbatch, first, last)
        if kind in (SEND_FORWARD, RECV_BACKWARD):
            return Instr(OPS[kind], microbatch, last, -1, self.behind[visit])
        return Instr(OPS[kind], microbatch, first, -1, self.before[visit])

    def encode(self, schedule: Schedule) -> Codes:
        """Inverse of :meth:`decode`, of all workers.

        Raises:
            ScheduleInvalid: an instruction that the layout has no place for on its worker.
        """
        visits = {key: visit for visit, key in enumerate(zip(self.microbatch, self.first, strict=True))}
        blocks = {(block.first, block.last): i for i, block in enumerate(self.blocks)}
        found: Codes = {}
        for worker, program in schedule.programs:
            codes = found[worker] = []
            for at, instr in enumerate(program):
                if instr.op in COMPUTE:
                    code = self._compute(worker, instr, visits)
                elif instr.op in MESSAGE:
                    code = self._message(worker, instr, visits)
                elif instr.op is Op.STEP:
                    code = self.step
                elif instr.op is Op.EAGER_FORWARD:
                    code = self._eager(instr, visits)
                else:
                    code = self._reduction(worker, blocks.get((instr.first, instr.last)))
                if isinstance(code, str):
                    raise ScheduleInvalid(where(worker, at, program) + code)
                codes.append(code)
        return found

    def _compute(self, worker: int, instr: Instr, visits: dict[tuple[int, int], int]) -> int | str:
        visit = visits.get((instr.microbatch, instr.first), -1)
        if visit < 0 or (worker, instr.last) != (self.worker[visit], self.last[visit]):
            return f"microbatch {instr.microbatch} is not routed through these layers here"
        return visit * 8 + _KIND[instr.op]

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

    def _reduction(self, worker: int, block: int | None) -> int | str:
        if block is None or worker not in self.blocks[block].holders:
            return NO_BLOCK
        return self.reductions + block


NO_BLOCK = "is no block of this worker, or reduced twice"


def _rows(route: Route, num_layers: int) -> list[tuple[int, int, int, int, int]]:
    """(worker, first, last, worker before, worker behind) of each hop; -1 for none."""
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
    """A place in a program, with what is around it: how messages about it begin."""
    shown = " ".join(
        f"»{instr}«" if i == at else str(instr)
        for i, instr in enumerate(program[max(0, at - 3) : at + 3], max(0, at - 3))
    )
    return f"worker {worker}, position {at}: … {shown} …: "
