"""Stopping and continuing a whole job, as a paused container or a suspended host does."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path


def tree(pid: int) -> list[int]:
    """``pid`` and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def stop(pids: list[int]) -> None:
    """Whoever has ended since is left out."""
    _signal(pids, signal.SIGSTOP)


def go_on(pids: list[int]) -> None:
    _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def freeze(pids: list[int], seconds: float, *, seed: int = 0, apart_s: float = 0.0) -> None:
    """Stops all in one order and continues them in another, ``apart_s`` between two of them."""
    order = random.Random(seed)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in order.sample(pids, len(pids)):
            os.kill(pid, number)
            time.sleep(apart_s)
        if number == signal.SIGSTOP:
            time.sleep(seconds)
