"""What ran when, and how long it took: the executed schedule, and the measurements that the profile is made from."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
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
            self.compute_s.append((instr, self.busy_since(busy_s)))
        self.entries.append((instr, start_s, time.monotonic()))

    def busy_since(self, busy_s: float) -> float:
        """The thread's own time since it was ``busy_s``, when it has been made as slow as it is to be."""
        ends_s = busy_s + self.slowness * (time.thread_time() - busy_s)
        while self.slowness > 1.0 and time.thread_time() < ends_s:
            pass
        return time.thread_time() - busy_s

    def to_jsonable(self) -> list[list[object]]:
        """[[text, start_s, end_s], ...] as the journal has it."""
        return [[str(instr), round(start, 6), round(end, 6)] for instr, start, end in self.entries]


_KEPT = 4
"""Measured steps that are published: whoever reads them now and then misses none."""


class Measurements:
    """What this rank has measured of the job so far.

    Args:
        every: so many steps apart are those that are measured.
        slowness: of a step, as it is injected.
    """

    def __init__(self, every: int, slowness: Callable[[int], float], incarnation: int = 0) -> None:
        self._every, self._slowness, self._incarnation = every, slowness, incarnation
        self.link: LinkTimes | None = None
        self.regroup_s: float | None = None
        """How long the last recovery took until it was known what to move."""
        self._steps: deque[tuple[Observation, ...]] = deque(maxlen=_KEPT)

    def trace(self, step: int) -> Trace:
        """For the instructions of ``step``."""
        return Trace(measured=step == 1 or step % self._every == 0, slowness=self._slowness(step))

    def with_step(self, step: int, trace: Trace, state_bytes: Mapping[int, int]) -> str:
        """What is known after ``step``, which was measured, as it is published; ``state_bytes``: of each layer whose
        state is here.
        """
        self._steps.append((*_medians(step, trace), _probe(step, trace)))
        known = Measured(
            spans=tuple(one for of_step in self._steps for one in of_step),
            link=self.link,
            state_bytes=tuple(sorted(state_bytes.items())),
            regroup_s=self.regroup_s,
            incarnation=self._incarnation,
        )
        return to_json(known)


def _medians(step: int, trace: Trace) -> Iterator[Observation]:
    """One observation a span of layers. One microbatch may be held up by anything; half of them are not."""
    spans: dict[tuple[int, int], tuple[list[float], list[float], list[float]]] = {}
    for instr, seconds in trace.compute_s:
        forwards, input_grads, weight_grads = spans.setdefault((instr.first, instr.last), ([], [], []))
        if instr.op in (Op.FORWARD, Op.EAGER_FORWARD):
            forwards.append(seconds)
        elif instr.op is Op.WEIGHT_GRAD:
            weight_grads.append(seconds)
        else:
            input_grads.append(seconds)
    for (first, last), times_s in sorted(spans.items()):
        if times_s[0]:
            forward_s, input_grad_s, weight_grad_s = (
                statistics.median(one) if one else 0.0 for one in times_s
            )
            yield Observation(
                first=first,
                last=last,
                samples=len(times_s[0]),
                forward_s=forward_s,
                input_grad_s=input_grad_s,
                weight_grad_s=weight_grad_s,
                step=step,
            )


_PROBE_SIZE, _PROBES = 96, 5


def _probe(step: int, trace: Trace) -> Observation:
    """A product that is the same on all ranks, as an empty span: it tells how fast one is that has nothing to do."""
    matrix, times_s = torch.ones(_PROBE_SIZE, _PROBE_SIZE), []
    for _ in range(_PROBES):
        busy_s = time.thread_time()
        torch.mm(matrix, matrix)
        times_s.append(trace.busy_since(busy_s))
    probe_s = min(times_s)
    return Observation(
        first=0, last=0, samples=1, forward_s=probe_s, input_grad_s=0.0, weight_grad_s=0.0, step=step
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
            tensor.reshape(-1)[0].item()  # on a device it is there only now
            times_s.append(time.monotonic() - began_s)
        best_s.append(min(times_s) / 2)
    return LinkTimes(message_bytes=message.nbytes, empty_s=best_s[0], message_s=best_s[1])
