"""The processes of one command of ``tests/gpu.sh``: they are found by a mark, and none is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

MARK = "GPU_SCRIPT_COMMAND"
"""A variable that tells the processes of one command from all others, whoever their parent is by then."""
GRACE_S = 5.0
"""From SIGTERM to SIGKILL, and for the system to take away who was killed."""


def _marked(mark: str) -> set[int]:
    """The processes that have it."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:  # gone, or somebody else's
            continue
    return found


def end(mark: str) -> None:
    """All processes with it: SIGTERM, and SIGKILL to those that do not go.

    By that, and not by their group: torchrun's workers and Odyssey's ranks each lead one of their own, and may outlive
    who has started them.
    """
    began_s, asked = time.monotonic(), set[int]()
    while (left := _marked(mark)) and time.monotonic() - began_s < 2 * GRACE_S:
        late = time.monotonic() - began_s > GRACE_S
        for pid in left if late else left - asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked |= left
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port
