"""Tell whether a rank's training thread makes progress, as the other threads of its process see it.

A training thread that is stuck, in a read from a file server that does not answer or in a call to its device's driver,
enters no generation. Its process still sends heartbeats, so the others would try again and again to go on with it.
"""

from __future__ import annotations

from odyssey_megatron.launch.awake import Awake

TRIES = 3
"""The number of generations in a row that the training thread must miss. Only those count that others have asked for
because they wait. One that follows a death says nothing, as all ranks may rightly be busy, for instance with a
checkpoint. The limits count from the last of these.
"""

COMPILES_S = 600.0
"""The extra time that an instruction may take in a process's first step, which may compile. Source: torch's limit for
NCCL's collectives, which also covers compiling in jobs without Odyssey (``kProcessGroupNCCLDefaultTimeout``,
ProcessGroupNCCL.hpp).
"""

_FROZEN_S = 5.0
"""Twice the gap between two looks of the watching thread from which on its process counts as stopped meanwhile."""


class Attention:
    """What the training thread did last, and which generations it has missed since.

    Args:
        op_timeout_s: The limit for one instruction of a step, and for a wait for others.
        recovery_timeout_s: How much longer the others wait for a thread that is missing.
        now_s: The time now. All methods use the same clock.
    """

    def __init__(self, op_timeout_s: float, recovery_timeout_s: float, now_s: float):
        self.op_timeout_s, self._recovery_timeout_s = op_timeout_s, recovery_timeout_s
        self._looked_s, self._generation = now_s, 0
        self._works = self._is_warm = False
        self._missed, self._missed_s = 0, now_s
        self._awake = Awake(_FROZEN_S)

    @property
    def limit_s(self) -> float:
        """The time that the current instruction of the training thread may take."""
        return self.op_timeout_s + (0.0 if self._is_warm else COMPILES_S)

    @property
    def longest_s(self) -> float:
        """The time after which a thread that shows no progress is taken for stuck, whatever it was doing."""
        return self.op_timeout_s + self._recovery_timeout_s

    # -- the training thread --------------------------------------------------------------------------------------

    def look(self, generation: int, now_s: float) -> None:
        """Note that the training thread comes to its next instruction, in ``generation``."""
        self._looked_s, self._generation, self._works = now_s, generation, True

    def rest(self, *, behind_step: bool) -> None:
        """Note that it has finished the work in which it called :meth:`look`.

        Args:
            behind_step: Whether that was a whole step. Then nothing is left to compile in later ones.
        """
        self._works, self._is_warm = False, self._is_warm or behind_step

    def heed(self) -> None:
        """Note that it has come for the newest generation, or waits for one."""
        self._works, self._missed = False, 0

    # -- other threads --------------------------------------------------------------------------------------------

    def call(self, now_s: float) -> None:
        """Note that there is a new generation to enter, because some rank waits for others."""
        self._missed += 1
        if self._missed <= TRIES:
            self._missed_s = now_s

    def overdue(self, now_s: float) -> int:
        """Return the generation in which it has spent more than the limit on one instruction of a step. 0: none.

        The limit is longer before its first complete step, as it may be compiling. Time in which the whole process
        stood still does not count.
        """
        late = now_s - max(self._looked_s, self._awake.since_s(now_s)) > self.limit_s
        return self._generation if late and self._works and not self._missed else 0

    def is_lost(self, now_s: float) -> bool:
        """Return whether it is stuck: the others have tried ``TRIES`` times without it, and waited for long since.

        It does not count as stuck before it has been in a generation: it may be reading a checkpoint, or indexing its
        data. The limit is longer where it may compile, or does work of its script, such as writing a checkpoint.
        """
        missing = self._generation > 0 and self._missed >= TRIES
        limit_s = self._recovery_timeout_s if self._works and self._is_warm else self.op_timeout_s
        return missing and now_s - self._missed_s > limit_s and self._silent(now_s)

    def _silent(self, now_s: float) -> bool:
        return now_s - self._looked_s > self.op_timeout_s
