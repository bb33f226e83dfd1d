"""Who was itself not running cannot say that others are silent.

A process that is stopped, or whose host is suspended, finds on waking that everybody has been silent for long: nothing
of that is known. It shows as a gap between two of its own looks.
"""

from __future__ import annotations


class Awake:
    """Since when the caller has looked without a gap. One who waits for signs of life gives time again after each."""

    def __init__(self, limit_s: float):
        """``limit_s``: how long a silence may last. Looks are to come several times in that time."""
        self._gap_s = limit_s / 2
        self._looked_s = self._since_s = -float("inf")

    def since_s(self, now_s: float) -> float:
        """Silence counts from here on. Call it with each look."""
        if now_s - self._looked_s > self._gap_s:
            self._since_s = now_s
        self._looked_s = now_s
        return self._since_s
