"""Make sure that all ranks that go on know of a generation's end before any device aborts what is under way.

An aborted NCCL kernel does not stop: it runs through, and tells the other side of each message that the message is
there (``waitPeer`` and ``postPeer`` of NCCL 2.29's ``src/device/prims_simple.h``; over NVLink they write to the
receiver's own counter). A rank that has not heard of the failure yet would take the contents of its buffer for a
message, and nothing would ever show it. So the words (``execute/ledger.py``) fall first, on all ranks, and then devices
are freed.
"""

from __future__ import annotations

from odyssey_megatron.codec import from_jsonable, parsed
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch.control import Control
from odyssey_megatron.plan import wire
from odyssey_megatron.plan.generation import Finished, Stop
from odyssey_megatron.plan.runs import from_runs

PATIENCE_S = 1.0
"""How long a rank that goes on may take to hear of a generation. After that the step is done again instead."""


def fallen_everywhere(rank: int, number: int, text: str, control: Control) -> bool:
    """Say that the words of ``rank`` have fallen, as generation ``number`` has come, and wait for those of others.

    Args:
        text: The generation's head.
        control: The connection of the calling thread.

    Returns:
        Whether the words have fallen on all ranks that go on. True also if the job ends, and no rank goes on.
    """
    head: wire.Head | Stop | Finished = from_jsonable(wire.Head | Stop | Finished, parsed(text))
    if not isinstance(head, wire.Head):
        return True
    go_on = {*from_runs(head.members)} - {*from_runs(head.fresh)}
    if rank in go_on and control.count(keys.fallen_key(number, count=True)) == len(go_on):
        control.put(keys.fallen_key(number), "")
    try:
        control.wait([keys.fallen_key(number)], PATIENCE_S)
    except TimeoutError:
        return False
    return True
