"""A schedule as a grid of text, with a line per worker over time, as ``odyssey plan`` prints it."""

from __future__ import annotations

from odyssey_megatron.plan.checking.simulate import Timeline
from odyssey_megatron.plan.schedule import COMPUTE, Op, Schedule

IDLE = "."
_COLLECTIVE = {Op.REDUCE_GRAD: "=", Op.STEP: "|"}


def render(schedule: Schedule, timeline: Timeline, *, width: int = 120) -> str:
    """Return one line per worker, ``width`` columns wide: ``F3--`` is the forward of microbatch 3, dots are bubbles.

    An instruction shorter than a column leaves no mark; one too short for its number shows its letter only.
    """
    scale = width / timeline.step_s if timeline.step_s else 0.0
    margin = max((len(str(worker)) for worker, _ in schedule.programs), default=1)
    lines = []
    for (worker, program), (_, spans) in zip(schedule.programs, timeline.spans, strict=True):
        line = [IDLE] * width
        for instr, (start, end) in zip(program, spans, strict=True):
            a, b = round(start * scale), min(width, round(end * scale))
            if b <= a:
                continue
            if instr.op in COMPUTE or instr.op is Op.EAGER_FORWARD:
                label = f"{instr.op.value}{instr.microbatch}"
                line[a:b] = (label if len(label) <= b - a else instr.op.value).ljust(b - a, "-")
            elif instr.op in _COLLECTIVE:
                line[a:b] = _COLLECTIVE[instr.op] * (b - a)
        lines.append(f"{worker:>{margin}} {''.join(line)}")
    return "\n".join(lines)
