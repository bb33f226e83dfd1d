"""Executed schedules out of a journal: which instruction ran where and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from odyssey_megatron.errors import ScheduleInvalid
from odyssey_megatron.metrics.recoveries import RecoveryRecord, named, on_one_clock
from odyssey_megatron.metrics.steps import CommittedStep
from odyssey_megatron.metrics.timeline import JournalEvent
from odyssey_megatron.plan.checking.simulate import Timeline
from odyssey_megatron.plan.schedule import MESSAGE, Schedule, parse_instr


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One instruction as it ran. Times are in seconds from the earliest start of the step on any worker."""

    rank: int
    kind: str
    microbatch: int
    first: int
    last: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedStep:
    """All traced instructions of one attempt at a step."""

    step: int
    generation: int
    boxes: tuple[Box, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, pipeline by pipeline and along each pipeline, as far as the microbatches tell."""
        keys = {box.rank: (1 << 30, 1 << 30) for box in self.boxes}
        for box in self.boxes:
            if box.kind == "F":
                keys[box.rank] = min(keys[box.rank], (box.microbatch, box.first))
        return tuple(sorted(keys, key=lambda rank: (*keys[rank], rank)))

    @property
    def end_s(self) -> float:
        return max(box.end_s for box in self.boxes)

    def layers_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the spans that ``rank`` ran forwards of, ascending."""
        return tuple(sorted({(b.first, b.last) for b in self.boxes if b.rank == rank and b.kind == "F"}))


def executed_steps(events: Sequence[JournalEvent]) -> tuple[ExecutedStep, ...]:
    """Return all traced attempts, by generation and step."""
    attempts: dict[tuple[int, int], list[JournalEvent]] = {}
    for event in named(events, "trace"):
        if event["instructions"] and not math.isnan(event["at_s"]):
            attempts.setdefault((event["generation"], event["step"]), []).append(event)
    return tuple(
        ExecutedStep(step=step, generation=generation, boxes=_boxes(traces))
        for (generation, step), traces in sorted(attempts.items())
    )


def whole_steps(traced: Sequence[ExecutedStep], steps: Sequence[CommittedStep]) -> tuple[ExecutedStep, ...]:
    """Return the traced attempts that were committed."""
    committed = {(row.generation, row.step) for row in steps}
    return tuple(one for one in traced if (one.generation, one.step) in committed)


def before_and_after(
    recovery: RecoveryRecord, whole: Sequence[ExecutedStep]
) -> tuple[ExecutedStep | None, ExecutedStep | None]:
    """Return the last one of :func:`whole_steps` before ``recovery``, and the last one in its generation.

    The last one, since the first step of a generation also warms up caches and connections.
    """
    before = [one for one in whole if one.generation < recovery.generation]
    after = [one for one in whole if one.generation == recovery.generation]
    return (before[-1] if before else None, after[-1] if after else None)


def _boxes(traces: Sequence[JournalEvent]) -> tuple[Box, ...]:
    start_s = min(on_one_clock(event, one[1]) for event in traces for one in event["instructions"])
    return tuple(
        _box(event["rank"], text, on_one_clock(event, a) - start_s, on_one_clock(event, b) - start_s)
        for event in traces
        for text, a, b in event["instructions"]
    )


def planned_step(schedule: Schedule, timeline: Timeline) -> ExecutedStep:
    """Return a step that has not been run, as it is simulated; its ranks are workers."""
    spans = dict(timeline.spans)
    boxes = [
        _box(worker, str(instr), start_s, end_s)
        for worker, program in schedule.programs
        for instr, (start_s, end_s) in zip(program, spans[worker], strict=True)
        if instr.op not in MESSAGE
    ]
    return ExecutedStep(step=0, generation=1, boxes=tuple(boxes))


def _box(rank: int, text: str, start_s: float, end_s: float) -> Box:
    kind, microbatch, first, last = "OTHER", -1, -1, -1
    try:
        instr = parse_instr(text)
    except ScheduleInvalid:
        # A journal may hold more than instructions; it is drawn all the same.
        pass
    else:
        microbatch, first, last = instr.microbatch, instr.first, instr.last
        kind = "COMM" if instr.op in MESSAGE else instr.op.value
    return Box(
        rank=rank, kind=kind, microbatch=microbatch, first=first, last=last, start_s=start_s, end_s=end_s
    )
