"""Schedules are data: for each worker the ordered instructions that carry out the routes.

The text form round-trips and reads like torch.distributed.pipelining's, with layer spans in place of
stage numbers (a span is unambiguous where pipelines are ragged)::

    F3[0:4]          forward of microbatch 3 through layers 0, 1, 2, 3
    I3[0:4]          its input gradient          W3[0:4]  its weight gradient
    B3[0:4]          both at once (fused backward)
    E3[4:8]          eager forward: a holder runs ahead a forward that is routed to another worker, whose place it may
                     have to take
    SEND_F3[4]>5     the activation that enters layer 4 goes to worker 5
    RECV_F3[4]<2     ... and comes from worker 2
    SEND_B3[4]>2     its gradient goes back      RECV_B3[4]<5
    REDUCE_GRAD[0:4] sum of the block's gradients over its holders
    STEP             agreement, then the optimizer step
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from odyssey_megatron.errors import ScheduleInvalid


class Op(enum.Enum):
    """The instruction set. Values are the text form's names."""

    FORWARD = "F"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    BACKWARD = "B"
    EAGER_FORWARD = "E"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    STEP = "STEP"

    # Members are singletons; enum's own hash is a Python call, and deciding looks ops up by the thousand.
    __hash__ = object.__hash__


COMPUTE = frozenset({Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD, Op.BACKWARD})
"""The instructions that carry out routes. An eager forward is none of them: a step is complete without it."""
SEND = frozenset({Op.SEND_FORWARD, Op.SEND_BACKWARD})
RECV = frozenset({Op.RECV_FORWARD, Op.RECV_BACKWARD})
MESSAGE = SEND | RECV


class Instr(NamedTuple):
    """One instruction of one worker. Fields that the op does not have are -1.

    The ``first`` of a message is a boundary between layers: the activation enters layer ``first``, and its gradient
    leaves it. ``peer`` is the worker at the other end. (A tuple, since deciding makes them by the thousand.)
    """

    op: Op
    microbatch: int = -1
    first: int = -1
    last: int = -1
    peer: int = -1

    def __str__(self) -> str:
        if self.op is Op.STEP:
            return "STEP"
        if self.op is Op.REDUCE_GRAD:
            return f"REDUCE_GRAD[{self.first}:{self.last}]"
        if self.op in COMPUTE or self.op is Op.EAGER_FORWARD:
            return f"{self.op.value}{self.microbatch}[{self.first}:{self.last}]"
        arrow = ">" if self.op in SEND else "<"
        return f"{self.op.value}{self.microbatch}[{self.first}]{arrow}{self.peer}"


_TEXT = re.compile(
    r"(?P<step>STEP)"
    r"|REDUCE_GRAD\[(?P<rf>\d{1,9}):(?P<rl>\d{1,9})\]"
    r"|(?P<op>[FIWBE])(?P<mb>\d{1,9})\[(?P<first>\d{1,9}):(?P<last>\d{1,9})\]"
    r"|(?P<send>SEND_[FB])(?P<smb>\d{1,9})\[(?P<sat>\d{1,9})\]>(?P<to>\d{1,9})"
    r"|(?P<recv>RECV_[FB])(?P<rmb>\d{1,9})\[(?P<rat>\d{1,9})\]<(?P<frm>\d{1,9})"
)


def parse_instr(text: str) -> Instr:
    """Return the instruction of which ``text`` is the text form. Raises ScheduleInvalid if it is none."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ScheduleInvalid(f"not an instruction: {text!r}")
    got = match.groupdict()
    if got["step"]:
        return Instr(Op.STEP)
    if got["rf"] is not None:
        return Instr(Op.REDUCE_GRAD, first=int(got["rf"]), last=int(got["rl"]))
    if got["op"]:
        return Instr(Op(got["op"]), int(got["mb"]), int(got["first"]), int(got["last"]))
    if got["send"]:
        return Instr(Op(got["send"]), int(got["smb"]), int(got["sat"]), peer=int(got["to"]))
    return Instr(Op(got["recv"]), int(got["rmb"]), int(got["rat"]), peer=int(got["frm"]))


Program = tuple[Instr, ...]


def computed_layers(program: Program) -> set[int]:
    """Return the layers that ``program`` computes, including those of eager forwards."""
    computing = (one for one in program if one.op in COMPUTE or one.op is Op.EAGER_FORWARD)
    return {layer for one in computing for layer in range(one.first, one.last)}


def by_microbatch(instrs: Iterable[Instr]) -> dict[int, list[Instr]]:
    """Return ``instrs`` by microbatch, in their order."""
    found: dict[int, list[Instr]] = {}
    for one in instrs:
        found.setdefault(one.microbatch, []).append(one)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The programs of all workers, ascending by worker id."""

    programs: tuple[tuple[int, Program], ...]

    def program(self, worker: int) -> Program:
        """Return the program of ``worker``. Raises KeyError."""
        for one, program in self.programs:
            if one == worker:
                return program
        raise KeyError(worker)

    def to_text(self) -> str:
        """Return the text form, one line per worker: ``worker: instr instr ...``."""
        return "\n".join(f"{w}: {' '.join(map(str, program))}" for w, program in self.programs)


def schedule_from_text(text: str) -> Schedule:
    """Return the schedule of which ``text`` is the :meth:`Schedule.to_text`. Raises ScheduleInvalid."""
    programs = []
    for line in text.splitlines():
        worker, colon, rest = line.partition(":")
        if not colon or not re.fullmatch(r"\d{1,9}", worker):
            raise ScheduleInvalid(f"a line must start with 'worker:', found {line[:40]!r}")
        programs.append((int(worker), tuple(parse_instr(one) for one in rest.split())))
    return Schedule(programs=tuple(programs))
