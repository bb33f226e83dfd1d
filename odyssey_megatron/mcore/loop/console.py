"""Prints the lines that Megatron prints on its last rank, each once, whichever rank is the last one living.

All ranks reach the same lines in the same order. Those that are not the last keep the newest: if the last rank dies
before it prints a line that they have passed already, its successor prints it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable

_KEPT = 2
"""Number of iterations whose lines are kept; no rank is further ahead of the last one."""

Place = tuple[int, int]
"""Position of a line: (number of steps committed before it, number of lines since then). It is the same on every rank,
also on one that has joined late.
"""


class SurvivingLines:
    """The lines of the last living rank.

    Args:
        note: stores the place of the newest printed line for a successor.
        noted: returns what was stored, if anything.
    """

    def __init__(self, note: Callable[[str], None], noted: Callable[[], str | None]):
        self._note, self._noted = note, noted
        self._next: Place = (0, 0)
        self._is_last = False
        self._printed: Place = (-1, 0)
        """Place of the newest line that had been printed when this rank became the last."""
        self._kept: deque[tuple[Place, Callable[[], None]]] = deque()

    def begin(self, committed: int) -> None:
        """Number the following lines from the step count ``committed``."""
        self._next = (committed, 0)
        while self._kept and self._kept[0][0][0] <= committed - _KEPT:
            self._kept.popleft()

    def say(self, line: Callable[[], None]) -> None:
        """Print the next line by calling ``line``, or keep it if this rank is not the last."""
        place, self._next = self._next, (self._next[0], self._next[1] + 1)
        if self._is_last:
            self._print(place, line)
        else:
            self._kept.append((place, line))

    def become_last(self) -> None:
        """Print from now on, beginning with what the predecessor has not printed. A second call does nothing."""
        if self._is_last:
            return
        self._is_last = True
        noted = self._noted()
        self._printed = tuple(json.loads(noted)) if noted else (-1, 0)
        kept, self._kept = self._kept, deque()
        for place, line in kept:
            self._print(place, line)

    def hand_over(self) -> None:
        """Stop printing: another rank is the last one now."""
        self._is_last = False

    def _print(self, place: Place, line: Callable[[], None]) -> None:
        if place > self._printed:
            line()
            self._note(json.dumps(place))
