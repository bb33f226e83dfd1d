"""Recognise an error that several ranks have alike: no hardware failed, so the others would meet it, too.

Before a rank ends by an exception of its own it publishes the kind of the error and the line that raised it, and waits
a moment for another rank with the same. In a job of several nodes that rank must be on another node, as an error that
only ranks of one node share may be the node's failure.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import traceback
from collections import deque

import torch.distributed as dist

from odyssey_megatron.errors import EXIT_ALIKE, ControlPlaneLost
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control

_PLACE = (("GROUP_RANK", "0"), ("GROUP_WORLD_SIZE", "1"))
"""torch elastic's variables for the node's number and the number of nodes, with defaults."""
_WAIT_S = 0.5
_WITHIN_S = 60.0
"""Errors that are further apart than this are separate failures. A recovery and the step that it repeats take much
less. Each rank measures by its own clock, from the end of the generation in which the first error was raised.
"""
_REMEMBERED = 64
"""The number of generations remembered: more than can begin within that time, one failure after another."""
_OF_DEVICES = ("CUDA", "NCCL", "cuDNN", "cuBLAS", "out of memory")


class KnownSince:
    """When this rank learned of each of the last generations, by its own clock."""

    def __init__(self) -> None:
        self._known: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def note(self, generation: int) -> None:
        self._known.append((generation, time.monotonic()))

    def ended_s(self, generation: int) -> float:
        """Return for how long ``generation`` has been over.

        0.0 while it lasts, infinite if it was before this rank's time.
        """
        if not any(known <= generation for known, _ in self._known):
            return math.inf
        ended = [at_s for known, at_s in self._known if known > generation]
        return time.monotonic() - min(ended) if ended else 0.0


def signature(error: Exception) -> str:
    """Return a text that is equal for errors of one kind from one line. "" for errors of devices and connections."""
    if isinstance(error, dist.DistError) or any(one in str(error) for one in _OF_DEVICES):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return hashlib.sha256(f"{type(error).__qualname__} {where}".encode()).hexdigest()[:16]


def is_shared(
    control: Control,
    error: Exception,
    *,
    rank: int,
    node: int,
    nodes: int,
    generation: int,
    history: KnownSince,
) -> bool:
    """Return whether another rank fails with the same error. Takes a moment if none does.

    Args:
        generation: The number of the generation in which ``error`` was raised.
        history: That of this rank.
    """
    if not (name := signature(error)):
        return False
    key, mine = f"failed/{name}", f"{rank} {node} {generation}"
    try:
        control.put_first(key, mine)
        first, its_node, its_generation = map(int, control.get(key).split())
        if history.ended_s(its_generation) > _WITHIN_S:
            control.put(key, mine)
        elif first != rank and (nodes == 1 or its_node != node):
            control.put(f"{key}/again", "")
            return True
        ends_s = time.monotonic() + _WAIT_S
        while time.monotonic() < ends_s:
            if control.has([f"{key}/again"]):
                return True
            time.sleep(0.01)
    except ControlPlaneLost:
        pass
    return False


def end_if_shared(
    control: Control, error: Exception, *, rank: int, generation: int, history: KnownSince
) -> None:
    """End this process with ``EXIT_ALIKE`` if other ranks fail with the same error, as no hardware has failed then.

    The launcher prints one traceback and ends the job. For the arguments see :func:`is_shared`.
    """
    node, nodes = (int(os.environ.get(name, default)) for name, default in _PLACE)
    if is_shared(control, error, rank=rank, node=node, nodes=nodes, generation=generation, history=history):
        text = "".join(traceback.format_exception(error))
        said = "several ranks failed with the same error, so no hardware has, and the job ends. One of them:"
        control.put_first(keys.REFUSED, f"{said}\n{text}")
        raise SystemExit(EXIT_ALIKE) from None
