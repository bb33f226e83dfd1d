"""The ranks of one node, as its agent sees them: which have ended, are silent, or are to be started again."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from odyssey_megatron.cluster.events import Ask, RankDied
from odyssey_megatron.errors import EXIT_BAD_INPUT, EXIT_LEFT_OUT, ConfigError
from odyssey_megatron.launch.agent.respawn import Respawn
from odyssey_megatron.launch.process.heartbeat import HeartbeatBoard
from odyssey_megatron.launch.process.lifeline import exit_code
from odyssey_megatron.launch.process.signals import Received
from odyssey_megatron.launch.process.working import Work
from odyssey_megatron.launch.wire.awake import Awake
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.launch.wire.requests import Request
from odyssey_megatron.launch.wire.verdict import VerdictWatch
from odyssey_megatron.metrics.journal import host_name
from odyssey_megatron.metrics.outlet import say

_KILLED_WITHIN_S = 5.0


@dataclass(slots=True, kw_only=True)
class _Process:
    """One process of a rank, from its start to its end."""

    rank: int
    slot: int
    """Number of the rank on this node; it writes its heartbeat in this slot."""
    handle: Any
    """A ``subprocess.Popen``, or an object with the same methods."""
    incarnation: int
    is_guarded: bool = False
    """Whether a thread waits at its lifeline."""
    fenced_s: float | None = None
    """When it was found to have been silent for too long; None: it has not been."""
    is_moved: bool = False
    """Whether this agent ends it, to start another rank in its slot."""
    is_reported: bool = False
    """Whether the coordinator has been told of its end, or need not be."""
    work: Work | None = None
    """What it does while it is silent."""

    def signal(self, number: signal.Signals) -> None:
        """Send ``number`` to the process and its children (data loaders), which are in its session.

        The session is known by the pid until the process is reaped.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.handle.pid, number)


class Fence:
    """Deals with ranks that have been silent for too long.

    Args:
        hang_s: The longest silence, in seconds.
        works_s: The longest silence of a rank that works all the while (``working.py``).
        kills: Whether such a rank is killed; otherwise it is only reported.
    """

    def __init__(self, hang_s: float, works_s: float, *, kills: bool):
        self.hang_s, self.works_s, self.kills = hang_s, works_s, kills
        self._awake = Awake(hang_s)

    def watched_s(self, now_s: float) -> float:
        """Return how long this process has looked without a gap. To be called with each look."""
        return now_s - self._awake.since_s(now_s)

    def is_due(self, process: _Process, silent_s: float, gave_up: bool, now_s: float) -> bool:
        """Return whether ``process`` has been silent for too long. Call it with each look.

        ``gave_up``: it is silent because it has found its training thread to be stuck.
        """
        if silent_s <= self.hang_s / 2:
            process.work = None
            return False
        process.work = process.work or Work(pid=process.handle.pid, since_s=now_s)
        counted_s = now_s - process.work.since_s
        if silent_s <= self.hang_s or counted_s < self.hang_s / 4:
            return False
        if gave_up or silent_s > self.works_s or not process.work.goes_on(now_s):
            return True
        if counted_s > self.hang_s / 2:  # what it did before does not count for ever
            process.work = None
        return False

    def shut(self, process: _Process, silent_s: float, now_s: float) -> None:
        fate = "it is killed" if self.kills else "with --odyssey recover it would be killed"
        limit_s = self.works_s if silent_s > self.works_s else self.hang_s
        say(f"[odyssey] rank {process.rank} has been silent for {limit_s} s: {fate}")
        process.fenced_s = now_s
        if self.kills:
            process.signal(signal.SIGKILL)


class _Endings:
    """The ends of processes that threads have seen at lifelines; ``fd`` wakes up a poll when there are any."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._seen: queue.SimpleQueue[tuple[_Process, int]] = queue.SimpleQueue()

    def put(self, process: _Process, code: int) -> None:
        """Add the end of ``process`` with exit code ``code``. May be called by any thread."""
        self._seen.put((process, code))
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[tuple[_Process, int]]:
        """Return all ends since the last call."""
        os.eventfd_read(self.fd)
        found = []
        while not self._seen.empty():
            found.append(self._seen.get())
        return found


class Ranks:
    """The processes of this node's ranks. All methods are to be called by one thread."""

    def __init__(
        self,
        control: Control,
        board: HeartbeatBoard,
        signals: Received,
        fence: Fence,
        respawn: Respawn | None,
    ):
        """``respawn`` starts ranks again; None: ranks that have ended are not started again."""
        self._control, self._board, self._fence, self._respawn = control, board, fence, respawn
        self.signals = signals
        self.refused: int | None = None
        """A rank whose process has ended over its input."""
        self._living: dict[int, _Process] = {}
        """The living processes, by pidfd."""
        self._endings = _Endings()
        self._poll = select.poll()
        self._poll.register(self._endings.fd, select.POLLIN)
        self._poll.register(signals.fd, select.POLLIN)

    @property
    def listen(self) -> bool:
        """Whether any living rank has joined the job: otherwise no rank reads what it is asked."""
        return any(self._board.has_begun(one.slot) and not one.is_reported for one in self._living.values())

    def ask(self, what: Ask) -> None:
        """Ask ``what`` of all ranks; none is started again from now on."""
        self._board.ask(what)
        self._respawn = None

    def give_up(self) -> None:
        """Report all living ranks as dead, as they are about to be killed."""
        for one in self._living.values():
            self._report(one, -signal.SIGKILL)

    def add(self, rank: int, slot: int, handle: Any, incarnation: int) -> None:
        """Look after the process ``handle``, which runs as ``rank`` and has its heartbeat in ``slot``.

        Raises:
            OSError: No more files can be open here; the process has been ended.
        """
        try:
            fd = os.pidfd_open(handle.pid)
        except OSError:  # nobody would hear of its end
            handle.kill()
            handle.wait()
            raise
        self._living[fd] = _Process(rank=rank, slot=slot, handle=handle, incarnation=incarnation)
        self._poll.register(fd, select.POLLIN)

    def watch(self, verdict: VerdictWatch, heed: Callable[[], None]) -> None:
        """Report deaths and fence silent ranks until the verdict is there. Raises ControlPlaneLost.

        Args:
            heed: Called several times a second, to handle signals to this process.
        """
        self._poll.register(verdict.fd, select.POLLIN)
        tick_ms = max(1, int(min(self._fence.hang_s / 10, 0.2) * 1e3))
        while not verdict.arrived:
            self._reap(tick_ms, report=True)
            heed()
            self._start_due()
            self._guard_begun()
            self._fence_silent()
        self._poll.unregister(verdict.fd)

    def readmit(self, wanted: Request) -> str:
        """Start a rank again that was given up, since its GPU works again; return what to tell who has asked for it.

        Raises:
            ConfigError: That cannot be.
        """
        if self._respawn is None:
            raise ConfigError(
                "no rank of this node is started any more: the job was asked to end, or is only watched (--odyssey "
                "observe)."
            )
        pids = {one.rank: one.handle.pid for one in self._living.values()}
        lives = wanted.rank in pids
        state = f"rank {wanted.rank} " + (f"is alive (pid {pids[wanted.rank]})" if lives else "has ended")
        rank, slot, says = self._respawn.readmit(wanted.rank, wanted.gpu, state, time.monotonic())
        self._vacate(self._respawn.wanted)
        self._start_due()
        pids = {one.rank: one.handle.pid for one in self._living.values()}
        # Without room for it on this node the log says so, and it is tried again.
        how = f"starts (pid {pids[rank]})" if rank in pids else "is to start as soon as there is room for it"
        return f"rank {rank} {how} on GPU {slot} of {host_name()}; its count of starts begins anew. {says}"

    def drain(self, limit_s: float) -> None:
        """Wait until all ranks have ended, a signal comes or ``limit_s`` is over."""
        ends_s = time.monotonic() + limit_s
        while self._living and not self.signals.pending and (left_s := ends_s - time.monotonic()) > 0:
            self._reap(int(left_s * 1e3) + 1, report=False)

    def end(self, limit_s: float) -> None:
        """End the ranks that still run: by SIGTERM, and by SIGKILL after ``limit_s``."""
        self._board.ask(Ask.NOTHING)  # otherwise ranks would leave SIGTERM to this agent
        for number in (signal.SIGTERM, signal.SIGKILL):
            for one in self._living.values():
                one.signal(number)
                one.signal(signal.SIGCONT)  # a stopped process handles no SIGTERM
            self.drain(limit_s if number == signal.SIGTERM else _KILLED_WITHIN_S)
            self.signals.take()

    def _reap(self, timeout_ms: int, *, report: bool) -> None:
        """Wait for ends for at most ``timeout_ms``; with ``report`` the coordinator is told of them."""
        for fd, _ in self._poll.poll(timeout_ms):
            if fd == self._endings.fd:
                for process, code in self._endings.take():
                    if report:
                        self._report(process, code)
            if fd not in self._living:
                continue
            now_s = time.monotonic()
            process = self._living.pop(fd)
            self._poll.unregister(fd)
            os.close(fd)
            process.signal(signal.SIGKILL)
            code = process.handle.wait()
            if report:
                self._report(process, code)
                if code == EXIT_BAD_INPUT:
                    self.refused = process.rank
                if self._respawn is not None:
                    self._respawn.note_end(process.rank, process.slot, code, now_s)
                    self._vacate(self._respawn.wanted)

    def _vacate(self, slots: set[int]) -> None:
        for one in self._living.values():
            if one.slot in slots:
                one.is_moved = True
                one.signal(signal.SIGKILL)

    def _start_due(self) -> None:
        """Start the processes that are due in the place of dead ones."""
        if self._respawn is None:
            return
        for rank, slot in self._respawn.due(now_s := time.monotonic()):
            self._board.vacate(slot)
            try:
                self.add(rank, slot, *self._respawn.start(rank, slot))
            except OSError as error:  # the ranks that train need this process
                self._respawn.put_off(rank, slot, error, now_s)

    def _report(self, process: _Process, code: int) -> None:
        if process.is_reported:  # its lifeline was faster
            return
        process.is_reported = True
        if self._respawn is None or not self._respawn.unmissed(process.rank, code):
            ended = "killed" if code < 0 else "corrupt" if code == EXIT_LEFT_OUT else "exit"
            cause = "hang" if self._fence.kills and process.fenced_s is not None else ended
            cause = "moved" if process.is_moved and code == -signal.SIGKILL else cause
            died = RankDied(rank=process.rank, code=code, cause=cause, incarnation=process.incarnation)
            self._control.send(died)

    def _guard_begun(self) -> None:
        """Start a thread at the lifeline of each rank that has taken its lifeline by now."""
        for one in self._living.values():
            if not one.is_guarded and self._board.has_begun(one.slot):
                name = f"odyssey-rank{one.rank}"
                thread = threading.Thread(target=self._await_end, args=(one,), name=name, daemon=True)
                # Without room for one more thread its pidfd alone reports its end.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    one.is_guarded = True

    def _await_end(self, process: _Process) -> None:
        self._board.await_end(process.slot)
        code = exit_code(process.handle.pid)
        if code is not None:  # otherwise its pidfd will report the end
            self._endings.put(process, code)

    def _fence_silent(self) -> None:
        now_s = time.monotonic()
        watched_s = self._fence.watched_s(now_s)
        for one in self._living.values():
            silent_s = min(self._board.silent_s(one.slot, now_s), watched_s)
            gave_up = self._board.gave_up(one.slot)
            if one.fenced_s is None and self._fence.is_due(one, silent_s, gave_up, now_s):
                self._fence.shut(one, silent_s, now_s)
            elif self._fence.kills and one.fenced_s is not None and now_s - one.fenced_s > _KILLED_WITHIN_S:
                # It is in a system call that no signal ends. It will do nothing more, so the others need not wait.
                self._report(one, -signal.SIGKILL)
