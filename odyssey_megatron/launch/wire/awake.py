"""Since when a process has been running without a pause: only then can it tell that others are silent.

To a process that was stopped, or whose host was suspended, all others seem to have been silent for long when it wakes,
which may be wrong. The pause shows as a gap between two of its own looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LOOK_S = 0.1
_TELLS_S = 2.0
"""A shorter pause is not told: it may be that of a busy machine."""


class Awake:
    """Tells since when the caller has looked without a gap. After a gap it gives others the full time again."""

    def __init__(self, limit_s: float):
        """``limit_s`` is how long a silence may last. Look several times within it: half of it is a gap."""
        self._gap_s = limit_s / 2
        self._looked_s = self._since_s = -float("inf")

    def since_s(self, now_s: float) -> float:
        """Return the time from which silence counts. Call it with each look."""
        if now_s - self._looked_s > self._gap_s:
            self._since_s = now_s
        self._looked_s = now_s
        return self._since_s


class Pauses:
    """Knows when this process last stood still for longer than ``limit_s``.

    A thread looks that does nothing else. A gap between the looks of another one may be long work.

    Args:
        tell: called in that thread with the seconds that a pause has lasted, if that is more than ``_TELLS_S``.
    """

    def __init__(self, limit_s: float, tell: Callable[[float], None] = lambda lasted_s: None):
        self._limit_s, self._tell = limit_s, tell
        self.lasted_s, self.ended_s = 0.0, -float("inf")

    def start(self) -> None:
        threading.Thread(target=self._run, name="odyssey-pauses", daemon=True).start()

    def _run(self) -> None:
        looked_s = time.monotonic()
        while True:
            time.sleep(_LOOK_S)
            now_s = time.monotonic()
            self.note(looked_s, now_s)
            looked_s = now_s

    def note(self, looked_s: float, now_s: float) -> None:
        """Take down that two looks in a row were at these times."""
        if now_s - looked_s > self._limit_s:
            self.lasted_s, self.ended_s = now_s - looked_s, now_s
        if now_s - looked_s > _TELLS_S:
            self._tell(now_s - looked_s)
