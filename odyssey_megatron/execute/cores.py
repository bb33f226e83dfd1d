"""Whether the ranks of a node share its cores, and how long a thread has waited for a core."""

from __future__ import annotations

import os
from collections.abc import Callable

_SCHEDSTAT = "/proc/thread-self/schedstat"
"""Three numbers: nanoseconds on a core, nanoseconds ready to run but without a core, and the number of turns
(the kernel's Documentation/scheduler/sched-stats.rst). A thread that is stopped, or waits for a message, is
not ready.
"""


def are_shared() -> bool:
    """Whether this node has more ranks than this process may use cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1) > len(os.sched_getaffinity(0))


def queued() -> Callable[[], float] | None:
    """Return a function that gives the seconds for which its thread has been ready to run without a core.

    None where the kernel does not say.
    """
    try:
        fd = os.open(_SCHEDSTAT, os.O_RDONLY)
        int(os.pread(fd, 128, 0).split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return lambda: int(os.pread(fd, 128, 0).split()[1]) / 1e9
