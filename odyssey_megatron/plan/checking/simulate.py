"""The simulator: when each instruction of a schedule runs, and how much memory is in use."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from odyssey_megatron.errors import ScheduleInvalid
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.placing.memory import state_bytes
from odyssey_megatron.plan.schedule import Schedule
from odyssey_megatron.plan.scheduling.gathers import ending_s
from odyssey_megatron.plan.scheduling.reductions import (
    NO_TAIL,
    Tail,
    buckets,
    buckets_of,
    lead_of,
    reduction_order,
)
from odyssey_megatron.plan.scheduling.visits import (
    FORWARD,
    NEEDS,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    TO_NEXT,
    TO_PREVIOUS,
    WEIGHT_GRAD,
    Codes,
    Visits,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One simulated step. Times are seconds since its start."""

    spans: tuple[tuple[int, tuple[tuple[float, float], ...]], ...]
    """(worker, (start, end) of each instruction of its program), in the order of the schedule's programs."""
    step_s: float
    activation_bytes: tuple[tuple[int, int], ...]
    """(worker, the most bytes of activations that are live at once)."""
    peak_bytes: tuple[tuple[int, int], ...]
    """(worker, the same plus the bytes of state that it keeps)."""


def reduce_s(costs: Costs, first: int, last: int, holders: int, copies: int = 0) -> float:
    """Return the time to sum the gradients of layers ``[first, last)`` over k ``holders``.

    A ring all-reduce sends 2 (k - 1) / k of the bytes. If ``copies`` (as in ``Layout``) are fewer than holders, a
    reduce-scatter sends half of that, and another k-th of the bytes goes to each further owner of a slice.
    """
    if holders < 2:
        return 0.0
    size, hops = costs.spans.gradient_bytes(first, last), reduce_hops(holders, copies)
    return hops * costs.link_latency_s + hops / holders * size / costs.link_bytes_per_s


def sum_s(costs: Costs, block: Block, copies: int) -> float:
    """Return :func:`reduce_s` of a block, longer if sums over its holders are slow."""
    usual_s = reduce_s(costs, block.first, block.last, len(block.holders), copies)
    return usual_s * costs.sum_factor(block.holders) if costs.slow_sums else usual_s


def reduce_hops(holders: int, copies: int = 0) -> int:
    """Return how many times a k-th of the bytes is sent in :func:`reduce_s`."""
    return holders - 1 + (min(copies, holders) or holders) - 1


def computed_before_s(layout: Layout, costs: Costs, end_s: float) -> dict[int, float]:
    """Return, for each worker, when it must have computed at the latest for a step that ends at ``end_s``.

    After that it must still sum at least one bucket; the others may have been summed while it computed.
    """
    least_s, cut = dict.fromkeys(layout.workers, math.inf), buckets(layout, costs)
    end_s -= ending_s(layout, cut, costs)
    for bucket in cut:
        seconds = sum_s(costs, bucket, layout.copies)
        for worker in bucket.holders:
            least_s[worker] = min(least_s[worker], seconds)
    return {worker: end_s - own_s for worker, own_s in least_s.items()}


def step_end_s(
    layout: Layout, costs: Costs, done_s: Mapping[int, float], tails: Mapping[int, Tail] | None = None
) -> float:
    """Return when the step ends, after sums in their order and ``STEP``.

    Args:
        done_s: worker -> when it has computed.
        tails: worker -> the weight gradients at the end of its program, beside which it sums; by default none.
    """
    gathered = buckets(layout, costs) if tails or layout.copies else layout.blocks()
    cut = gathered if tails else layout.blocks()
    ready_s, free_s, known_s = dict(done_s), dict.fromkeys(done_s, 0.0), dict[tuple[int, int], float]()
    starts: list[tuple[Block, float]] = []
    order = reduction_order(cut, behind=layout.num_layers)
    left_s = _left_s(order, costs, tails or {})
    # Backwards: the part of a worker's tail in a bucket is the last that it computes before the bucket's sum.
    for bucket in reversed(order):
        starts.append(
            (bucket, max(ready_s[one] - left_s.get((one, bucket.first), 0.0) for one in bucket.holders))
        )
        for worker in bucket.holders if tails else ():
            tail = tails[worker] if tails else NO_TAIL
            key = (id(tail), bucket.first)
            if key not in known_s:
                known_s[key] = tail.within_s(costs, bucket.first, bucket.last)
            ready_s[worker] -= known_s[key]
    for bucket, start_s in reversed(starts):
        start_s = max(start_s, *(free_s[worker] for worker in bucket.holders))
        end_s = start_s + sum_s(costs, bucket, layout.copies)
        free_s.update(dict.fromkeys(bucket.holders, end_s))
    return max(*done_s.values(), *free_s.values()) + ending_s(layout, gathered, costs)


def _left_s(order: Sequence[Block], costs: Costs, tails: Mapping[int, Tail]) -> dict[tuple[int, int], float]:
    """Return how much earlier workers come to a bucket's sum than by their programs.

    The keys are (worker, first layer of the bucket); those that are no earlier are left out. Workers come earlier if
    their last input gradient runs on meanwhile (:class:`odyssey_megatron.plan.scheduling.reductions.Tail`).
    """
    least_s = {worker: math.inf for worker, tail in tails.items() if tail.lead is not None}
    known_s, found = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
    for bucket in order if least_s else ():
        for worker in bucket.holders:
            if least_s.get(worker, 0.0):
                key = (id(tails[worker]), bucket.first)
                if key not in known_s:
                    known_s[key] = tails[worker].left_s(costs, bucket.first)
                least_s[worker] = found[worker, bucket.first] = min(least_s[worker], known_s[key])
    return found


def simulate(
    schedule: Schedule,
    layout: Layout,
    costs: Costs,
    speeds: Mapping[int, float] | None = None,
) -> Timeline:
    """Simulate one step of ``schedule`` with the interpreter's semantics.

    - A send takes the sender no time, and arrives ``costs.message_s()`` later, or later still by a slow link.
    - A receive is only posted; the forward or input gradient that needs its message waits for it.
    - An eager forward waits for nothing.
    - A sum starts when all holders have come to it and are through with their sums before it, and ends for all at the
      same time. It runs beside what they compute, and beside the rest of a last input gradient if nobody waits for it.
    - ``STEP`` waits for all. It includes the time that the next step's first forwards wait for their weights: for the
      optimizer, and for what others have stepped.

    Raises:
        ScheduleInvalid: some workers wait for ever; names one, its position and what it waits for.
    """
    visits = Visits(layout, buckets_of(dict(schedule.programs).values(), layout))
    return run_clock(visits, visits.encode(schedule), costs, speeds or {})


def run_clock(visits: Visits, programs: Codes, costs: Costs, speeds: Mapping[int, float]) -> Timeline:
    """:func:`simulate` for programs as codes."""
    return _Clock(visits, programs, costs, speeds).run()


Effect = tuple[float, int]
"""Seconds that an instruction takes, and bytes of activations that it adds, or frees if negative."""


class _Clock:
    def __init__(self, visits: Visits, programs: Codes, costs: Costs, speeds: Mapping[int, float]) -> None:
        self.visits, self.programs, self.costs, self.speeds = visits, programs, costs, speeds
        self.lag = costs.message_s()
        self.position = dict.fromkeys(programs, 0)
        self.now = dict.fromkeys(programs, 0.0)
        self.live, self.peak = dict.fromkeys(programs, 0), dict.fromkeys(programs, 0)
        self.spans: dict[int, list[tuple[float, float]]] = {worker: [] for worker in programs}
        self.arrival = [0.0] * visits.reductions
        """Receive -> when its message arrives; negative until that is sent."""
        for visit, (before, behind) in enumerate(zip(visits.before, visits.behind, strict=True)):
            if before >= 0:
                self.arrival[visit * 8 + RECV_FORWARD] = -1.0
            if behind >= 0:
                self.arrival[visit * 8 + RECV_BACKWARD] = -1.0
        self.late: dict[int, float] = {}
        """Receive -> how much longer its message takes than others; empty if no link is slow."""
        for visit, worker in enumerate(visits.worker) if costs.slow_links else ():
            self.late[visit * 8 + RECV_FORWARD] = costs.lags_s.get((visits.before[visit], worker), 0.0)
            self.late[visit * 8 + RECV_BACKWARD] = costs.lags_s.get((visits.behind[visit], worker), 0.0)
        self.sleeping: dict[int, int] = {}
        """Receive -> the worker that waits for its message."""
        self.summing: dict[int, deque[tuple[int, float, int]]] = {worker: deque() for worker in programs}
        """Worker -> the sums that it has come to and that have not begun: (code, since when, place in its program)."""
        self.free = dict.fromkeys(programs, 0.0)
        """Worker -> when its last sum ends."""
        self.ready: set[int] = set()
        """Workers that wait at ``STEP``."""
        leads = {worker: lead_of(program, visits) for worker, program in programs.items()}
        self.ends = {
            worker: Tail((), speeds.get(worker, 1.0), lead) for worker, lead in leads.items() if lead
        }
        self.left = dict.fromkeys(self.ends, math.inf)
        """Worker -> how much earlier than by its program it comes to its next sum, at most."""
        alike: dict[tuple[int, int, int], tuple[Effect, ...]] = {}
        places = list(zip(visits.worker, visits.first, visits.last, strict=True))
        for worker, first, last in set(places):
            alike[worker, first, last] = effects(costs, first, last, speeds.get(worker, 1.0))
        self._effects = [alike[place] for place in places]

    def run(self) -> Timeline:
        runnable = list(self.programs)
        while runnable:
            runnable += self._advance(runnable.pop())
        stuck = [w for w, program in self.programs.items() if self.position[w] < len(program)]
        if stuck:
            raise ScheduleInvalid(self._deadlock(stuck))
        return self._timeline()

    def _advance(self, worker: int) -> list[int]:
        """Run ``worker`` until it must wait; return the workers that this has woken."""
        visits, program, woken = self.visits, self.programs[worker], list[int]()
        while self.position[worker] < len(program):
            at = self.position[worker]
            code = program[at]
            if code < visits.reductions:
                woken += self._run_visits(worker)
                if self.position[worker] == at:
                    break
            elif code < visits.step:
                woken += self._sum(worker, code)
            elif code > visits.step:
                self._compute(worker, *self._effect(worker, code))
            else:
                return woken if self.summing[worker] else woken + self._meet(worker)
        return woken

    def _effect(self, worker: int, code: int) -> Effect:
        """Return the effect of an eager forward, or of a part of a weight gradient; neither waits for anything."""
        visits, speed = self.visits, self.speeds.get(worker, 1.0)
        if code < visits.pieces:
            return eager_effect(self.costs, visits, code - visits.eager, speed)
        return effects(self.costs, *visits.span_of_piece(code)[1:], speed)[WEIGHT_GRAD]

    def _compute(self, worker: int, seconds: float, size: int) -> None:
        start = self.now[worker]
        self.now[worker] = start + seconds
        self.live[worker] += size
        self.peak[worker] = max(self.peak[worker], self.live[worker])
        self.spans[worker].append((start, start + seconds))
        self.position[worker] += 1

    def _run_visits(self, worker: int) -> list[int]:
        """Run instructions of visits up to one that must wait, or is of another kind; return who is woken."""
        program, spans, woken = self.programs[worker], self.spans[worker], list[int]()
        at, now, live, peak = self.position[worker], self.now[worker], self.live[worker], self.peak[worker]
        arrival, sleeping, lag, late = self.arrival, self.sleeping, self.lag, self.late
        reductions = self.visits.reductions
        while at < len(program) and (code := program[at]) < reductions:
            kind, start = code & 7, now
            if kind < SEND_FORWARD:
                needed = code + NEEDS[kind]
                if arrival[needed] > now:
                    start = arrival[needed]
                elif arrival[needed] < 0.0:
                    sleeping[needed] = worker
                    break
                seconds, size = self._effects[code >> 3][kind]
                now = start + seconds
                live += size
                if live > peak:
                    peak = live
            elif kind == SEND_FORWARD or kind == SEND_BACKWARD:
                received = code + (TO_NEXT if kind == SEND_FORWARD else TO_PREVIOUS)
                arrival[received] = now + lag + late[received] if late else now + lag
                if received in sleeping:
                    woken.append(sleeping.pop(received))
            spans.append((start, now))
            at += 1
        self.position[worker], self.now[worker], self.live[worker], self.peak[worker] = at, now, live, peak
        return woken

    def _sum(self, worker: int, code: int) -> list[int]:
        """Let ``worker`` come to a sum, beside which it goes on. All holders of a bucket start it in their order."""
        here = self.now[worker]
        if worker in self.ends:
            first = self.visits.buckets[code - self.visits.reductions].first
            self.left[worker] = min(self.left[worker], self.ends[worker].left_s(self.costs, first))
            here -= self.left[worker]
        self.summing[worker].append((code, here, self.position[worker]))
        self.spans[worker].append((self.now[worker], self.now[worker]))  # replaced once they are known
        self.position[worker] += 1
        found, woken = [code], list[int]()
        while found:
            code = found.pop()
            bucket = self.visits.buckets[code - self.visits.reductions]
            if not all(self.summing[one] and self.summing[one][0][0] == code for one in bucket.holders):
                continue
            start = max(max(self.summing[one][0][1], self.free[one]) for one in bucket.holders)
            end = start + sum_s(self.costs, bucket, self.visits.layout.copies)
            for one in bucket.holders:
                _, _, at = self.summing[one].popleft()
                self.spans[one][at], self.free[one] = (start, end), end
                if self.summing[one]:
                    found.append(self.summing[one][0][0])
                elif one != worker:  # it may wait at STEP
                    woken.append(one)
        return woken

    def _meet(self, worker: int) -> list[int]:
        """Let ``worker`` come to ``STEP``; once all have, they end it together."""
        self.ready.add(worker)
        if len(self.ready) < len(self.programs):
            return []
        start = max(*self.now.values(), *self.free.values())
        end = start + ending_s(self.visits.layout, self.visits.buckets, self.costs)
        for member in self.ready:
            self.spans[member].append((start, end))
            self.position[member] += 1
            self.now[member] = end
        return []

    def _deadlock(self, stuck: list[int]) -> str:
        worker = stuck[0]
        at = self.position[worker]
        program = self.visits.decode(self.programs[worker])
        excerpt = " ".join(map(str, program[max(0, at - 3) : at + 3]))
        return (
            f"deadlock: worker(s) {stuck} never finish; worker {worker} waits at position {at} for "
            f"{program[at]} (… {excerpt} …). This is a bug of the generator: report the schedule."
        )

    def _timeline(self) -> Timeline:
        state = state_bytes(self.visits.layout, self.costs)
        return Timeline(
            spans=tuple((worker, tuple(spans)) for worker, spans in self.spans.items()),
            step_s=max(self.now.values(), default=0.0),
            activation_bytes=tuple(self.peak.items()),
            peak_bytes=tuple((worker, state.get(worker, 0) + size) for worker, size in self.peak.items()),
        )


def eager_effect(costs: Costs, visits: Visits, visit: int, speed: float) -> Effect:
    """Return the effect of an eager forward of ``visit``.

    Its activations stay until the step's end, and so does its result if messages are kept.
    """
    first, last = visits.first[visit], visits.last[visit]
    seconds, size = effects(costs, first, last, speed)[FORWARD]
    kept = costs.keeps_messages and last < len(costs.layers)
    return seconds, size + costs.message_bytes * kept


def effects(costs: Costs, first: int, last: int, speed: float) -> tuple[Effect, ...]:
    """Return the effect of each kind of compute instruction on layers ``[first, last)``.

    Activations stay from the forward to the weight gradient.
    """
    spans = costs.spans
    input_grad_s, weight_grad_s = spans.input_grad_s(first, last), spans.weight_grad_s(first, last)
    early, whole = spans.early_bytes(first, last), spans.activation_bytes(first, last)
    return (
        (spans.forward_s(first, last) / speed, whole),
        (input_grad_s / speed, -early),
        (weight_grad_s / speed, early - whole),
        ((input_grad_s + weight_grad_s) / speed, -whole),
    )
