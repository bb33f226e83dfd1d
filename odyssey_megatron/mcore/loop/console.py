"""The lines that Megatron prints on its last rank, each once, whichever rank is the last one living.

All ranks come by the same lines in the same order. Those that are not the last keep the newest: if the last one dies on
its way to a line that they have come by already, its successor prints it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable

_KEPT = 2
"""Iterations; nobody is further ahead of the last rank."""

Place = tuple[int, int]
"""Of a line: (steps committed before it, number among the lines since then). The same on every rank, also on one that
has joined late."""


class SurvivingLines:
    """Args:
    note: leaves the place of the newest line printed for whoever comes next.
    noted: what was left, if anything.
    """

    def __init__(self, note: Callable[[str], None], noted: Callable[[], str | None]):
        self._note, self._noted = note, noted
        self._next: Place = (0, 0)
        self._is_last = False
        self._printed: Place = (-1, 0)
        """The newest line that was out when this rank became the last."""
        self._kept: deque[tuple[Place, Callable[[], None]]] = deque()

    def begin(self, committed: int) -> None:
        """So many steps are committed: what is printed from now on belongs behind them."""
        self._next = (committed, 0)
        while self._kept and self._kept[0][0][0] <= committed - _KEPT:
            self._kept.popleft()

    def say(self, line: Callable[[], None]) -> None:
        """``line`` prints the next line."""
        place, self._next = self._next, (self._next[0], self._next[1] + 1)
        if self._is_last:
            self._print(place, line)
        else:
            self._kept.append((place, line))

    def become_last(self) -> None:
        """From now on this rank prints, beginning with what its predecessor has not. A second call does nothing."""
        if self._is_last:
            return
        self._is_last = True
        noted = self._noted()
        self._printed = tuple(json.loads(noted)) if noted else (-1, 0)
        kept, self._kept = self._kept, deque()
        for place, line in kept:
            self._print(place, line)

    def hand_over(self) -> None:
        """Another rank is the last one now."""
        self._is_last = False

    def _print(self, place: Place, line: Callable[[], None]) -> None:
        if place > self._printed:
            line()
            self._note(json.dumps(place))
