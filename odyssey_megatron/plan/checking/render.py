"""A schedule as a grid of text, with a line per worker over time, as ``odyssey plan`` prints it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from odyssey_megatron.names import runs_of
from odyssey_megatron.plan.checking.simulate import Timeline
from odyssey_megatron.plan.schedule import COMPUTE, Instr, Op, Schedule

IDLE = "."
MOST_LINES = 32
"""Of more workers than this, those that do the same with other microbatches share a line."""

_COLLECTIVE = {Op.REDUCE_GRAD: "=", Op.STEP: "|"}


def render(schedule: Schedule, timeline: Timeline, *, width: int = 120) -> str:
    """Return one line per worker, ``width`` columns wide: ``F3--`` is the forward of microbatch 3, dots are bubbles.

    An instruction shorter than a column leaves no mark; one too short for its number shows its letter only. Of more
    than ``MOST_LINES`` workers those that do the same with other microbatches share a line, with the microbatches of
    the first, and the others' numbers behind it.
    """
    scale = width / timeline.step_s if timeline.step_s else 0.0
    margin = max((len(str(worker)) for worker, _ in schedule.programs), default=1)
    alike: dict[object, list[int]] = {}
    lines: dict[int, str] = {}
    for (worker, program), (_, spans) in zip(schedule.programs, timeline.spans, strict=True):
        at = [(round(start * scale), min(width, round(end * scale))) for start, end in spans]
        lines[worker] = _line(program, at, width, numbers=True)
        key = _line(program, at, width, numbers=False) if len(schedule.programs) > MOST_LINES else worker
        alike.setdefault(key, []).append(worker)
    return "\n".join(
        f"{first:>{margin}} {lines[first]}{f'  and {_ranges(others)}' if others else ''}"
        for first, *others in alike.values()
    )


def _line(program: Iterable[Instr], at: Iterable[tuple[int, int]], width: int, *, numbers: bool) -> str:
    """``at``: the first column of each instruction, and the one behind it."""
    line = [IDLE] * width
    for instr, (a, b) in zip(program, at, strict=True):
        if b <= a:
            continue
        if instr.op in COMPUTE or instr.op is Op.EAGER_FORWARD:
            label = f"{instr.op.value}{instr.microbatch}" if numbers else instr.op.value
            line[a:b] = (label if len(label) <= b - a else instr.op.value).ljust(b - a, "-")
        elif instr.op in _COLLECTIVE:
            line[a:b] = _COLLECTIVE[instr.op] * (b - a)
    return "".join(line)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending ``numbers`` as in ``1-15,20``."""
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs_of(numbers))
