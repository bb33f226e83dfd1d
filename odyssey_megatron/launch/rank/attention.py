"""Whether a rank's training thread makes progress, as the other threads of its process see it.

A training thread may be stuck, in a read from a file server that does not answer or in a call to its device's driver.
It then enters no generation, but its process would still beat, and the others would try to go on with it forever.
"""

from __future__ import annotations

from odyssey_megatron.launch.wire.awake import Awake

TRIES = 3
"""Number of generations in a row that a stuck training thread has missed. Only those count that waiting ranks asked
for: after a death all may rightly be busy, e.g. with a checkpoint. Time limits count from the last of them.
"""

COMPILES_S = 600.0
"""Additional time that an instruction may take in a process's first step, for compilation. Source: torch's limit for
collectives of NCCL, within which jobs without Odyssey must compile, too (``kProcessGroupNCCLDefaultTimeout``,
ProcessGroupNCCL.hpp).
"""

_FROZEN_S = 5.0
"""Limit for ``Awake``: if more than half of it lies between two checks by the other thread, the whole process was
stopped in between. That thread checks with each heartbeat (``config.HEARTBEAT_S``).
"""


class Attention:
    """What the training thread did last, and which generations it has missed since.

    Args:
        op_timeout_s: the longest time from one instruction of a step to the next, and for others to wait for it.
        recovery_timeout_s: how long the others wait for it after that.
        now_s: the time; here and in all methods on the same clock.
    """

    def __init__(self, op_timeout_s: float, recovery_timeout_s: float, now_s: float):
        self.op_timeout_s, self._recovery_timeout_s = op_timeout_s, recovery_timeout_s
        self._looked_s, self._generation = now_s, 0
        self._works = self._is_warm = False
        self._missed, self._missed_s = 0, now_s
        self._awake = Awake(_FROZEN_S)

    @property
    def limit_s(self) -> float:
        """Time limit for the instruction at which the training thread is."""
        return self.op_timeout_s + (0.0 if self._is_warm else COMPILES_S)

    @property
    def longest_s(self) -> float:
        """Time after which a rank that has not made progress counts as stuck, whatever it is doing."""
        return self.op_timeout_s + self._recovery_timeout_s

    # -- the training thread --------------------------------------------------------------------------------------

    def look(self, generation: int, now_s: float) -> None:
        """The training thread comes to its next instruction, in ``generation``."""
        self._looked_s, self._generation, self._works = now_s, generation, True

    def rest(self, *, behind_step: bool) -> None:
        """The training thread executes no instructions for now.

        ``behind_step``: it has completed a step, so that nothing is left to compile in the next one.
        """
        self._works, self._is_warm = False, self._is_warm or behind_step

    def heed(self) -> None:
        """The training thread has come to enter the newest generation, or waits for one."""
        self._works, self._missed = False, 0

    # -- other threads --------------------------------------------------------------------------------------------

    def call(self, now_s: float) -> None:
        """A new generation is to be entered, because a rank waits for others."""
        self._missed += 1
        if self._missed <= TRIES:
            self._missed_s = now_s

    def overdue(self, now_s: float) -> int:
        """Return the generation in which the training thread has exceeded the limit for one instruction; 0 if none.

        Before its first step the limit includes the time to compile. Time in which the whole process was stopped does
        not count.
        """
        late = now_s - max(self._looked_s, self._awake.since_s(now_s)) > self.limit_s
        return self._generation if late and self._works and not self._missed else 0

    def is_lost(self, now_s: float) -> bool:
        """Whether the training thread is stuck: the others have tried often and long enough without it.

        It never is before its first instruction: it may be reading a checkpoint, or making an index of its data. It
        has more time where it may compile, or does its script's own work, such as writing a checkpoint.
        """
        missing = self._generation > 0 and self._missed >= TRIES
        limit_s = self._recovery_timeout_s if self._works and self._is_warm else self.op_timeout_s
        return missing and now_s - self._missed_s > limit_s and self._silent(now_s)

    def _silent(self, now_s: float) -> bool:
        return now_s - self._looked_s > self.op_timeout_s
