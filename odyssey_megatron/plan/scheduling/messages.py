"""The pass that inserts sends and receives into the workers' compute orders."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush
from itertools import islice

from odyssey_megatron.errors import ScheduleInvalid
from odyssey_megatron.plan.scheduling.visits import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
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


def with_messages(programs: Codes, visits: Visits) -> Codes:
    """Return ``programs`` with sends right after their producers, and receives before their consumers.

    At least one compute instruction stands between a receive and its consumer, if there is one. A channel (sender,
    receiver) is FIFO, as NCCL's are, so a message that is needed late may have to be received early.

    There is one order of all computations and messages (:func:`_turns`), to which every program keeps: a receive stands
    after what happens before the previous message of its channel is through, and before what happens after its own is
    through. So whatever has its turn waits for nothing that comes later, and nobody waits for ever, not even on a
    device that begins an operation only when all operations given to it before have begun (``plan/checking/queue.py``).

    An operation that has begun and waits occupies a place on its device. Two places are enough: messages stand in the
    order in which they are through, except for receives of one channel that are posted ahead of the next consumer. So
    both ends of the first message that is not through find at most one other message in their places.
    """
    return with_turns(programs, visits)[0]


def with_turns(programs: Codes, visits: Visits) -> tuple[Codes, list[int]]:
    """Return :func:`with_messages`, and the turn of each compute instruction in the one order of all, by its code."""
    turns, sent = _turns(programs, visits)
    of = {worker: [turns[code] for code in program] for worker, program in programs.items()}
    place = [-1] * visits.reductions
    for program in programs.values():
        for at, code in enumerate(program):
            place[code] = at
    posts: dict[int, list[tuple[int, int, int]]] = {worker: [] for worker in programs}
    for (_, receiver), receives in sent.items():
        own = of[receiver]
        latest, previous = len(own), list[tuple[int, int, int]]()
        for receive in reversed(receives):
            turn = turns[receive]
            consumer = place[_consumer(receive, place)]
            latest = min(latest, max(0, consumer - 1), bisect_left(own, turn))
            previous.append((latest, turn, receive))
        before = -1
        for at, turn, receive in reversed(previous):
            posts[receiver].append((max(at, bisect_left(own, before)), turn, receive))
            before = turn
    merged = {
        worker: _merged(program, sorted(posts[worker]), turns, visits) for worker, program in programs.items()
    }
    return merged, turns


def _consumer(receive: int, place: list[int]) -> int:
    """Return the compute instruction that waits for ``receive``."""
    visit = receive & ~7
    if receive & 7 == RECV_FORWARD:
        return visit + FORWARD
    return visit + INPUT_GRAD if place[visit + INPUT_GRAD] >= 0 else visit + BACKWARD


def _merged(
    program: list[int], posts: list[tuple[int, int, int]], turns: list[int], visits: Visits
) -> list[int]:
    """Return ``program`` with its sends and receives.

    Each of ``posts`` is (place, turn, receive): the receive goes before the instruction at that place, and also before
    the send of the previous instruction's result if that message is through later.
    """
    out, at, posts = list[int](), 0, [*posts, (len(program) + 1, 0, 0)]
    before, behind = visits.before, visits.behind
    for here, code in enumerate(program):
        while posts[at][0] <= here:
            out.append(posts[at][2])
            at += 1
        out.append(code)
        kind = code & 7
        if kind == WEIGHT_GRAD or (behind if kind == FORWARD else before)[code >> 3] < 0:
            continue
        send, arrives = (SEND_FORWARD, TO_NEXT) if kind == FORWARD else (SEND_BACKWARD, TO_PREVIOUS)
        send += code - kind
        while posts[at] < (here + 1, turns[send + arrives]):
            out.append(posts[at][2])
            at += 1
        out.append(send)
    return out


def _turns(programs: Codes, visits: Visits) -> tuple[list[int], dict[tuple[int, int], list[int]]]:
    """Find one order of all compute instructions: that in which they would begin if each layer took a second.

    Returns:
        A list by code: the turn of each compute instruction; and for each receive the turn before which its message is
        through, that of the instruction that needs it or of the sender's next one, whichever is first. And for each
        channel its receives, in the order of their sends.
    """
    turn, turns, given = (
        0,
        [-1] * (visits.reductions + 1),
        dict[int, int](),
    )  # the last entry is for the code -1: nothing
    sent: dict[tuple[int, int], list[int]] = {}
    arrival: dict[int, int] = {-1: 0}
    asleep: dict[int, tuple[int, int, int]] = {}
    left = {worker: iter(program) for worker, program in programs.items()}
    # Of instructions that begin at the same time the one on lower layers is first, whatever its worker's number.
    ready = [
        (0, visits.first[code >> 3], worker, code) for worker in programs for code in islice(left[worker], 1)
    ]
    while ready:
        start, layer, worker, code = heappop(ready)
        needed = _input(code, visits)
        if needed not in arrival:
            asleep[needed] = layer, worker, code
            continue
        if arrival[needed] > start:
            heappush(ready, (arrival[needed], layer, worker, code))
            continue
        turns[code] = turn
        for one in (needed, given.pop(worker, -1)):
            turns[one] = turn if turns[one] < 0 else turns[one]
        turn += 1
        visit = code >> 3
        end = start + (visits.last[visit] - visits.first[visit]) * (2 if code & 7 == BACKWARD else 1)
        peer, receive = _output(code, visits)
        if peer >= 0:
            arrival[receive], given[worker] = end, receive
            sent.setdefault((worker, peer), []).append(receive)
            if receive in asleep:
                heappush(ready, (end, *asleep.pop(receive)))
        for following in islice(left[worker], 1):
            heappush(ready, (end, visits.first[following >> 3], worker, following))
    if asleep:
        raise ScheduleInvalid(
            "the workers' compute orders wait for each other in a circle: a bug of the generator"
        )
    return turns, sent


def _output(code: int, visits: Visits) -> tuple[int, int]:
    """Return the worker that gets an instruction's result (-1: nobody), and the receive by which it does."""
    visit, kind = code >> 3, code & 7
    if kind == FORWARD:
        return visits.behind[visit], (visit + 1) * 8 + RECV_FORWARD
    return (visits.before[visit] if kind != WEIGHT_GRAD else -1), (visit - 1) * 8 + RECV_BACKWARD


def _input(code: int, visits: Visits) -> int:
    """Return the receive that a compute instruction waits for; -1 if none."""
    kind = code & 7
    if kind == FORWARD:
        return code - FORWARD + RECV_FORWARD if visits.before[code >> 3] >= 0 else -1
    return code - kind + RECV_BACKWARD if kind != WEIGHT_GRAD and visits.behind[code >> 3] >= 0 else -1
