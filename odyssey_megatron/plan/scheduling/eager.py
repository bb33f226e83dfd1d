"""Eager forwards: a holder runs forwards ahead, in its bubbles, for the worker whose place it would take.

Source: Bamboo's redundant computation (arXiv 2204.12013): the forward is run ahead on the shadow (eager FRC), so that
after a failure only the backward must be done (lazy BRC). Here the eager forward of a microbatch is useful until the
step's end: the weight gradients that a dead worker has added up are lost, so all its microbatches are done again.

Nothing is sent for an eager forward. A holder can run a visit ahead if it has made the visit's input, as the worker
before it on the route; or if the visit is the first of its route, whose input is tokens.

Only bubbles are filled. Outside of them an eager forward of f seconds would cost f in every step, and save at most f
once its worker dies: that never pays. Nothing is run ahead after a worker's first sum either: little of the step is
left then that could be lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from odyssey_megatron.plan.checking.simulate import Timeline, eager_effect, effects, simulate
from odyssey_megatron.plan.checking.verify import verify_codes
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import Op, Schedule
from odyssey_megatron.plan.scheduling.assemble import Assembled
from odyssey_megatron.plan.scheduling.messages import with_messages
from odyssey_megatron.plan.scheduling.order import Order
from odyssey_megatron.plan.scheduling.programs import Programs
from odyssey_megatron.plan.scheduling.reductions import buckets, with_reductions
from odyssey_megatron.plan.scheduling.visits import FORWARD, SEND_FORWARD, Codes, Visits

_ROUNDING = 1e-9
"""The share of a step by which a bubble may be too short, to allow for rounding."""

FailoverTargets = Mapping[tuple[int, int], int]
"""(microbatch, first layer of a hop) -> the failover target of the hop: the worker that would compute it if
the one that it is routed to died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerForward:
    """An eager forward; times are seconds since the step's start."""

    worker: int
    """The worker that runs it; ``routed`` is the worker that the visit is routed to."""
    routed: int
    microbatch: int
    first: int
    last: int
    start_s: float
    end_s: float

    def saves_s(self, step_s: float) -> float:
        """Return the time it saves on average if ``routed`` dies at a random moment of a step of ``step_s``.

        It saves its own time if it has run by then.
        """
        return (self.end_s - self.start_s) * max(0.0, 1 - self.end_s / step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """Programs with their bubbles filled."""

    programs: Codes
    forwards: tuple[EagerForward, ...]
    no_input: int
    """Number of visits that nobody can run ahead: no other worker holds their layers, or has their input."""
    no_memory: int
    """Number of visits for which a bubble was long enough, but memory was not large enough."""
    no_bubble: int
    """Number of visits for which no bubble was long enough."""

    def __str__(self) -> str:
        keeps = (
            (self.no_input, "without a holder that has their input"),
            (self.no_memory, "without memory"),
            (self.no_bubble, "without a bubble"),
        )
        whole = len(self.forwards) + sum(count for count, _ in keeps)
        why = ", ".join(f"{count} {what}" for count, what in keeps if count)
        return f"{len(self.forwards)} of {whole} forwards run ahead" + (f", {why}" if why else "")


def assemble_eager(
    order: Order,
    layout: Layout,
    costs: Costs,
    targets: FailoverTargets,
    *,
    caps: Mapping[int, int],
    speeds: Mapping[int, float],
) -> Assembled:
    """Lower and verify ``order`` as ``assemble`` does, with eager forwards wherever they cost nothing.

    Args:
        targets: which worker would compute a hop if its own died.
        caps: worker -> bytes of activations. Eager forwards keep to them too, if the memory is known.

    Raises:
        ScheduleInvalid: the schedule does not carry out the routes, deadlocks or exceeds its memory.
    """
    visits = Visits(layout, buckets(layout, costs))
    plain = with_reductions(with_messages(visits.encode(order.schedule()), visits), visits)
    timeline = verify_codes(visits, plain, costs, in_flight_cap=caps, speeds=speeds)
    room = caps if costs.memory_bytes is not None else None
    filled = fill_bubbles(plain, visits, timeline, targets, costs, room=room, speeds=speeds)
    timeline = verify_codes(visits, filled.programs, costs, in_flight_cap=room, speeds=speeds)
    schedule = Schedule(
        programs=tuple((worker, visits.decode(codes)) for worker, codes in filled.programs.items())
    )
    return Assembled(
        programs=Programs.from_text(schedule.to_text()), peak_bytes=timeline.peak_bytes, ahead=str(filled)
    )


def fill_bubbles(
    programs: Codes,
    visits: Visits,
    timeline: Timeline,
    targets: FailoverTargets,
    costs: Costs,
    *,
    room: Mapping[int, int] | None,
    speeds: Mapping[int, float],
) -> Filled:
    """Insert eager forwards where workers wait at least as long as these take, so that nothing else is delayed.

    Args:
        timeline: the simulated step of ``programs``.
        room: worker -> bytes of activations; None: not known, and no limit.
    """
    firsts: dict[int, list[int]] = {worker: [] for worker in programs}
    mine: dict[int, set[int]] = {worker: set() for worker in programs}
    no_input = 0
    for visit, place in enumerate(zip(visits.microbatch, visits.first, strict=True)):
        target = targets.get(place, -1)
        if target >= 0 and not place[1]:
            firsts[target].append(visit)
        elif target >= 0 and target == visits.before[visit]:
            mine[target].add(visit)
        else:
            no_input += 1
    filled: Codes = {}
    forwards: list[EagerForward] = []
    without_memory = 0
    for (worker, program), (_, spans) in zip(programs.items(), timeline.spans, strict=True):
        one = _Worker(worker, visits, costs, None if room is None else room[worker], speeds.get(worker, 1.0))
        if firsts[worker] or mine[worker]:
            one.fill(program, spans, firsts[worker], mine[worker], _ROUNDING * timeline.step_s)
        filled[worker] = one.program or program
        forwards += one.forwards
        without_memory += len(one.without_memory)
    return Filled(
        programs=filled,
        forwards=tuple(forwards),
        no_input=no_input,
        no_memory=without_memory,
        no_bubble=len(visits.worker) - len(forwards) - no_input - without_memory,
    )


class _Worker:
    """The bubbles of one worker."""

    def __init__(self, worker: int, visits: Visits, costs: Costs, room: int | None, speed: float) -> None:
        self.worker, self.visits, self.costs, self.room, self.speed = worker, visits, costs, room, speed
        self.program: list[int] = []
        self.forwards: list[EagerForward] = []
        self.without_memory: set[int] = set()

    def fill(
        self,
        program: list[int],
        spans: tuple[tuple[float, float], ...],
        firsts: Iterable[int],
        mine: set[int],
        rounding_s: float,
    ) -> None:
        """Fill the bubbles of ``program``, whose instructions run at ``spans``, first in, first out.

        An eager forward that runs early is most likely to have run when a worker dies.

        Args:
            firsts: visits that begin with tokens, and can be run ahead at any time.
            mine: visits that can be run ahead once this worker has done the forward before.
            rounding_s: the time by which a bubble may be too short.
        """
        visits, ready = self.visits, deque(firsts)
        busiest = self._busiest(program)
        now_s, kept = 0.0, 0
        for at, (code, (start_s, end_s)) in enumerate(zip(program, spans, strict=True)):
            visit, kind = code >> 3, code & 7
            if code >= visits.reductions:
                ready.clear()
            elif kind < SEND_FORWARD:
                while ready:
                    seconds, size = eager_effect(self.costs, visits, ready[0], self.speed)
                    if now_s + seconds > start_s + rounding_s:
                        break
                    if self.room is not None and busiest[at] + kept + size > self.room:
                        self.without_memory.add(ready[0])
                        break
                    self._run_ahead(ready.popleft(), now_s, now_s + seconds)
                    now_s, kept = now_s + seconds, kept + size
                now_s = end_s
                if kind == FORWARD and visit + 1 in mine:
                    ready.append(visit + 1)
            self.program.append(code)

    def _run_ahead(self, visit: int, start_s: float, end_s: float) -> None:
        visits = self.visits
        self.without_memory.discard(visit)
        self.program.append(visits.eager + visit)
        self.forwards.append(
            EagerForward(
                worker=self.worker,
                routed=visits.worker[visit],
                microbatch=visits.microbatch[visit],
                first=visits.first[visit],
                last=visits.last[visit],
                start_s=start_s,
                end_s=end_s,
            )
        )

    def _busiest(self, program: list[int]) -> list[int]:
        """Return, for each instruction, the most bytes of activations that are live at once from just before it on.

        From just before it, since the instruction itself may free some.
        """
        if self.room is None:
            return []
        visits, live, before = self.visits, 0, list[int]()
        for code in program:
            before.append(live)
            if code < visits.reductions and code & 7 < SEND_FORWARD:
                visit = code >> 3
                live += effects(self.costs, visits.first[visit], visits.last[visit], 1.0)[code & 7][1]
        most, busiest = 0, list[int]()
        for live in reversed(before):
            most = max(most, live)
            busiest.append(most)
        return busiest[::-1]


def eager_forwards(schedule: Schedule, layout: Layout, costs: Costs) -> tuple[EagerForward, ...]:
    """Return the eager forwards in ``schedule``, with their simulated times."""
    routed = {
        (microbatch, hop.first): hop.worker
        for route in layout.routes
        for hop in route.hops
        for microbatch in route.microbatches
    }
    timeline = simulate(schedule, layout, costs)
    return tuple(
        EagerForward(
            worker=worker,
            routed=routed[instr.microbatch, instr.first],
            microbatch=instr.microbatch,
            first=instr.first,
            last=instr.last,
            start_s=start_s,
            end_s=end_s,
        )
        for (worker, program), (_, spans) in zip(schedule.programs, timeline.spans, strict=True)
        for instr, (start_s, end_s) in zip(program, spans, strict=True)
        if instr.op is Op.EAGER_FORWARD
    )
