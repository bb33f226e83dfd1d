"""The newest state of a job, shared by all who look at it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from odyssey_megatron.metrics.follow import Follower
from odyssey_megatron.metrics.live import Live, live
from odyssey_megatron.metrics.run import UNREADABLE, name_of, unreadable

_AT_MOST_EVERY_S = 0.5
_SHARE = 0.05
"""The share of a core that reading may take: a long journal is read less often."""


class Newest:
    """Works out the state when somebody asks, unless it has just been worked out."""

    def __init__(self, run_dir: str | Path):
        """Follow the job of a folder. Raises ConfigError if ``run_dir`` is not a run's folder."""
        self._follower = Follower(run_dir)
        self._name = name_of(self._follower.folder)
        self._lock = threading.Lock()
        self._due_s = 0.0
        self._state: Live | None = None

    def get(self) -> Live:
        """Return the state. While another thread works it out, which may take long, return the one before.

        Raises ConfigError if the journal cannot be read, or is not one.
        """
        if (before := self._state) is not None and self._lock.locked():
            return before
        with self._lock:
            if self._state is None or time.monotonic() >= self._due_s:
                began_s = time.thread_time()
                events, older = self._follower.look()
                try:
                    self._state = live(self._name, events, older)
                except UNREADABLE as error:
                    raise unreadable(self._follower.folder, error) from error
                took_s = time.thread_time() - began_s
                self._due_s = time.monotonic() + max(_AT_MOST_EVERY_S, took_s / _SHARE)
            return self._state
