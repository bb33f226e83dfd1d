"""Whether a rank's training thread gets on, as the other threads of its process see it.

One that is stuck, in a read from a file server that does not answer or in a call to its device's driver, enters no
generation. Its process beats all the same, and the others would try to go on with it again and again.
"""

from __future__ import annotations

TRIES = 3
"""Generations that the training thread has to miss in a row. One may come while it is rightly busy, as with a
checkpoint; the next ones mean that others are there, and cannot go on without it."""


class Attention:
    """What the training thread did last, and what it has not heeded yet.

    Args:
        op_timeout_s: from one instruction to the next it takes no longer.
        recovery_timeout_s: nor to come to a generation that the others have entered.
        now_s: as below, on one clock.
    """

    def __init__(self, op_timeout_s: float, recovery_timeout_s: float, now_s: float):
        self._op_timeout_s, self._recovery_timeout_s = op_timeout_s, recovery_timeout_s
        self._looked_s, self._generation = now_s, 0
        self._works = self._is_warm = False
        self._missed, self._missed_s = 0, now_s

    # -- the training thread --------------------------------------------------------------------------------------

    def look(self, generation: int, now_s: float) -> None:
        """It comes to its next instruction, in this generation."""
        self._looked_s, self._generation, self._works = now_s, generation, True

    def rest(self) -> None:
        """It is through with a step: how long it does other things is its own affair."""
        self._works, self._is_warm = False, True

    def heed(self) -> None:
        """It has come for the newest generation, or waits for one."""
        self._works, self._missed = False, 0

    # -- other threads --------------------------------------------------------------------------------------------

    def call(self, now_s: float) -> None:
        """There is a new generation to enter."""
        if not self._missed:
            self._missed_s = now_s
        self._missed += 1

    def overdue(self, now_s: float) -> int:
        """The generation in which it has been at one instruction of a step for longer than any may take; 0: none.

        Before it has done a step nothing is: it may be compiling.
        """
        late = self._works and self._is_warm and not self._missed and self._silent(now_s)
        return self._generation if late else 0

    def is_lost(self, now_s: float) -> bool:
        """Whether it is stuck: the others have tried again and again without it, and for long.

        Before it has been in a generation it is not: it may be reading a checkpoint, or making an index of its data.
        """
        missing = self._generation > 0 and self._missed >= TRIES
        return missing and now_s - self._missed_s > self._recovery_timeout_s and self._silent(now_s)

    def _silent(self, now_s: float) -> bool:
        return now_s - self._looked_s > self._op_timeout_s
