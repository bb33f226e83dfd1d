"""What ran when, and how long it took: the executed schedule, and the measurements that the profile is made from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from odyssey_megatron.codec import to_json
from odyssey_megatron.plan.schedule import COMPUTE, Instr, Op
from odyssey_megatron.policy.measured import LinkTimes, Measured
from odyssey_megatron.policy.profile import Observation


@dataclass(slots=True)
class Trace:
    """The instructions of one step with their start and end (monotonic clock, seconds).

    ``measured`` steps also take the thread's own time of each compute instruction: waiting for a core that another
    rank has is not the layer's cost. Not every step, since on some systems that clock is slow (0.6 ms seen).
    """

    measured: bool = False
    slowness: float = 1.0
    """Injected: so many times its time does each compute instruction take, by taking up the rest."""
    entries: list[tuple[Instr, float, float]] = field(default_factory=list)
    compute_s: list[tuple[Instr, float]] = field(default_factory=list)

    @contextlib.contextmanager
    def span(self, instr: Instr) -> Iterator[None]:
        measured = (self.measured or self.slowness > 1.0) and instr.op in COMPUTE
        start_s, busy_s = time.monotonic(), time.thread_time() if measured else 0.0
        yield
        if measured:
            ends_s = busy_s + self.slowness * (time.thread_time() - busy_s)
            while self.slowness > 1.0 and time.thread_time() < ends_s:
                pass
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


class Measurements:
    """What this rank has measured of the job so far.

    Args:
        every: so many steps apart are those that are measured.
        slowness: of a step, as it is injected.
    """

    def __init__(self, every: int, slowness: Callable[[int], float]) -> None:
        self._every, self._slowness = every, slowness
        self.link: LinkTimes | None = None
        self.regroup_s: float | None = None
        """How long the last recovery took until it was known what to move."""
        self._spans: dict[tuple[int, int], SpanTimes] = {}

    def trace(self, step: int) -> Trace:
        """For the instructions of ``step``."""
        return Trace(measured=step == 1 or step % self._every == 0, slowness=self._slowness(step))

    def with_step(self, trace: Trace, state_bytes: Mapping[int, int]) -> str:
        """All that is known after one more step that was measured, as it is published; ``state_bytes``: of each layer
        whose state is here.
        """
        self._add(trace)
        known = Measured(
            spans=self._means(),
            link=self.link,
            state_bytes=tuple(sorted(state_bytes.items())),
            regroup_s=self.regroup_s,
        )
        return to_json(known)

    def _add(self, trace: Trace) -> None:
        for instr, seconds in trace.compute_s:
            span = self._spans.setdefault((instr.first, instr.last), SpanTimes())
            if instr.op is Op.FORWARD:
                span.samples += 1
                span.forward_s += seconds
            elif instr.op is Op.WEIGHT_GRAD:
                span.weight_grad_s += seconds
            else:
                span.input_grad_s += seconds

    def _means(self) -> tuple[Observation, ...]:
        """One observation a span of layers: its mean compute times."""
        return tuple(
            Observation(
                first=first,
                last=last,
                samples=span.samples,
                forward_s=span.forward_s / span.samples,
                input_grad_s=span.input_grad_s / span.samples,
                weight_grad_s=span.weight_grad_s / span.samples,
            )
            for (first, last), span in sorted(self._spans.items())
            if span.samples
        )


def link_times(group: dist.ProcessGroup, message: torch.Tensor, *, round_trips: int = 5) -> LinkTimes | None:
    """Ping-pong between neighbours of ``group``: all its members must call. None for one without a neighbour."""
    mine, size = group.rank(), group.size()
    partner = mine ^ 1
    if partner >= size:
        return None
    best_s = []
    for tensor in (message.new_zeros(1), message):
        times_s = []
        for _ in range(round_trips):
            began_s = time.monotonic()
            for sends in (mine < partner, mine > partner):
                post = dist.isend if sends else dist.irecv
                work = post(tensor, group=group, **{"group_dst" if sends else "group_src": partner})
                assert work is not None
                work.wait()
            times_s.append(time.monotonic() - began_s)
        best_s.append(min(times_s) / 2)
    return LinkTimes(message_bytes=message.nbytes, empty_s=best_s[0], message_s=best_s[1])
