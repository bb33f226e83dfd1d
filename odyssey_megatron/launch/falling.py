"""Before anybody's device ends what is under way, all who go on know that nothing of it counts any more.

An aborted kernel of NCCL's does not stop: it runs through, and tells the other side of each message that this is there
(``waitPeer`` and ``postPeer`` of NCCL 2.29's ``src/device/prims_simple.h``; over NVLink what they write is the
receiver's own counter). Whoever has not heard of the failure yet would take what lies in its buffer for a message, and
nothing would ever show it. So words fall first (``execute/ledger.py``), everywhere, and then devices are freed.
"""

from __future__ import annotations

from odyssey_megatron.codec import from_jsonable, parsed
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch.control import Control
from odyssey_megatron.plan import wire
from odyssey_megatron.plan.generation import Finished, Stop
from odyssey_megatron.plan.runs import from_runs

PATIENCE_S = 1.0
"""So long one who goes on may take to hear of a generation. Behind that the step is done again instead."""


def fallen_everywhere(rank: int, number: int, text: str, control: Control) -> bool:
    """Says that the words of ``rank`` have fallen, as generation ``number`` has come, and waits for the others'.

    Args:
        text: the generation's head.
        control: the caller's thread's.

    Returns:
        Whether they have fallen on all who go on; also where the job ends, and nobody does.
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
