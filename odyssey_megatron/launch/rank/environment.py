"""What ties a rank to the agent that started it: its variables, and that it dies with the agent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.metrics.outlet import say

_PR_SET_PDEATHSIG = 1
_NO_MEMORY = (
    "[odyssey] this rank ends: there was no memory to begin a thread (ulimit -v, or the memory of the node)."
)


def of_rank() -> Mapping[str, str]:
    """Return the environment with the variables of a rank. Raises ConfigError if this process is no rank of a job."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ODYSSEY_TOKEN", "ODYSSEY_HEARTBEAT",
              "ODYSSEY_SLOT", "ODYSSEY_PARENT_PID")  # fmt: skip
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ConfigError(
            f"this process was not started by 'odyssey run' (its environment lacks {', '.join(missing)}), "
            "so nobody would notice when it dies. Start the job with 'odyssey run', which takes torchrun's "
            "arguments: odyssey run --nproc-per-node 8 script.py ..."
        )
    return os.environ


def journal_of(rank: int, run_dir: str) -> Journal:
    """Return the journal of this process, which is ``rank``."""
    return Journal(run_dir, source=f"rank{rank}", rank=rank, job=os.environ.get("ODYSSEY_JOB", ""))


def die_with(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent, ``parent_pid``, ends.

    A rank must not outlive its agent (its parent, or the parent of that), as nobody would fence it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def end_without_memory() -> None:
    """End this process when a thread of it cannot begin for want of memory.

    Whoever starts such a thread would wait forever (``Thread.start`` in CPython 3.11, Lib/threading.py, waits for an
    event that the thread was to set), and the others for this rank.
    """
    before = sys.unraisablehook

    def hook(found: Any) -> None:
        before(found)
        if found.exc_type is MemoryError and "thread started by" in (found.err_msg or ""):
            say(_NO_MEMORY)
            os._exit(1)

    sys.unraisablehook = hook
