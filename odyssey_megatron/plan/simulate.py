"""The clock: when each instruction of a schedule runs, and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from odyssey_megatron.errors import ScheduleInvalid
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.memory import state_bytes
from odyssey_megatron.plan.messages import neighbours, reduction_order
from odyssey_megatron.plan.schedule import COMPUTE, RECV, SEND, Instr, Op, Program, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One simulated step. Times are seconds since its start."""

    spans: tuple[tuple[int, tuple[tuple[float, float], ...]], ...]
    """(worker, ((start, end) of each instruction of its program, ...)), as the schedule's programs."""
    step_s: float
    activation_bytes: tuple[tuple[int, int], ...]
    """(worker, bytes): the most activations that are live at once."""
    peak_bytes: tuple[tuple[int, int], ...]
    """The same and the state of all that the worker holds."""


def reduce_s(costs: Costs, first: int, last: int, holders: int) -> float:
    """Ring all-reduce of a block's gradients: 2 (k - 1) / k of its bytes. Source: papers.md §8.5.

    ``parameter_bytes`` counts weights and gradients; the gradients are half of it.
    """
    if holders < 2:
        return 0.0
    size = sum(layer.parameter_bytes for layer in costs.layers[first:last]) / 2
    hops = 2 * (holders - 1)
    return hops * costs.link_latency_s + hops / holders * size / costs.link_bytes_per_s


def step_end_s(layout: Layout, costs: Costs, done_s: Mapping[int, float]) -> float:
    """When the step ends, given when each worker has computed: reductions in their order, then ``STEP``."""
    now = dict(done_s)
    for block in reduction_order(layout):
        end = max(now[worker] for worker in block.holders)
        end += reduce_s(costs, block.first, block.last, len(block.holders))
        now.update(dict.fromkeys(block.holders, end))
    return max(now.values()) + costs.optimizer_s


def simulate(
    schedule: Schedule,
    layout: Layout,
    costs: Costs,
    speeds: Mapping[int, float] | None = None,
) -> Timeline:
    """Runs ``schedule`` with the interpreter's semantics.

    A send takes the sender no time and arrives ``costs.message_s()`` later; a receive is only posted, and
    the forward or input gradient that needs it waits; a reduction starts when all holders have come and
    ends for all at once; so does ``STEP``.

    Raises:
        ScheduleInvalid: some workers wait for ever; names one, its position and what it waits for.
    """
    return _Clock(schedule, layout, costs, speeds or {}).run()


class _Clock:
    def __init__(self, schedule: Schedule, layout: Layout, costs: Costs, speeds: Mapping[int, float]) -> None:
        self.layout, self.costs, self.speeds = layout, costs, speeds
        self.programs: dict[int, Program] = dict(schedule.programs)
        self.table = neighbours(layout)
        self.lag = costs.message_s()
        self.position = dict.fromkeys(self.programs, 0)
        self.now = dict.fromkeys(self.programs, 0.0)
        self.spans: dict[int, list[tuple[float, float]]] = {w: [] for w in self.programs}
        self.arrival: dict[tuple[Op, int, int], float] = {}
        self.sleeping: dict[tuple[Op, int, int], int] = {}
        self.gathering: dict[tuple[int, int], list[int]] = {}
        self.holders = {(block.first, block.last): block.holders for block in layout.blocks()}
        self.durations: dict[tuple[int, Op, int, int], float] = {}

    def run(self) -> Timeline:
        runnable = list(self.programs)
        while runnable:
            runnable += self._advance(runnable.pop())
        stuck = [w for w, program in self.programs.items() if self.position[w] < len(program)]
        if stuck:
            raise ScheduleInvalid(self._deadlock(stuck))
        return self._timeline()

    def _advance(self, worker: int) -> list[int]:
        """Runs ``worker`` until it must wait; returns whom that has woken."""
        program, spans, woken = self.programs[worker], self.spans[worker], list[int]()
        at, now = self.position[worker], self.now[worker]
        arrival, sleeping = self.arrival, self.sleeping
        while at < len(program):
            op, microbatch, first, last, _ = instr = program[at]
            start = now
            if op in COMPUTE:
                key = self._waits_for(instr)
                if key is not None:
                    if key not in arrival:
                        sleeping[key] = worker
                        break
                    start = max(now, arrival[key])
                duration = self.durations.get((worker, op, first, last))
                now = start + (self._duration(worker, instr) if duration is None else duration)
            elif op in SEND:
                key = (op, microbatch, first)
                arrival[key] = now + self.lag
                if key in sleeping:
                    woken.append(sleeping.pop(key))
            elif op not in RECV:
                self.position[worker], self.now[worker] = at, now
                return woken + self._gather(worker, instr)
            spans.append((start, now))
            at += 1
        self.position[worker], self.now[worker] = at, now
        return woken

    def _waits_for(self, instr: Instr) -> tuple[Op, int, int] | None:
        """The message that ``instr`` consumes, named by its send."""
        op, microbatch, first, last, _ = instr
        if op is Op.WEIGHT_GRAD:
            return None
        before, behind = self.table.get((microbatch, first), (-1, -1))
        if op is Op.FORWARD:
            return (Op.SEND_FORWARD, microbatch, first) if before >= 0 else None
        return (Op.SEND_BACKWARD, microbatch, last) if behind >= 0 else None

    def _duration(self, worker: int, instr: Instr) -> float:
        op, _, first, last, _ = instr
        layers, total = self.costs.layers[first:last], 0.0
        if op is Op.FORWARD:
            total = sum(layer.forward_s for layer in layers)
        if op in (Op.INPUT_GRAD, Op.BACKWARD):
            total += sum(layer.input_grad_s for layer in layers)
        if op in (Op.WEIGHT_GRAD, Op.BACKWARD):
            total += sum(layer.weight_grad_s for layer in layers)
        seconds = self.durations[worker, op, first, last] = total / self.speeds.get(worker, 1.0)
        return seconds

    def _gather(self, worker: int, instr: Instr) -> list[int]:
        """``worker`` has come to a collective; once all have, they go on together."""
        key = (instr.first, instr.last)
        members = self.programs.keys() if instr.op is Op.STEP else self.holders.get(key, (worker,))
        here = self.gathering.setdefault(key, [])
        here.append(worker)
        if len(here) < len(members):
            return []
        del self.gathering[key]
        start = max(self.now[member] for member in here)
        if instr.op is Op.STEP:
            end = start + self.costs.optimizer_s
        else:
            end = start + reduce_s(self.costs, instr.first, instr.last, len(members))
        for member in here:
            self.spans[member].append((start, end))
            self.position[member] += 1
            self.now[member] = end
        return here

    def _deadlock(self, stuck: list[int]) -> str:
        worker = stuck[0]
        at = self.position[worker]
        program = self.programs[worker]
        excerpt = " ".join(map(str, program[max(0, at - 3) : at + 3]))
        return (
            f"deadlock: worker(s) {stuck} never finish; worker {worker} waits at position {at} for "
            f"{program[at]} (… {excerpt} …). This is a bug of the generator: report the schedule."
        )

    def _timeline(self) -> Timeline:
        step_s = max(self.now.values(), default=0.0)
        state = state_bytes(self.layout, self.costs)
        live = tuple((worker, peak_activation_bytes(p, self.costs)) for worker, p in self.programs.items())
        return Timeline(
            spans=tuple((worker, tuple(spans)) for worker, spans in self.spans.items()),
            step_s=step_s,
            activation_bytes=live,
            peak_bytes=tuple((worker, state.get(worker, 0) + size) for worker, size in live),
        )


def peak_activation_bytes(program: Program, costs: Costs) -> int:
    """The most activation bytes live at once: from a forward to its weight gradient."""
    sizes: dict[tuple[int, int], tuple[int, int]] = {}
    live = peak = 0
    for op, _, first, last, _ in program:
        if op not in COMPUTE:
            continue
        span = (first, last)
        if span not in sizes:
            layers = costs.layers[first:last]
            early = sum(layer.early_bytes for layer in layers)
            sizes[span] = (early, sum(layer.activation_bytes for layer in layers) - early)
        early, late = sizes[span]
        if op is Op.FORWARD:
            live += early + late
            peak = max(peak, live)
        elif op is Op.INPUT_GRAD:
            live -= early
        else:
            live -= late if op is Op.WEIGHT_GRAD else early + late
    return peak
