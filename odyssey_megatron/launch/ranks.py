"""The ranks of one node, as its agent sees them: who has ended, who is silent, who is to be started again."""

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
from odyssey_megatron.errors import EXIT_LEFT_OUT
from odyssey_megatron.launch.awake import Awake
from odyssey_megatron.launch.control import Control
from odyssey_megatron.launch.heartbeat import HeartbeatBoard
from odyssey_megatron.launch.lifeline import exit_code
from odyssey_megatron.launch.respawn import Respawn
from odyssey_megatron.launch.signals import Received
from odyssey_megatron.launch.verdict import VerdictWatch
from odyssey_megatron.metrics.outlet import say

_KILLED_WITHIN_S = 5.0


@dataclass(slots=True, kw_only=True)
class _Process:
    """Of one rank, from its start to its end."""

    rank: int
    slot: int
    """Its number on this node, by which it beats."""
    handle: Any
    """A ``subprocess.Popen``, or what stands for one."""
    incarnation: int
    is_guarded: bool = False
    """A thread waits at its lifeline."""
    fenced_s: float | None = None
    """When it had been silent for too long."""
    is_reported: bool = False
    """The coordinator has been told of its end, or need not be."""

    def signal(self, number: signal.Signals) -> None:
        """It, and its own children (data loaders): they are in its session, known by its pid until it is reaped."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.handle.pid, number)


class Fence:
    """Which ranks have been silent for too long.

    Args:
        hang_s: how long that is.
        kills: such a rank is killed; else that is only said.
    """

    def __init__(self, hang_s: float, *, kills: bool):
        self.hang_s, self.kills = hang_s, kills
        self._awake = Awake(hang_s)

    def watched_s(self, now_s: float) -> float:
        """For so long this process has looked without a gap. Call it with each look."""
        return now_s - self._awake.since_s(now_s)

    def shut(self, process: _Process, now_s: float) -> None:
        fate = "it is killed" if self.kills else "with --odyssey recover it would be killed"
        say(f"[odyssey] rank {process.rank} has been silent for {self.hang_s} s: {fate}")
        process.fenced_s = now_s
        if self.kills:
            process.signal(signal.SIGKILL)


class _Endings:
    """Ends that threads have seen at lifelines, for a poll to wake up from."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._seen: queue.SimpleQueue[tuple[_Process, int]] = queue.SimpleQueue()

    def put(self, process: _Process, code: int) -> None:
        """Any thread. ``code``: what it has ended with."""
        self._seen.put((process, code))
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[tuple[_Process, int]]:
        """All since the last time."""
        os.eventfd_read(self.fd)
        found = []
        while not self._seen.empty():
            found.append(self._seen.get())
        return found


class Ranks:
    """The processes of this node. All methods are for one thread."""

    def __init__(
        self,
        control: Control,
        board: HeartbeatBoard,
        signals: Received,
        fence: Fence,
        respawn: Respawn | None,
    ):
        """``respawn``: starts ranks again; None: nobody does."""
        self._control, self._board, self._fence, self._respawn = control, board, fence, respawn
        self.signals = signals
        self._living: dict[int, _Process] = {}
        """By pidfd."""
        self._endings = _Endings()
        self._poll = select.poll()
        self._poll.register(self._endings.fd, select.POLLIN)
        self._poll.register(signals.fd, select.POLLIN)

    @property
    def listen(self) -> bool:
        """Whether there are ranks, and any of them has joined the job: else nobody reads what is asked of it."""
        return any(self._board.has_begun(one.slot) and not one.is_reported for one in self._living.values())

    def ask(self, what: Ask) -> None:
        """Of all ranks; none is started again."""
        self._board.ask(what)
        self._respawn = None

    def give_up(self) -> None:
        """Reports all of them as dead, who are to be killed."""
        for one in self._living.values():
            self._report(one, -signal.SIGKILL)

    def add(self, rank: int, slot: int, handle: Any, incarnation: int) -> None:
        """The process ``handle`` runs as ``rank``, and beats in ``slot``."""
        fd = os.pidfd_open(handle.pid)
        self._living[fd] = _Process(rank=rank, slot=slot, handle=handle, incarnation=incarnation)
        self._poll.register(fd, select.POLLIN)

    def watch(self, verdict: VerdictWatch, heed: Callable[[], None]) -> None:
        """Reports deaths and fences the silent until the verdict is there. Raises ControlPlaneLost.

        Args:
            heed: is called several times a second, for signals to this process.
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

    def drain(self, limit_s: float) -> None:
        """Waits until all have ended, at most ``limit_s``, or until a signal comes."""
        ends_s = time.monotonic() + limit_s
        while self._living and not self.signals.pending and (left_s := ends_s - time.monotonic()) > 0:
            self._reap(int(left_s * 1e3) + 1, report=False)

    def end(self, limit_s: float) -> None:
        """Ends those that still run: politely, for at most ``limit_s``."""
        self._board.ask(Ask.NOTHING)  # or SIGTERM would be left to this agent
        for number in (signal.SIGTERM, signal.SIGKILL):
            for one in self._living.values():
                one.signal(number)
                one.signal(signal.SIGCONT)  # one that is stopped hears nothing
            self.drain(limit_s if number == signal.SIGTERM else _KILLED_WITHIN_S)
            self.signals.take()

    def _reap(self, timeout_ms: int, *, report: bool) -> None:
        """Waits for ends, at most so long; ``report``: the coordinator hears of them."""
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
                if self._respawn is not None:
                    self._respawn.note_end(process.rank, process.slot, code, now_s)
                    self._vacate(self._respawn.wanted)

    def _vacate(self, slots: set[int]) -> None:
        for one in self._living.values():
            if one.slot in slots:
                one.signal(signal.SIGKILL)

    def _start_due(self) -> None:
        """Processes in the place of those that have died."""
        if self._respawn is None:
            return
        for rank, slot in self._respawn.due(time.monotonic()):
            self._board.vacate(slot)
            self.add(rank, slot, *self._respawn.start(rank, slot))

    def _report(self, process: _Process, code: int) -> None:
        if process.is_reported:  # its lifeline was faster
            return
        process.is_reported = True
        if self._respawn is None or not self._respawn.unmissed(process.rank, code):
            ended = "killed" if code < 0 else "corrupt" if code == EXIT_LEFT_OUT else "exit"
            cause = "hang" if self._fence.kills and process.fenced_s is not None else ended
            died = RankDied(rank=process.rank, code=code, cause=cause, incarnation=process.incarnation)
            self._control.send(died)

    def _guard_begun(self) -> None:
        """A thread on the lifeline of each rank that has one by now."""
        for one in self._living.values():
            if not one.is_guarded and self._board.has_begun(one.slot):
                one.is_guarded = True
                name = f"odyssey-rank{one.rank}"
                threading.Thread(target=self._await_end, args=(one,), name=name, daemon=True).start()

    def _await_end(self, process: _Process) -> None:
        self._board.await_end(process.slot)
        code = exit_code(process.handle.pid)
        if code is not None:  # else its pidfd will tell
            self._endings.put(process, code)

    def _fence_silent(self) -> None:
        now_s = time.monotonic()
        watched_s = self._fence.watched_s(now_s)
        for one in self._living.values():
            silent_s = min(self._board.silent_s(one.slot, now_s), watched_s)
            if one.fenced_s is None and silent_s > self._fence.hang_s:
                self._fence.shut(one, now_s)
            elif self._fence.kills and one.fenced_s is not None and now_s - one.fenced_s > _KILLED_WITHIN_S:
                # In a call to the kernel that no signal ends. It will do nothing more, and the others need not wait.
                self._report(one, -signal.SIGKILL)
