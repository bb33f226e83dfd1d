"""An error that ranks have alike is no failure of hardware: going on without them would only let the others meet it.

A rank that ends by an exception of its own says so before it does, by the kind of error and the line that raised it,
and waits a moment for another one. On a job of several nodes it must be on another node: what the ranks of one have
alike may be the node's failure.
"""

from __future__ import annotations

import hashlib
import time
import traceback

import torch.distributed as dist

from odyssey_megatron.errors import ControlPlaneLost
from odyssey_megatron.launch.control import Control

_WAIT_S = 0.5
_WITHIN_S = 60.0
"""Two errors that are further apart are two failures; a recovery and the step that it repeats lie well within."""
_OF_DEVICES = ("CUDA", "NCCL", "cuDNN", "cuBLAS", "out of memory")


def signature(error: Exception) -> str:
    """Equal for errors of one kind from one line; "" for those that devices and connections raise."""
    if isinstance(error, dist.DistError) or any(one in str(error) for one in _OF_DEVICES):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return hashlib.sha256(f"{type(error).__qualname__} {where}".encode()).hexdigest()[:16]


def is_shared(control: Control, error: Exception, *, rank: int, node: int, nodes: int) -> bool:
    """Whether another rank fails like this. Takes a moment if none does."""
    if not (name := signature(error)):
        return False
    key, mine = f"failed/{name}", f"{rank} {node} {time.time()}"
    try:
        control.put_first(key, mine)
        first, its_node, at_s = control.get(key).split()
        if time.time() - float(at_s) > _WITHIN_S:
            control.put(key, mine)
        elif int(first) != rank and (nodes == 1 or int(its_node) != node):
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
