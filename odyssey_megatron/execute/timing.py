"""What ran when, and how long it took: the executed schedule, and the measurements that the profile is made from."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from odyssey_megatron.codec import to_json
from odyssey_megatron.execute import cores
from odyssey_megatron.execute.neighbours import Exchanged, Neighbours, Summed
from odyssey_megatron.plan.schedule import COMPUTE, Instr, Op, by_microbatch
from odyssey_megatron.plan.sending.runs import to_runs
from odyssey_megatron.policy.costs.measured import (
    EndSeen,
    ExpertsSeen,
    HeldSeen,
    LinkSeen,
    LinkTimes,
    Measured,
    StepSeen,
    SumSeen,
    UnevenSeen,
)
from odyssey_megatron.policy.costs.profile import Observation


class Stopwatch(Protocol):
    """A clock for what a host asks for. Taking a mark waits for nothing."""

    device: str

    def mark(self) -> Any:
        """Take a mark in the order of what has been asked for; times between marks are of computing."""
        ...

    def now(self) -> Any:
        """Take a mark for what is waited for: the time between two of these is wall-clock time."""
        ...

    def between_s(self, began: Any, ended: Any) -> float:
        """Return the seconds between two marks of one kind. They were made before a step's agreement, and
        this is called after it, when all before it has run.
        """
        ...


class OwnTime:
    """The thread's CPU time: waiting for a core that another rank has is not the layer's cost."""

    device = "cpu"

    def mark(self) -> float:
        return time.thread_time()

    def now(self) -> float:
        return time.monotonic()

    def between_s(self, began: float, ended: float) -> float:
        return ended - began


class DeviceTime:
    """The device's time, by events. Only ``tests/gpu.sh`` runs it, as all other tests do without a GPU."""

    device = "cuda"

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    now = mark

    def between_s(self, began: Any, ended: Any) -> float:
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


@dataclass(slots=True)
class Trace:
    """The instructions of one step with their start and end, in seconds of the host's monotonic clock.

    In ``measured`` steps a stopwatch also times what computes, without what it waits for. Not in every step,
    since on some systems the thread's clock is slow (0.6 ms seen).
    """

    measured: bool = False
    stopwatch: Stopwatch = field(default_factory=OwnTime)
    slowness: float = 1.0
    """An injected factor: each compute instruction takes this many times its time, by busy waiting."""
    entries: list[tuple[Instr, float, float]] = field(default_factory=list)
    marks: list[tuple[Instr, Any, Any]] = field(default_factory=list)
    probes: list[tuple[Any, Any]] = field(default_factory=list)
    """The beginning and end of matrix products that are the same on all ranks."""
    optimizer: tuple[Any, Any] | None = None
    """The beginning and end of the optimizer."""
    agreement_s: float = 0.0
    """Seconds that the agreement has taken, with waiting for others."""
    began_s: float = field(default_factory=time.monotonic)
    wall_s: float = 0.0
    """Seconds that computing has taken by :attr:`wall`."""
    wall: Callable[[], float] = time.monotonic
    """The wall clock, perhaps without the time that this thread waits for a core."""

    _open: tuple[Instr, Any, float] | None = None
    """What is computing now, with the mark and the time of its beginning."""

    @contextlib.contextmanager
    def span(self, instr: Instr) -> Iterator[None]:
        at, start_s = len(self.entries), time.monotonic()
        # Appended at once, so that what runs within it stands behind it.
        self.entries.append((instr, start_s, start_s))
        yield
        self.entries[at] = (instr, start_s, time.monotonic())

    def until_now(self, instr: Instr) -> None:
        """Note that ``instr``, which has gone on beside others, ends now."""
        at = next(at for at, (one, _, _) in enumerate(self.entries) if one == instr)
        self.entries[at] = (instr, self.entries[at][1], time.monotonic())

    @contextlib.contextmanager
    def computing(self, instr: Instr) -> Iterator[None]:
        """Time the body as the computing part of ``instr``, or as one of several such parts; its input is here."""
        if instr.op not in COMPUTE or not (self.measured or self.slowness > 1.0):
            yield
            return
        self._begin(instr)
        yield
        self._close()

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """Time the body as the step's agreement."""
        began_s = time.monotonic()
        yield
        self.agreement_s = time.monotonic() - began_s

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Time the body as the optimizer, in a measured step."""
        began = self.stopwatch.mark() if self.measured else None
        yield
        if self.measured:
            self.optimizer = began, self.stopwatch.mark()

    def ending(self, step: int, optimizer_bytes: int) -> Callable[[], EndSeen] | None:
        """Return what gives the end of ``step``, None if it was not timed; ``optimizer_bytes`` are of what is here."""
        if self.optimizer is None:
            return None
        (began, ended), agreement_s, between_s = self.optimizer, self.agreement_s, self.stopwatch.between_s
        return lambda: EndSeen(
            step=step,
            agreement_s=agreement_s,
            optimizer_s=between_s(began, ended),
            optimizer_bytes=optimizer_bytes,
        )

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Leave the body out of the computing of the instruction in the middle of which it runs."""
        instr = self._close()
        yield
        if instr:
            self._begin(instr)

    def _begin(self, instr: Instr) -> None:
        self._open = instr, self.stopwatch.mark(), self.wall()

    def _close(self) -> Instr | None:
        if self._open is None:
            return None
        (instr, began, began_s), self._open = self._open, None
        self.marks.append((instr, began, self.end_of(began)))
        self.wall_s += self.wall() - began_s
        return instr

    def end_of(self, began: Any) -> Any:
        """Return the mark behind what began at ``began``, after slowing it down as injected (on a CPU only)."""
        if self.slowness > 1.0:
            ends_s = began + self.slowness * (time.thread_time() - began)
            while time.thread_time() < ends_s:
                pass
        return self.stopwatch.mark()

    def probe(self) -> None:
        """Time matrix products after what a measured step computes: they tell the speed of a rank that has
        nothing to do.
        """
        if not self.measured:
            return
        device = self.stopwatch.device
        size = _PROBE_SIZE_ON_GPU if device == "cuda" else _PROBE_SIZE
        matrix = torch.ones(size, size, device=device)
        for _ in range(_PROBES):
            began = self.stopwatch.mark()
            torch.mm(matrix, matrix)
            self.probes.append((began, self.end_of(began)))

    def compute_s(self) -> dict[Instr, float]:
        """Return the seconds that each instruction has computed. To be called after the step's agreement."""
        found: dict[Instr, float] = {}
        for instr, began, ended in self.marks:
            found[instr] = found.get(instr, 0.0) + self.stopwatch.between_s(began, ended)
        return found

    def to_jsonable(self) -> list[list[object]]:
        """Return [[text, start_s, end_s], ...], as the journal has it."""
        return [[str(instr), round(start, 6), round(end, 6)] for instr, start, end in self.entries]


_PROBE_SIZE, _PROBE_SIZE_ON_GPU, _PROBES = 96, 1024, 5
"""The sizes and the number of the products. Each is large enough to take longer than its start does."""
_ENOUGH = 4
"""The number of microbatches that tells how unlike they are."""
_ROUND_TRIPS = 5
"""The number of messages back and forth that time a link; the fastest counts."""
_KEPT = 4
"""The number of measured steps that are published, so that a reader who looks now and then misses none."""


class Measurements:
    """What this rank has measured of the job so far.

    Args:
        every: Steps from one measured step to the next.
        slowness: Gives the injected slowness of a step.
    """

    def __init__(
        self,
        every: int,
        slowness: Callable[[int], float],
        incarnation: int = 0,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._every, self._slowness, self._incarnation = every, slowness, incarnation
        self._stopwatch = stopwatch or OwnTime()
        self._wall = _wall() if self._stopwatch.device == "cpu" else None
        self.link: LinkTimes | None = None
        self.regroup_s: float | None = None
        """Seconds that the last recovery took until it was known what to move."""
        self._steps: deque[tuple[Observation, ...]] = deque(maxlen=_KEPT)
        self._links: deque[tuple[LinkSeen, ...]] = deque(maxlen=_KEPT)
        self._sums: deque[tuple[SumSeen, ...]] = deque(maxlen=_KEPT)
        self._took: deque[StepSeen] = deque(maxlen=_KEPT)
        self._ends: deque[EndSeen] = deque(maxlen=_KEPT)
        self._ending: Callable[[], EndSeen] | None = None
        """Gives the end of the newest measured step, which a device may still be at. It is not waited for: by the next
        measured step it is over.
        """
        self._held: deque[HeldSeen] = deque(maxlen=_KEPT)
        self._experts: deque[ExpertsSeen] = deque(maxlen=_KEPT)
        self._uneven: deque[UnevenSeen] = deque(maxlen=_KEPT)
        self._exchanged: tuple[int, Exchanged, Summed] = (-1, {}, {})

    def measures(self, step: int) -> bool:
        """Whether ``step`` is measured; it is the same on all ranks."""
        return step == 1 or step % self._every == 0

    def trace(self, step: int) -> Trace:
        """Return a trace for the instructions of ``step``."""
        return Trace(
            measured=self.measures(step),
            stopwatch=self._stopwatch,
            slowness=self._slowness(step),
            wall=self._wall or time.monotonic,
        )

    def exchange(self, step: int, neighbours: Neighbours, message: torch.Tensor) -> None:
        """Time messages and sums with this worker's neighbours, before ``step``."""
        now = self._stopwatch.now
        self._exchanged = step, neighbours.exchange(message, now), neighbours.sums(message, now)

    def with_step(
        self,
        step: int,
        trace: Trace,
        state_bytes: Mapping[int, int],
        took: StepSeen | None = None,
        optimizer_bytes: int = 0,
        expert_loads: Mapping[int, float] = MappingProxyType({}),
    ) -> str:
        """Return what is known after ``step``, which was measured, in the form in which it is published.

        Args:
            state_bytes: The bytes of state of each layer whose state is here.
            took: The time of the step; None if it tells nothing about other steps.
            optimizer_bytes: Of optimizer state that is here.
            expert_loads: See :class:`ExpertsSeen`. Empty: another rank tells, or there are no such experts.
        """
        if expert_loads:
            self._experts.append(ExpertsSeen(step=step, loads=tuple(sorted(expert_loads.items()))))
        self._took.extend([took] if took else [])
        self._ends.extend([self._ending()] if self._ending else [])
        self._ending = trace.ending(step, optimizer_bytes)
        self._steps.append((*_medians(step, trace), *_probe(step, trace)))
        self._uneven.extend(_uneven(step, trace))
        if self._wall is not None:
            self._held.append(_held(step, trace, self._wall))
        if self._exchanged[0] == step:
            _, exchanged, summed = self._exchanged
            self._links.append(tuple(_links(step, exchanged, self._stopwatch)))
            self._sums.append(tuple(_sums(step, summed, self._stopwatch)))
        known = Measured(
            spans=tuple(one for of_step in self._steps for one in of_step),
            link=self.link,
            links=tuple(one for of_step in self._links for one in of_step),
            sums=tuple(one for of_step in self._sums for one in of_step),
            steps=tuple(self._took),
            ends=tuple(self._ends),
            held=tuple(self._held),
            experts=tuple(self._experts),
            uneven=tuple(self._uneven),
            state_bytes=tuple(sorted(state_bytes.items())),
            regroup_s=self.regroup_s,
            incarnation=self._incarnation,
        )
        return to_json(known)


def _medians(step: int, trace: Trace) -> Iterator[Observation]:
    """Yield one observation for each span of layers: medians, as something may hold up single microbatches."""
    took = trace.compute_s()
    of_microbatch = by_microbatch(took)
    spans: dict[tuple[int, int], tuple[list[float], list[float], list[float]]] = {}
    for visit, seconds in took.items():
        if visit.op is not Op.FORWARD:
            continue
        forwards, input_grads, weight_grads = spans.setdefault((visit.first, visit.last), ([], [], []))
        forwards.append(seconds)
        for times, ops in ((input_grads, (Op.INPUT_GRAD, Op.BACKWARD)), (weight_grads, (Op.WEIGHT_GRAD,))):
            alike = (one for one in of_microbatch[visit.microbatch] if one.op in ops)
            parts = [one for one in alike if visit.first <= one.first and one.last <= visit.last]
            if sum(one.last - one.first for one in parts) == visit.last - visit.first:
                times.append(sum(took[one] for one in parts))
    for (first, last), times_s in sorted(spans.items()):
        forward_s, input_grad_s, weight_grad_s = (statistics.median(one) if one else 0.0 for one in times_s)
        yield Observation(
            first=first,
            last=last,
            samples=len(times_s[0]),
            forward_s=forward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            step=step,
        )


def _uneven(step: int, trace: Trace) -> Iterator[UnevenSeen]:
    """Yield how unlike the microbatches are that take the most common way through this rank, if they are enough."""
    took = trace.compute_s()
    ways: dict[tuple[tuple[str, int, int], ...], list[tuple[float, float]]] = {}
    for own in by_microbatch(took).values():
        forward_s = sum(took[one] for one in own if one.op is Op.FORWARD)
        backward_s = sum(took[one] for one in own) - forward_s
        if forward_s > 0 and backward_s > 0:
            way = tuple(sorted((one.op.name, one.first, one.last) for one in own))
            ways.setdefault(way, []).append((forward_s, backward_s))
    forwards, backwards = zip(*max(ways.values(), key=len, default=()), strict=True) if ways else ((), ())
    if len(forwards) >= _ENOUGH and min(map(len, map(set, (forwards, backwards)))) > 1:
        usual_s = statistics.median(forwards)
        # 1.4826 times the median absolute deviation is the standard deviation of a normal distribution.
        spread = 1.4826 * statistics.median(abs(one / usual_s - 1) for one in forwards)
        together = statistics.correlation(forwards, backwards)
        yield UnevenSeen(step=step, spread=spread, together=together)


def _probe(step: int, trace: Trace) -> Iterator[Observation]:
    """Yield the fastest product, as the observation of an empty span."""
    if trace.probes:
        probe_s = min(trace.stopwatch.between_s(*one) for one in trace.probes)
        yield Observation(
            first=0, last=0, samples=1, forward_s=probe_s, input_grad_s=0.0, weight_grad_s=0.0, step=step
        )


_LONG_S = 0.06
"""Seconds for which a rank without work multiplies at most. This is longer than a processor is mostly taken
away at a time: the kernel's period for groups with a quota is 0.1 s.
"""


def _wall() -> Callable[[], float] | None:
    """Return the clock that shows which ranks do not get their processor; None: nobody is judged by it.

    Where the ranks of a node share cores, they wait for each other. Which ones wait changes with what they
    do, and is nobody's fault: this waiting is left out, where the kernel says how long it is.
    """
    if not cores.are_shared():
        return time.monotonic
    queued_s = cores.queued()
    return None if queued_s is None else lambda: time.monotonic() - queued_s()


def _held(step: int, trace: Trace, wall: Callable[[], float]) -> HeldSeen:
    """Return what was computed in the step. A rank that had nothing to compute multiplies matrices for a while.

    It does so for at most half as long as the step took, as others wait for it.
    """
    if trace.marks:
        return HeldSeen(step=step, computed_s=sum(trace.compute_s().values()), wall_s=trace.wall_s)
    matrix, now_s = torch.ones(_PROBE_SIZE, _PROBE_SIZE), time.monotonic()
    ends_s = now_s + min(_LONG_S, (now_s - trace.began_s) / 2)
    began_s, computed_s = wall(), time.thread_time()
    while time.monotonic() < ends_s:
        torch.mm(matrix, matrix)
    return HeldSeen(step=step, computed_s=time.thread_time() - computed_s, wall_s=wall() - began_s)


def _links(step: int, exchanged: Exchanged, stopwatch: Stopwatch) -> Iterator[LinkSeen]:
    for worker, rounds in exchanged.items():
        empty_s, both_s = (min(stopwatch.between_s(*one[kind]) for one in rounds) for kind in (0, 1))
        yield LinkSeen(
            step=step, worker=worker, empty_s=empty_s / 2, message_s=max(both_s - empty_s / 2, empty_s / 2)
        )


def _sums(step: int, summed: Summed, stopwatch: Stopwatch) -> Iterator[SumSeen]:
    for workers, rounds in summed.items():
        seconds = min(stopwatch.between_s(*one) for one in rounds)
        yield SumSeen(step=step, workers=to_runs(workers), seconds=seconds)


def link_times(group: dist.ProcessGroup, other: int, worker: int, message: torch.Tensor) -> LinkTimes:
    """Time messages to another rank and back, which must do the same.

    Args:
        other: The other's rank in ``group``.
        worker: Its worker.
        message: A tensor of the size of an activation.
    """
    mine, best_s = group.rank(), []
    for tensor in (message.new_zeros(1), message):
        times_s = []
        for _ in range(_ROUND_TRIPS):
            began_s = time.monotonic()
            for sends in (mine < other, mine > other):
                post = dist.isend if sends else dist.irecv
                work = post(tensor, group=group, **{"group_dst" if sends else "group_src": other})
                assert work is not None
                work.wait()
            tensor.reshape(-1)[0].item()  # waits until a device has it
            times_s.append(time.monotonic() - began_s)
        best_s.append(min(times_s) / 2)
    return LinkTimes(worker=worker, message_bytes=message.nbytes, empty_s=best_s[0], message_s=best_s[1])
