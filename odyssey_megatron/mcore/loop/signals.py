"""Megatron-LM's ``--exit-signal-handler``, agreed on by all ranks of the job.

Each rank's Megatron believes that it is alone, and would exit alone. Here all ranks leave Megatron's loop after the
same iteration, with its save, whether a rank or Odyssey's agent was sent the signal (``--odyssey-on-sigterm save``).
"""

from __future__ import annotations

from typing import Any

from odyssey_megatron.cluster.events import Ask
from odyssey_megatron.execute.parts import Member
from odyssey_megatron.execute.rank import RankRuntime


class AgreedSignal:
    """Replaces Megatron's ``DistributedSignalHandler``, which its loop asks after each iteration."""

    def __init__(self, runtime: RankRuntime):
        self._runtime = runtime

    def signals_received(self) -> list[bool]:
        return [self._runtime.ends]


def install(args: Any, runtime: RankRuntime, member: Member) -> None:
    """Make the loop end when ``runtime`` says so, and make ``runtime`` hear of signals that this process was sent."""
    from megatron.training import global_vars

    own = global_vars._GLOBAL_SIGNAL_HANDLER  # Megatron's own; catches the signal if the user asked for it
    runtime.ballot.wants_end = lambda: (
        member.liveness.asked == Ask.END or (own is not None and own._signal_received)
    )
    args.exit_signal_handler = True
    global_vars._GLOBAL_SIGNAL_HANDLER = AgreedSignal(runtime)
