"""How its agent sees that a rank is alive and gets on, and what the agent asks of it meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from odyssey_megatron.cluster.events import Ask
from odyssey_megatron.errors import ControlPlaneLost, Fenced
from odyssey_megatron.launch.process.heartbeat import Heartbeat
from odyssey_megatron.launch.rank.attention import Attention
from odyssey_megatron.launch.rank.reports import Reports
from odyssey_megatron.launch.rank.watch import Watch


class Liveness:
    """One rank's signs of life, which go on as long as its main thread makes progress. Methods are for that thread.

    Args:
        heartbeat: None where no agent watches this rank.
    """

    def __init__(
        self, *, rank: int, heartbeat: Heartbeat | None, attention: Attention, watch: Watch, reports: Reports
    ):
        self._rank, self._heartbeat, self._attention = rank, heartbeat, attention
        self._watch, self._reports = watch, reports
        self._leaves, self._overdue = False, 0
        """The last generation that was asked to end because this rank's main thread is stuck at an instruction."""
        if heartbeat is not None:
            heartbeat.may_beat = self._gets_on

    @property
    def asked(self) -> Ask:
        """What this node's agent asks of its ranks after it was sent a signal. Only reads shared memory."""
        return Ask.NOTHING if self._heartbeat is None else self._heartbeat.asked

    def excused(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank is never taken for hung, for compiled code that keeps the GIL.

        Its death is noticed all the same.
        """
        return contextlib.nullcontext() if self._heartbeat is None else self._heartbeat.excused()

    def rest(self, *, behind_step: bool) -> None:
        """Note that the main thread executes no instructions from now on, and may take longer if nobody waits for it.

        ``behind_step`` says that it has just completed a step.
        """
        self._attention.rest(behind_step=behind_step)

    def wait_up_to(self, op_timeout_s: float) -> None:
        """Set how long one instruction may take, where the value of the launch line does not apply."""
        self._attention.op_timeout_s = op_timeout_s

    def leave(self) -> None:
        """Say that this process is about to end as it should."""
        if self._heartbeat is not None:
            self._heartbeat.leave()

    def _gets_on(self) -> bool:
        """Whether the main thread makes progress. If not, this process ends. Runs in the heartbeat's thread."""
        if self.asked == Ask.LEAVE and not self._watch.settled and not self._leaves:
            self._leaves = True
            self._beside(self._leave_while_waiting)
        now_s = time.monotonic()
        if (overdue := self._attention.overdue(now_s)) > self._overdue:
            self._overdue = overdue
            reason = f"one instruction has taken longer than {self._attention.limit_s:g} s there"
            self._beside(lambda: self._ask_for_others(overdue, reason))
        return not self._attention.is_lost(now_s)

    @staticmethod
    def _beside(work: Callable[[], None]) -> None:
        """Run ``work`` in a thread of its own, since the store may not answer, and the heartbeat must go on."""
        with contextlib.suppress(RuntimeError):  # no thread can start while the process ends
            threading.Thread(target=work, name="odyssey-attention", daemon=True).start()

    def _leave_while_waiting(self) -> None:
        self._watch.end(Fenced(f"the node of rank {self._rank} was asked to leave the job"))

    def _ask_for_others(self, number: int, reason: str) -> None:
        with contextlib.suppress(ControlPlaneLost):
            self._reports.ask_retry(number, reason)
