"""Whether a silent process works.

A thread that computes, or waits for a disk, may keep Python's lock all the while: in C code it may compile or unpickle,
or read pages of a mapped file from a file server. Then no other thread of the process can write a heartbeat, and
nothing is wrong with it. On a busy machine it may not come to run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

_LEAST_SHARE = 0.05
"""The share of one processor that a process at work uses at least. Threads that wait for Python's lock ask for it every
5 ms, which takes less than 0.03 (``tests/launch/test_working.py``). NCCL's threads may use more while a message is
outstanding: a rank with a lock that never comes free then counts as at work.
"""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True, kw_only=True)
class Work:
    """What the process ``pid`` does while it is silent."""

    pid: int
    since_s: float
    """When :meth:`goes_on` began to count, on the caller's clock."""
    _cpu_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._cpu_s = _threads(self.pid)[1]

    def goes_on(self, now_s: float) -> bool:
        """Return whether the process has computed since ``since_s``, or waits for a disk now, and is not stopped."""
        states, cpu_s = _threads(self.pid)
        if states <= set("TtZX"):
            return False
        return "D" in states or cpu_s - self._cpu_s > _LEAST_SHARE * (now_s - self.since_s)


def _threads(pid: int) -> tuple[set[str], float]:
    """Return the states of all threads (proc(5)), and the seconds of processor time that they have used together."""
    states, ticks = set[str](), 0
    task = Path(f"/proc/{pid}/task")
    for thread in os.listdir(task) if task.exists() else ():
        try:
            text = (task / thread / "stat").read_bytes()
        except OSError:  # it has ended
            continue
        fields = text[text.rindex(b")") + 2 :].split()  # a thread's name may contain anything
        states.add(fields[0].decode())
        ticks += int(fields[11]) + int(fields[12])
    return states, ticks * _TICK_S
