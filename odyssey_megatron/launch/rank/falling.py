"""Before any rank aborts its groups, all ranks that go on know that nothing of the old generation counts any more.

An aborted NCCL kernel does not stop. It runs to its end, and tells the other side of each message that the message has
arrived (``waitPeer`` and ``postPeer`` of NCCL 2.29's ``src/device/prims_simple.h``; over NVLink they write the
receiver's own counter). A rank that has not heard of the failure yet would take what lies in its buffer for a message,
and nothing would ever show it. So first the words fall on all ranks, i.e. the flags that tell devices
whether their work still counts (``execute/ledger.py``), and only then are devices freed.
"""

from __future__ import annotations

from odyssey_megatron.codec import from_jsonable, parsed
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.plan.sending import wire
from odyssey_megatron.plan.sending.generation import Finished, Stop
from odyssey_megatron.plan.sending.runs import from_runs

PATIENCE_S = 1.0
"""Time that a rank that goes on may take to hear of a generation. After it, the step is done again instead."""


def fallen_everywhere(rank: int, number: int, text: str, control: Control) -> bool:
    """Report that the words of ``rank`` have fallen, since generation ``number`` has come, and wait for the others.

    Args:
        text: the generation's head, or the message that ends the job.
        control: the connection of the calling thread.

    Returns:
        Whether they have fallen on all ranks that go on. True also if the job ends, so that none goes on.
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
