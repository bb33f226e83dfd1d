"""What ran when, and how long it took: the executed schedule, and the measurements that the profile is made from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from odyssey_megatron.plan.schedule import COMPUTE, Instr, Op


@dataclass(slots=True)
class Trace:
    """The instructions of one step with their start and end (monotonic clock, seconds).

    ``measured`` steps also take the thread's own time of each compute instruction: waiting for a core that another
    rank has is not the layer's cost. Not every step, since on some systems that clock is slow (0.6 ms seen).
    """

    measured: bool = False
    entries: list[tuple[Instr, float, float]] = field(default_factory=list)
    compute_s: list[tuple[Instr, float]] = field(default_factory=list)

    @contextlib.contextmanager
    def span(self, instr: Instr) -> Iterator[None]:
        measured = self.measured and instr.op in COMPUTE
        start_s, busy_s = time.monotonic(), time.thread_time() if measured else 0.0
        yield
        if measured:
            self.compute_s.append((instr, time.thread_time() - busy_s))
        self.entries.append((instr, start_s, time.monotonic()))

    def to_jsonable(self) -> list[list[object]]:
        """[[text, start_s, end_s], ...] as the journal has it."""
        return [[str(instr), round(start, 6), round(end, 6)] for instr, start, end in self.entries]


@dataclass(slots=True)
class SpanTimes:
    """Sums over microbatches for one span of layers (seconds)."""

    samples: int = 0
    forward_s: float = 0.0
    input_grad_s: float = 0.0
    weight_grad_s: float = 0.0


class ComputeTimes:
    """Mean compute times per layer span, over all measured steps so far."""

    def __init__(self) -> None:
        self._spans: dict[tuple[int, int], SpanTimes] = {}

    def add(self, trace: Trace) -> None:
        for instr, seconds in trace.compute_s:
            span = self._spans.setdefault((instr.first, instr.last), SpanTimes())
            if instr.op is Op.FORWARD:
                span.samples += 1
                span.forward_s += seconds
            elif instr.op is Op.WEIGHT_GRAD:
                span.weight_grad_s += seconds
            else:
                span.input_grad_s += seconds

    def means(self) -> list[dict[str, float]]:
        """Records with the fields of ``policy.profile.Observation``."""
        return [
            {
                "first": first,
                "last": last,
                "samples": span.samples,
                "forward_s": span.forward_s / span.samples,
                "input_grad_s": span.input_grad_s / span.samples,
                "weight_grad_s": span.weight_grad_s / span.samples,
            }
            for (first, last), span in sorted(self._spans.items())
            if span.samples
        ]
