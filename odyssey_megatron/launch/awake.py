"""Notice that this process itself was not running, so that it cannot say that others were silent.

A process that was stopped, or whose host was suspended, finds on waking that everybody seems to have been silent for
long. It knows nothing of that time, which shows as a gap between two of its own looks.
"""

from __future__ import annotations


class Awake:
    """Tells since when the caller has looked without a gap. Silence of others counts only from then on."""

    def __init__(self, limit_s: float):
        """``limit_s``: how long a silence may last. The caller must look several times within it."""
        self._gap_s = limit_s / 2
        self._looked_s = self._since_s = -float("inf")

    def since_s(self, now_s: float) -> float:
        """Return the time from which silence counts. Call it with each look."""
        if now_s - self._looked_s > self._gap_s:
            self._since_s = now_s
        self._looked_s = now_s
        return self._since_s
