"""Whether the ranks of a node share its cores, and what a thread has waited for one that another rank has."""

from __future__ import annotations

import os
from collections.abc import Callable

_SCHEDSTAT = "/proc/thread-self/schedstat"
"""Nanoseconds on a core, nanoseconds ready to run and without one, number of turns (the kernel's
Documentation/scheduler/sched-stats.rst). What is stopped, or waits for a message, is not ready.
"""


def are_shared() -> bool:
    """Whether this node has more ranks than this process may use cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1) > len(os.sched_getaffinity(0))


def queued() -> Callable[[], float] | None:
    """Gives for how many seconds the thread that calls this has been ready to run and has had no core, so far.

    None where the kernel does not say.
    """
    try:
        fd = os.open(_SCHEDSTAT, os.O_RDONLY)
        int(os.pread(fd, 128, 0).split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return lambda: int(os.pread(fd, 128, 0).split()[1]) / 1e9
