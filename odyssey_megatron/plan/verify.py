"""``verify()``: nothing is executed that has not passed it (I7)."""

from __future__ import annotations

from collections.abc import Mapping

from odyssey_megatron.errors import ScheduleInvalid
from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import COMPUTE, MESSAGE, RECV, Instr, Op, Program, Schedule
from odyssey_megatron.plan.simulate import Timeline, simulate

_SENT_AS = {Op.RECV_FORWARD: Op.SEND_FORWARD, Op.RECV_BACKWARD: Op.SEND_BACKWARD}


def verify(
    layout: Layout,
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    in_flight_cap: Mapping[int, int] | None = None,
    speeds: Mapping[int, float] | None = None,
) -> Timeline:
    """Checks that ``schedule`` carries out ``layout``; returns the simulated step, since that checks too.

    Every layer of every microbatch has one forward, one input and one weight gradient (or one fused
    backward), on the routed worker, in that order; each activation and gradient that crosses workers is sent
    once, received before it is consumed, and channels (sender, receiver, kind) agree on their order; each
    block's gradient is reduced once by each holder, after all its weight gradients; ``STEP`` comes once and
    last; nobody waits for ever; and, where ``in_flight_cap`` is given (worker -> bytes), activations fit.

    Raises:
        ScheduleInvalid: with the worker, the position in its program, and the program around it.
    """
    expected = layout.workers
    found = tuple(worker for worker, _ in schedule.programs)
    if found != expected:
        raise ScheduleInvalid(f"programs of workers {found}, the layout has {expected}")
    check = _Check(layout)
    for worker, program in schedule.programs:
        check.program(worker, program)
    check.complete()
    check.channels(schedule)
    timeline = simulate(schedule, layout, costs or _unit_costs(layout.num_layers), speeds)
    caps = in_flight_cap or {}
    for worker, peak in timeline.activation_bytes:
        if peak > caps.get(worker, peak):
            raise ScheduleInvalid(
                f"worker {worker} keeps {peak} bytes of activations, allowed are {caps[worker]}"
            )
    return timeline


def _unit_costs(num_layers: int) -> Costs:
    layer = LayerCost(
        forward_s=1.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        activation_bytes=1,
        parameter_bytes=0,
        optimizer_bytes=0,
        state_bytes=0,
    )
    return Costs(layers=(layer,) * num_layers, message_bytes=0, link_latency_s=0.0, link_bytes_per_s=1.0)


class _Check:
    """Sets of layers are bit masks: bit i is layer i."""

    def __init__(self, layout: Layout) -> None:
        self.num_layers = layout.num_layers
        self.full = (1 << layout.num_layers) - 1
        count = layout.num_microbatches
        self.forward, self.input_grad, self.weight_grad = [0] * count, [0] * count, [0] * count
        """Per microbatch, the layers done so far."""
        self.routed: dict[tuple[int, int], int] = {}
        """(worker, microbatch) -> layers."""
        self.reductions: dict[int, set[tuple[int, int]]] = {worker: set() for worker in layout.workers}
        for block in layout.blocks():
            for worker in block.holders:
                self.reductions[worker].add((block.first, block.last))
        self.crossings: dict[tuple[int, int], tuple[int, int]] = {}
        """(microbatch, layer) -> (worker that the activation comes from, to), where it changes worker."""
        for route in layout.routes:
            for microbatch in route.microbatches:
                sender = -1
                for hop in route.hops:
                    key = (hop.worker, microbatch)
                    span = (1 << hop.last) - (1 << hop.first)
                    self.routed[key] = self.routed.get(key, 0) | span
                    if sender not in (-1, hop.worker):
                        self.crossings[microbatch, hop.first] = (sender, hop.worker)
                    sender = hop.worker

    def program(self, worker: int, program: Program) -> None:
        """Everything that can be seen in one worker's program."""
        posted: set[tuple[Op, int, int]] = set()
        used: set[tuple[Op, int, int]] = set()
        reductions = set(self.reductions[worker])
        reduced = 0
        for at, instr in enumerate(program):
            op, problem = instr.op, ""
            if op in COMPUTE:
                problem = self._compute(worker, instr, posted, used, reduced)
            elif op in MESSAGE:
                problem = self._message(worker, instr, posted)
            elif op is Op.REDUCE_GRAD:
                span = (instr.first, instr.last)
                problem = "" if span in reductions else "is no block of this worker, or reduced twice"
                reductions.discard(span)
                reduced |= (1 << instr.last) - (1 << instr.first)
            else:
                problem = "" if at == len(program) - 1 else "must come last, and once"
            if problem:
                raise ScheduleInvalid(_where(worker, at, program) + problem)
        at = len(program) - 1
        if not program or program[-1].op is not Op.STEP:
            raise ScheduleInvalid(_where(worker, at, program) + "the program must end with STEP")
        if reductions:
            raise ScheduleInvalid(_where(worker, at, program) + f"blocks {sorted(reductions)} not reduced")
        if posted - used:
            idle = sorted(f"{op.value}{m}[{layer}]" for op, m, layer in posted - used)
            raise ScheduleInvalid(_where(worker, at, program) + f"received but never used: {idle}")

    def _compute(
        self,
        worker: int,
        instr: Instr,
        posted: set[tuple[Op, int, int]],
        used: set[tuple[Op, int, int]],
        reduced: int,
    ) -> str:
        op, microbatch, first, last, _ = instr
        span = (1 << last) - (1 << first)
        if span <= 0 or span & ~self.routed.get((worker, microbatch), 0):
            return f"microbatch {microbatch} is not routed through these layers here"
        forward, input_grad, weight_grad = self.forward, self.input_grad, self.weight_grad
        fused = op is Op.BACKWARD
        if op is Op.FORWARD:
            twice, missing = forward[microbatch] & span, 0
            forward[microbatch] |= span
        elif op is Op.WEIGHT_GRAD:
            twice, missing = weight_grad[microbatch] & span, span & ~input_grad[microbatch]
        else:
            twice, missing = input_grad[microbatch] & span, span & ~forward[microbatch]
            input_grad[microbatch] |= span
        if op is Op.WEIGHT_GRAD or fused:
            twice |= weight_grad[microbatch] & span
            weight_grad[microbatch] |= span
            if span & reduced:
                return "comes after the reduction of its block"
        if twice:
            return f"layer(s) {_layers(twice)} twice"
        if missing:
            return f"layer(s) {_layers(missing)} before what they depend on"
        return "" if op is Op.WEIGHT_GRAD else self._needs(instr, posted, used)

    def _needs(self, instr: Instr, posted: set[tuple[Op, int, int]], used: set[tuple[Op, int, int]]) -> str:
        """What ``instr`` consumes must have been computed here or received."""
        op, microbatch, first, last, _ = instr
        if op is Op.FORWARD:
            key, edge = (Op.RECV_FORWARD, microbatch, first), first
            ready = edge == 0 or self.forward[microbatch] >> (edge - 1) & 1
        else:
            key, edge = (Op.RECV_BACKWARD, microbatch, last), last
            ready = edge == self.num_layers or self.input_grad[microbatch] >> edge & 1
        if (microbatch, edge) in self.crossings:
            used.add(key)
            return "" if key in posted else "its input was not received before"
        return "" if ready else "its input was not computed before"

    def _message(self, worker: int, instr: Instr, posted: set[tuple[Op, int, int]]) -> str:
        op, microbatch, edge, _, peer = instr
        key = (op, microbatch, edge)
        if key in posted:
            return "twice"
        crossing = self.crossings.get((microbatch, edge))
        down = op is Op.SEND_FORWARD or op is Op.RECV_BACKWARD
        if crossing != ((worker, peer) if down else (peer, worker)):
            return f"nothing crosses so at layer {edge}; the route says {crossing}"
        if op in RECV:
            posted.add(key)
            return ""
        done = self.forward[microbatch] >> (edge - 1) if down else self.input_grad[microbatch] >> edge
        return "" if done & 1 else "sent before it is computed"

    def complete(self) -> None:
        """Every layer of every microbatch, all three kinds."""
        for kind, masks in (("F", self.forward), ("I", self.input_grad), ("W", self.weight_grad)):
            for microbatch, mask in enumerate(masks):
                if mask != self.full:
                    raise ScheduleInvalid(
                        f"microbatch {microbatch}: {kind} is missing for layer(s) "
                        f"{_layers(self.full & ~mask)}"
                    )

    def channels(self, schedule: Schedule) -> None:
        """Both ends of each (sender, receiver, kind) name the same messages in the same order."""
        sent: dict[tuple[int, int, Op], list[tuple[int, int]]] = {}
        received: dict[tuple[int, int, Op], list[tuple[int, int]]] = {}
        for worker, program in schedule.programs:
            for instr in program:
                if instr.peer < 0:
                    continue
                kind = _SENT_AS.get(instr.op)
                if kind is None:
                    side, key = sent, (worker, instr.peer, instr.op)
                else:
                    side, key = received, (instr.peer, worker, kind)
                side.setdefault(key, []).append((instr.microbatch, instr.first))
        for key in sorted(sent.keys() | received.keys(), key=str):
            ours, theirs = sent.get(key, []), received.get(key, [])
            if ours != theirs:
                at = next(
                    (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                    min(len(ours), len(theirs)),
                )
                raise ScheduleInvalid(
                    f"channel {key[2].value} {key[0]}>{key[1]}: message {at} is (microbatch, layer) "
                    f"{ours[at : at + 3]}… at the sender and {theirs[at : at + 3]}… at the receiver"
                )


def _layers(mask: int) -> list[int]:
    return [layer for layer in range(mask.bit_length()) if mask >> layer & 1]


def _where(worker: int, at: int, program: Program) -> str:
    shown = " ".join(
        f"»{instr}«" if i == at else str(instr)
        for i, instr in enumerate(program[max(0, at - 3) : at + 3], max(0, at - 3))
    )
    return f"worker {worker}, position {at}: … {shown} …: "
