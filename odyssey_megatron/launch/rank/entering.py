"""Which of the generations that a rank hears of it enters next."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

from odyssey_megatron.errors import ControlPlaneLost, Fenced, JobStopped, Superseded
from odyssey_megatron.launch.rank.watch import Watch
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire import generations
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.plan.sending.generation import Finished, Generation, Stop

_RETRY_AFTER_S, _LOOK_S = 0.5, 0.01
_ASKS_EACH_S = 1.0
"""How often a rank that waits for a generation asks whether the store answers. An answer that takes longer shows that
the process of the store and the coordinator stood still; a turn of waiting and asking that takes twice as long, that
this process did, and maybe the whole job with it.
"""


class Role(enum.Enum):
    """The part that a process has in a generation."""

    MEMBER = "member"
    WAITS = "waits"
    """It holds no state yet. A recovery goes on without it, and it is offered a place afterwards."""
    LEFT = "left"
    """It is no longer a member: declared dead, or slow and replaced, or its cell has lost a rank or is to be whole."""
    REPLACED = "replaced"
    """Another process has taken its rank by now."""


def part_in(generation: Generation, rank: int, incarnation: int) -> Role:
    """Return the part that process number ``incarnation`` of ``rank`` has in ``generation``."""
    if dict(generation.incarnations).get(rank, 0) != incarnation:
        return Role.REPLACED
    if rank in generation.members:
        return Role.MEMBER
    return Role.WAITS if rank in generation.fresh else Role.LEFT


def concerns(offered: Generation, rank: int, incarnation: int) -> bool:
    """Whether this process takes part in preparing an ``offered`` generation.

    It does so also if it leaves with it between two steps: all current members agree on when that is.
    """
    return part_in(offered, rank, incarnation) in (Role.MEMBER, Role.LEFT)


def why_without(generation: Generation, rank: int, incarnation: int) -> str:
    """Return why ``generation`` goes on without process number ``incarnation`` of ``rank``."""
    if part_in(generation, rank, incarnation) is Role.REPLACED:
        return "another process has taken its place"
    if generation.planned:  # it may have left before, with one that it has missed
        return f"it began between two steps, for this reason: {generation.why}"
    if rank in generation.dead:
        return (
            f"rank(s) {list(generation.dead)} were declared dead; the log of the job's host says of which causes, at "
            "event=failure_detected"
        )
    return "it was declared dead before, or has left between two steps"


class Entering:
    """Waits for the generations that one process enters.

    Args:
        ask_retry: called with a generation's number and a reason, to ask for the next one.
        fenced: called with number and reason of the generation that goes on without this rank, or of the job's end.
        first_within_s: how long to wait for the first generation.
        next_within_s: how long to wait for each later one.
    """

    def __init__(
        self,
        *,
        rank: int,
        incarnation: int,
        control: Control,
        watch: Watch,
        ask_retry: Callable[[int, str], None],
        fenced: Callable[[int, str], None],
        first_within_s: float,
        next_within_s: float,
    ):
        self._rank, self._incarnation, self._control, self._watch = rank, incarnation, control, watch
        self._ask_retry, self._fenced = ask_retry, fenced
        self._first_within_s, self._next_within_s = first_within_s, next_within_s

    def next_generation(self, after: int, timeout_s: float | None = None, *, why: str = "") -> Generation:
        """See ``Member.next_generation``."""
        if not self._watch.settled:
            return self._offered_after(after)
        if timeout_s is None:
            timeout_s = self._next_within_s if after else self._first_within_s
        message = None
        while message is None:
            self.await_newer(after, why, timeout_s)
            after, text = self._watch.newest()
            message = generations.read(text, self._rank, self._control)
        if isinstance(message, Stop):
            raise JobStopped(message.why, message.code)
        if isinstance(message, Finished):
            self._fenced(message.number, "finished")
            raise Fenced(f"the job has finished without rank {self._rank}, which was not in it any more")
        match part_in(message, self._rank, self._incarnation):
            case Role.MEMBER:
                return message
            case Role.WAITS:
                self._watch.settled = False
                return self._offered_after(message.number)
        raise self._left_behind(message)

    def await_newer(self, after: int, why: str, timeout_s: float | None = None) -> None:
        """Wait for a generation after ``after``, and ask for one if none comes soon; the first is not asked for.

        If the coordinator's process or this one stood still meanwhile, the coordinator has the full time again. Raises
        ControlPlaneLost if none comes in time, or if the store is gone.
        """
        timeout_s = self._next_within_s if timeout_s is None else timeout_s
        turn_s = time.monotonic()
        ends_s = turn_s + timeout_s
        if after and not self._watch.await_newer(after, min(_RETRY_AFTER_S, timeout_s)):
            self._ask_retry(after, why or f"no newer generation within {_RETRY_AFTER_S} s")
        while not self._watch.await_newer(after, min(_ASKS_EACH_S, max(ends_s - time.monotonic(), 0.0))):
            asked_s = time.monotonic()
            self._control.has([keys.JOB_NAME])  # this waits for an answer
            now_s = time.monotonic()
            if now_s - asked_s > _ASKS_EACH_S or now_s - turn_s > 2 * _ASKS_EACH_S:
                ends_s = now_s + timeout_s
            elif now_s >= ends_s:
                raise ControlPlaneLost(f"no generation after {after} within {timeout_s:.1f} s")
            turn_s = now_s

    def let_in(self, generation: Generation) -> None:
        """Let the ranks go on that join with offered ``generation``, which this older member has entered.

        The lowest of the older members does so for all of them.
        """
        if self._rank == min({*generation.members} - {*generation.fresh}):
            self._control.put(keys.entered_key(generation.number), "")

    def await_others(self, number: int) -> None:
        """Wait, as a rank that joins with offered generation ``number``, until the others have entered it, too.

        They may first finish a step, an evaluation and a checkpoint, which can take longer than any timeout of groups.

        Raises:
            Superseded: the generation has come to nothing.
        """
        while not self._control.has([keys.entered_key(number)]):
            if self._watch.await_end(number, _LOOK_S):
                raise Superseded(f"generation {number} has ended")

    def _offered_after(self, seen: int) -> Generation:
        """Wait, without limit, for a generation after ``seen`` in which this process is offered a place."""
        while True:
            seen, text, is_offer = self._watch.await_any(seen)
            message = generations.read(text, self._rank, self._control)
            if isinstance(message, Stop):
                raise JobStopped(message.why, message.code)
            if isinstance(message, Finished):
                raise JobStopped("the job finished first", 0)
            if message is None:
                continue
            part = part_in(message, self._rank, self._incarnation)
            if part is Role.MEMBER:
                self._watch.take_offer(message.number)
                return message
            if not is_offer and part is not Role.WAITS:
                raise self._left_behind(message)

    def _left_behind(self, generation: Generation) -> Fenced:
        self._fenced(generation.number, generation.why)
        why = why_without(generation, self._rank, self._incarnation)
        return Fenced(f"generation {generation.number} goes on without rank {self._rank}: {why}")
