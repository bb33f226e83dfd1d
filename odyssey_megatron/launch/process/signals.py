"""Signals that ask a job to end, sent to an agent alone or with its ranks: SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2.

The first signal asks the job to do what ``--odyssey-on-sigterm`` says; the next one ends it at once. A rank that alone
is sent a signal dies of it, as of anything else. Batch systems signal all processes of a node, though: a rank whose
agent receives a signal at the same moment leaves the reaction to the agent.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from odyssey_megatron.cluster.events import Ask

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The last two come from batch systems some time ahead of a limit (Slurm's ``--signal=USR1@120``)."""
_LEFT_TO_AGENT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SAME_S = 0.3
"""Signals within this time of one that counts do not: a terminal and a launcher above this one may both send theirs."""
_TOGETHER_S = 1.0
"""Time within which the signal of a batch system has reached the agent, too."""


def not_ignored(names: str) -> str:
    """Return those of the comma-separated signal ``names`` that are not ignored, e.g. by nohup."""
    kept = [name for name in names.split(",") if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]
    return ",".join(kept)


@contextmanager
def heeded_behind() -> Iterator[None]:
    """Defer signals in the body, which the main thread runs: after it the first is given to its handler.

    This is for imports: torch catches whatever is raised while it imports numpy, and would go on as if nothing had
    happened. It is also for starting processes: an exception would leave processes that nothing knows of. Signals that
    are ignored, or end the process by default, are not deferred.
    """
    handlers = {one: signal.getsignal(one) for one in (*HANDLED, signal.SIGQUIT)}
    told = list[int]()
    with _noted(
        {one: handler for one, handler in handlers.items() if callable(handler)},
        lambda number, frame: told.append(number),
    ):
        yield
    if told:
        signal.raise_signal(told[0])


@contextmanager
def _noted(handlers: Mapping[signal.Signals, Any], note: Callable[[int, Any], None]) -> Iterator[None]:
    """Have ``note`` handle the signals in the body, and their ``handlers`` again after it."""
    for one in handlers:
        signal.signal(one, note)
    try:
        yield
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)


class Received:
    """The signals that this process, the agent, has received. ``fd`` is readable when there are any."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._new: list[signal.Signals] = []
        self._last_s = -_SAME_S

    @contextmanager
    def handled(self, numbers: Iterable[signal.Signals] = HANDLED) -> Iterator[Received]:
        """Record signals in the body, which the main thread runs; ignored signals stay ignored."""
        before = {one: signal.getsignal(one) for one in numbers}
        with _noted(
            {one: handler for one, handler in before.items() if handler != signal.SIG_IGN}, self._note
        ):
            yield self

    def _note(self, number: int, frame: Any) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s > _SAME_S:
            self._new.append(signal.Signals(number))
            os.eventfd_write(self.fd, 1)
            self._last_s = now_s

    @property
    def pending(self) -> bool:
        return bool(self._new)

    def take(self) -> list[signal.Signals]:
        """Return the signals that came since the last call."""
        taken, self._new = self._new, []
        if taken:
            os.eventfd_read(self.fd)
        return taken


def leave_to_agent(asked: Callable[[], Ask]) -> None:
    """From now on have SIGTERM, SIGUSR1 and SIGUSR2 end this rank only if its agent is not ``asked`` to end at the same
    moment.

    To be called in the main thread. A handler that the script has installed for one of the last two stays, and one that
    it installs afterwards for any of them replaces this one.
    """
    ours, theirs = socket.socketpair()
    for one in (ours, theirs):
        one.setblocking(one is theirs)

    def handler(number: int, frame: Any) -> None:
        """Do nothing: the thread below reacts, as the main thread may be within a collective for long."""

    def follow() -> None:
        while True:
            (number,) = theirs.recv(1)
            if signal.getsignal(number) is handler:
                ends_s = time.monotonic() + _TOGETHER_S
                while not asked() and time.monotonic() < ends_s:
                    time.sleep(0.01)
                if not asked():
                    _die_of(number)

    caught = _caught()
    for number in _LEFT_TO_AGENT:
        is_free = number not in caught and signal.getsignal(number) == signal.SIG_DFL
        if number == signal.SIGTERM or is_free:
            signal.signal(number, handler)
    signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=follow, args=(), name="odyssey-signals", daemon=True).start()
    # Data loaders are forked, and a fork does not have the thread. They go on at SIGUSR1 and SIGUSR2, like their rank.
    os.register_at_fork(after_in_child=lambda: _as_usual(ours))


def _caught() -> set[int]:
    """Return the signals that this process has a handler for, also those in C that Python does not know
    (faulthandler's).
    """
    status = Path("/proc/self/status").read_text()
    mask = int(re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)[1], 16)  # type: ignore[index]
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def _as_usual(wakeup: socket.socket) -> None:
    signal.set_wakeup_fd(-1)
    wakeup.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _die_of(number: int) -> None:
    """Die as if there were no handler. Python changes handlers only in the main thread, which may not be running."""
    ctypes.CDLL(None).signal(number, None)
    os.kill(os.getpid(), number)
