"""``verify()``: whether a schedule carries out its layout. No schedule is executed that has not passed it (I7)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from odyssey_megatron.errors import ScheduleInvalid
from odyssey_megatron.plan.checking.heads import Heads, heads_in_order
from odyssey_megatron.plan.checking.queue import check_queue
from odyssey_megatron.plan.checking.simulate import Timeline, run_clock
from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import Schedule
from odyssey_megatron.plan.scheduling.reductions import buckets_of
from odyssey_megatron.plan.scheduling.visits import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    NO_BLOCK,
    OPS,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    WEIGHT_GRAD,
    Codes,
    Visits,
    where,
)


def _bits(*kinds: int) -> int:
    return sum(1 << kind for kind in kinds)


_DOES = tuple(_bits(INPUT_GRAD, WEIGHT_GRAD) if kind == BACKWARD else _bits(kind) for kind in range(8))
"""The kinds of work that each kind of instruction does for its visit, as bits: a fused backward does both gradients."""

_AFTER = {
    FORWARD: _bits(RECV_FORWARD),
    INPUT_GRAD: _bits(FORWARD, RECV_BACKWARD),
    WEIGHT_GRAD: _bits(INPUT_GRAD),
    BACKWARD: _bits(FORWARD, RECV_BACKWARD),
    SEND_FORWARD: _bits(FORWARD),
    RECV_FORWARD: 0,
    SEND_BACKWARD: _bits(INPUT_GRAD),
    RECV_BACKWARD: 0,
}
"""The kinds of work, as bits, that must be done before an instruction of each kind, if the visit has them at all."""


BEHIND_SUMS = "comes behind a reduction, where others may wait for it that the reduction waits for"


SUMMED_BEFORE = "comes after the reduction of its block"


def verify(
    layout: Layout,
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    in_flight_cap: Mapping[int, int] | None = None,
    speeds: Mapping[int, float] | None = None,
) -> Timeline:
    """Check that ``schedule`` carries out ``layout``, and return the simulated step (simulating is one of the checks).

    - Every layer of every microbatch has one forward, one input gradient and one weight gradient (or one fused
      backward), in that order, on the routed worker, and a hop in one piece.
    - Each activation and gradient that crosses workers is sent once, and received before it is consumed. Both ends of a
      channel (sender, receiver) agree on the order of its messages.
    - Each bucket's gradient is summed once by each holder, after all its weight gradients, and in one order. After its
      first sum a worker only has sums and weight gradients, of whole visits or of their part in a bucket.
    - ``STEP`` comes once, and last.
    - Nobody waits for ever, even if each device has a single queue for all that it is given
      (``plan/checking/queue.py``).
    - Activations fit ``in_flight_cap`` (worker -> bytes), if that is given.

    Raises:
        ScheduleInvalid: with the worker, the position in its program, and the program around it.
    """
    visits = Visits(layout, buckets_of(dict(schedule.programs).values(), layout))
    return verify_codes(visits, visits.encode(schedule), costs, in_flight_cap=in_flight_cap, speeds=speeds)


def verify_codes(
    visits: Visits,
    programs: Codes,
    costs: Costs | None = None,
    *,
    in_flight_cap: Mapping[int, int] | None = None,
    speeds: Mapping[int, float] | None = None,
) -> Timeline:
    """:func:`verify` for programs as codes, ascending by worker."""
    _check(visits, programs, heads_in_order(visits, programs, None))
    timeline = run_clock(visits, programs, costs or _unit_costs(visits.layout), speeds or {})
    check_queue(visits, programs)
    _check_memory(timeline.activation_bytes, in_flight_cap or {})
    return timeline


def verify_lowered(
    visits: Visits, programs: Codes, turns: Sequence[int], costs: Costs, caps: Mapping[int, int]
) -> dict[int, int]:
    """:func:`verify` without simulating: no result depends on how long instructions take.

    Programs that come to their ends with one queue per device also do so with more (``plan/checking/queue.py``).

    Args:
        turns: the order of compute instructions from ``plan/scheduling/messages.py``. It is not trusted, but quick to
            check.

    Returns:
        The most bytes of activations that each worker keeps.
    """
    heads = heads_in_order(visits, programs, costs, turns)
    if heads is None or not heads.queue:
        peaks = dict(verify_codes(visits, programs, costs, in_flight_cap=caps).activation_bytes)
    else:
        _check(visits, programs, heads)
        check_queue(visits, programs, heads.ends)
        peaks = heads.peaks
    _check_memory(peaks.items(), caps)
    return peaks


def _check_memory(peaks: Iterable[tuple[int, int]], caps: Mapping[int, int]) -> None:
    for worker, peak in peaks:
        if peak > caps.get(worker, peak):
            raise ScheduleInvalid(
                f"worker {worker} keeps {peak} bytes of activations, allowed are {caps[worker]}"
            )


def _check(visits: Visits, programs: Codes, heads: Heads | None) -> None:
    """Check all that depends on the order of instructions only; ``heads`` says what is known to be in order."""
    layout, found = visits.layout, tuple(programs)
    if found != layout.workers:
        raise ScheduleInvalid(f"programs of workers {found}, the layout has {layout.workers}")
    check = _Check(visits)
    if heads:
        check.left = [later << WEIGHT_GRAD for later in heads.summed_later]
    for worker, program in programs.items():
        check.program(worker, program, heads.ends[worker] if heads else 0)
    check.channels()
    check.complete()


def _unit_costs(layout: Layout) -> Costs:
    layer = LayerCost(
        forward_s=1.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        activation_bytes=1,
        weight_bytes=0,
        gradient_bytes=0,
        optimizer_bytes=0,
        state_bytes=0,
    )
    return Costs(
        layers=(layer,) * layout.num_layers,
        tied=layer if layout.tied else None,
        message_bytes=0,
        link_latency_s=0.0,
        link_bytes_per_s=1.0,
    )


class _Check:
    """Checks of what depends on the order only: each worker's program, then the messages between them."""

    def __init__(self, visits: Visits) -> None:
        self.visits = visits
        compute = _bits(FORWARD, INPUT_GRAD, WEIGHT_GRAD)
        above, below = _bits(RECV_FORWARD, SEND_BACKWARD), _bits(RECV_BACKWARD, SEND_FORWARD)
        self.left = [
            compute | above * (before >= 0) | below * (behind >= 0)
            for before, behind in zip(visits.before, visits.behind, strict=True)
        ]
        """For each visit, the kinds of work that are still to come, as bits."""
        self.ahead: set[tuple[int, int]] = set()
        """(worker, visit) of the eager forwards so far."""
        self.reductions: dict[int, set[int]] = {worker: set() for worker in visits.layout.workers}
        self.summed = dict.fromkeys(visits.layout.workers, 0)
        """Worker -> the layers whose gradients it has summed, as bits."""
        self.parts: dict[int, int] = {}
        """Visit whose weight gradient is done in parts -> the layers that are done, as bits."""
        for code, bucket in enumerate(visits.buckets, visits.reductions):
            for worker in bucket.holders:
                self.reductions[worker].add(code)
        self.sent: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.received: dict[tuple[int, int], list[int]] = defaultdict(list)
        """(sender, receiver) -> the codes of the messages' receives, in order."""

    def program(self, worker: int, program: list[int], start: int) -> None:
        """Check all that can be seen in one worker's program from ``start`` on."""
        visits, step = self.visits, self.visits.step
        for at, code in enumerate(program[start:], start):
            if code < visits.reductions:
                problem = self._visit(worker, code)
            elif code < step:
                problem = self._sum(worker, code)
            elif code == step:
                problem = "must come last, and once" if at < len(program) - 1 else ""
            elif code < visits.pieces:
                problem = self._eager(worker, code - visits.eager)
            else:
                problem = self._part(worker, code)
            if problem:
                raise self._wrong(worker, at, program, problem)
        if not program or program[-1] != step:
            raise self._wrong(worker, len(program) - 1, program, "the program must end with STEP")
        if unsummed := sorted(self.reductions[worker]):
            spans = [visits.buckets[code - visits.reductions] for code in unsummed]
            spans_text = f"blocks {[(one.first, one.last) for one in spans]} not reduced"
            raise self._wrong(worker, len(program) - 1, program, spans_text)

    def _sum(self, worker: int, code: int) -> str:
        """Return why ``worker`` cannot sum this bucket here; or count it as done, and return ""."""
        if code not in self.reductions[worker]:
            return NO_BLOCK
        self.reductions[worker].remove(code)
        bucket = self.visits.buckets[code - self.visits.reductions]
        self.summed[worker] |= (1 << bucket.last) - (1 << bucket.first)
        return ""

    def _visit(self, worker: int, code: int) -> str:
        """Return why ``worker`` cannot run this instruction of a visit here; or count it as done, and return ""."""
        visits, left, (visit, kind) = self.visits, self.left, (code >> 3, code & 7)
        does, still = _DOES[kind], left[visit]
        if still & does != does or still & _AFTER[kind] or visits.worker[visit] != worker:
            return self._out_of_turn(worker, code)
        left[visit] = still & ~does
        if kind >= SEND_FORWARD:
            self._message(worker, visit, kind)
        elif does & 1 << WEIGHT_GRAD:
            if visit in self.parts:
                return f"layer(s) {list(range(visits.first[visit], visits.last[visit]))} twice"
            if self.summed[worker] and self.summed[worker] & self._layers(
                visits.first[visit], visits.last[visit]
            ):
                return SUMMED_BEFORE
        return BEHIND_SUMS if self.summed[worker] and kind != WEIGHT_GRAD else ""

    def _part(self, worker: int, code: int) -> str:
        """Return why ``worker`` cannot do this part of a weight gradient here; or count it as done, and return ""."""
        visit, first, last = self.visits.span_of_piece(code)
        whole = visit * 8 + WEIGHT_GRAD
        before, now = self.parts.get(visit, 0), (1 << last) - (1 << first)
        still, mine = self.left[visit], self.visits.worker[visit] == worker
        if not mine or not still & _DOES[WEIGHT_GRAD] or still & _AFTER[WEIGHT_GRAD]:
            return self._out_of_turn(worker, whole)
        if before & now:
            return f"layer(s) {list(range(first, last))} twice"
        if self.summed[worker] and self.summed[worker] & self._layers(first, last):
            return SUMMED_BEFORE
        self.parts[visit] = before | now
        if before | now == (1 << self.visits.last[visit]) - (1 << self.visits.first[visit]):
            self.left[visit] = still & ~_DOES[WEIGHT_GRAD]
        return ""

    def _eager(self, worker: int, visit: int) -> str:
        """Return why ``worker`` cannot run ``visit`` ahead here; "" if it can."""
        visits = self.visits
        holders = visits.layout.holders[visits.first[visit] : visits.last[visit]]
        if worker == visits.worker[visit] or not all(worker in held for held in holders):
            return "run ahead by a worker that is no other holder of these layers"
        if (worker, visit) in self.ahead:
            return "run ahead twice"
        if self.summed[worker]:
            return "run ahead behind a reduction, when it can save nothing any more"
        own = visit - 1
        if visits.first[visit] and (visits.worker[own] != worker or self.left[own] & 1 << FORWARD):
            return "run ahead without its input, which this worker must have made itself before"
        self.ahead.add((worker, visit))
        return ""

    def _message(self, worker: int, visit: int, kind: int) -> None:
        if kind == SEND_FORWARD:
            self.sent[worker, self.visits.behind[visit]].append((visit + 1) * 8 + RECV_FORWARD)
        elif kind == SEND_BACKWARD:
            self.sent[worker, self.visits.before[visit]].append((visit - 1) * 8 + RECV_BACKWARD)
        elif kind == RECV_FORWARD:
            self.received[self.visits.before[visit], worker].append(visit * 8 + kind)
        else:
            self.received[self.visits.behind[visit], worker].append(visit * 8 + kind)

    def _layers(self, first: int, last: int) -> int:
        """Return layers ``[first, last)`` as bits, with the tied weight if embedding or head is among them."""
        own, layout = (1 << last) - (1 << first), self.visits.layout
        ends = 1 | 1 << layout.num_layers - 1
        return own | 1 << layout.num_layers if layout.tied and own & ends else own

    def _wrong(self, worker: int, at: int, program: list[int], problem: str) -> ScheduleInvalid:
        return ScheduleInvalid(where(worker, at, self.visits.decode(program)) + problem)

    def _out_of_turn(self, worker: int, code: int) -> str:
        """Return why an instruction cannot come here."""
        visits, visit, kind = self.visits, code >> 3, code & 7
        layers = list(range(visits.first[visit], visits.last[visit]))
        if visits.worker[visit] != worker:
            return f"microbatch {visits.microbatch[visit]} is not routed through these layers here"
        if self.left[visit] & _DOES[kind] != _DOES[kind]:
            if kind < SEND_FORWARD:
                return f"layer(s) {layers} twice"
            if kind == SEND_FORWARD:
                return f"twice on channel {OPS[kind].value} {worker}>{visits.behind[visit]}"
            return f"twice on the channel of {OPS[kind].value}, or nothing crosses here"
        if kind >= SEND_FORWARD:
            return "sent before it is computed"
        if self.left[visit] & _AFTER[kind] & _bits(RECV_FORWARD, RECV_BACKWARD):
            return "its input was not received before"
        return f"layer(s) {layers} before what they depend on"

    def channels(self) -> None:
        """Check that both ends of each channel have the same messages in the same order."""
        for key in sorted(self.sent.keys() | self.received.keys()):
            ours, theirs = self.sent[key], self.received[key]
            if ours != theirs:
                at = next(
                    (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                    min(len(ours), len(theirs)),
                )
                sender, receiver = key
                raise ScheduleInvalid(
                    f"channel {sender}>{receiver}: message {at} is "
                    f"{self._named(ours[at : at + 3])}… at the sender and "
                    f"{self._named(theirs[at : at + 3])}… at the receiver"
                )

    def _named(self, receives: list[int]) -> str:
        return " ".join(map(str, self.visits.decode(receives))) or "none"

    def complete(self) -> None:
        """Check that no instruction of any visit is missing."""
        for visit, still in enumerate(self.left):
            if still:
                kind = next(kind for kind in range(8) if still >> kind & 1)
                raise ScheduleInvalid(
                    f"microbatch {self.visits.microbatch[visit]}: {OPS[kind].value} is missing for layer(s) "
                    f"{list(range(self.visits.first[visit], self.visits.last[visit]))}"
                )
