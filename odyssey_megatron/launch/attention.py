"""Whether a rank's training thread gets on, as the other threads of its process see it.

One that is stuck, in a read from a file server that does not answer or in a call to its device's driver, enters no
generation. Its process beats all the same, and the others would try to go on with it again and again.
"""

from __future__ import annotations

from odyssey_megatron.launch.awake import Awake

TRIES = 3
"""Generations that the training thread has to miss in a row, of those that others have asked for as they wait. Deaths
say nothing: all may rightly be busy, as with a checkpoint. The limits count from the last of these.
"""

COMPILES_S = 600.0
"""So much longer an instruction may take in a process's first step. Source: torch's limit for NCCL's collectives, in
which whoever trains without Odyssey has compiled, too (``kProcessGroupNCCLDefaultTimeout``, ProcessGroupNCCL.hpp).
"""

_FROZEN_S = 5.0
"""Twice what lies between two looks of the thread that looks here if its process was stopped in between."""


class Attention:
    """What the training thread did last, and what it has not heeded yet.

    Args:
        op_timeout_s: from one instruction of a step to the next it takes no longer, nor for others to wait for it.
        recovery_timeout_s: so long the others wait if it does.
        now_s: as below, on one clock.
    """

    def __init__(self, op_timeout_s: float, recovery_timeout_s: float, now_s: float):
        self.op_timeout_s, self._recovery_timeout_s = op_timeout_s, recovery_timeout_s
        self._looked_s, self._generation = now_s, 0
        self._works = self._is_warm = False
        self._missed, self._missed_s = 0, now_s
        self._awake = Awake(_FROZEN_S)

    @property
    def limit_s(self) -> float:
        """For the instruction that the training thread is at."""
        return self.op_timeout_s + (0.0 if self._is_warm else COMPILES_S)

    @property
    def longest_s(self) -> float:
        """Whoever has not come to anything by then is taken for stuck, whatever he was at."""
        return self.op_timeout_s + self._recovery_timeout_s

    # -- the training thread --------------------------------------------------------------------------------------

    def look(self, generation: int, now_s: float) -> None:
        """It comes to its next instruction, in this generation."""
        self._looked_s, self._generation, self._works = now_s, generation, True

    def rest(self, *, behind_step: bool) -> None:
        """It is through with what it looked out in. ``behind_step``: so nothing is left to compile in another one."""
        self._works, self._is_warm = False, self._is_warm or behind_step

    def heed(self) -> None:
        """It has come for the newest generation, or waits for one."""
        self._works, self._missed = False, 0

    # -- other threads --------------------------------------------------------------------------------------------

    def call(self, now_s: float) -> None:
        """There is a new generation to enter, as somebody waits for others."""
        self._missed += 1
        if self._missed <= TRIES:
            self._missed_s = now_s

    def overdue(self, now_s: float) -> int:
        """The generation in which it has been at one instruction of a step for longer than any may take; 0: none.

        Before it has done a step it may be compiling. Where all of this process has stood still, nothing is.
        """
        late = now_s - max(self._looked_s, self._awake.since_s(now_s)) > self.limit_s
        return self._generation if late and self._works and not self._missed else 0

    def is_lost(self, now_s: float) -> bool:
        """Whether it is stuck: the others have tried again and again without it, and for long.

        Before it has been in a generation it is not: it may be reading a checkpoint, or making an index of its data.
        Where it may compile, or does what is its script's affair, as writing a checkpoint, it has longer.
        """
        missing = self._generation > 0 and self._missed >= TRIES
        limit_s = self._recovery_timeout_s if self._works and self._is_warm else self.op_timeout_s
        return missing and now_s - self._missed_s > limit_s and self._silent(now_s)

    def _silent(self, now_s: float) -> bool:
        return now_s - self._looked_s > self.op_timeout_s
