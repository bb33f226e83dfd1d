"""Fault injection: at a chosen point of a chosen step a rank sends itself a real signal, gets stuck or becomes slow."""

from __future__ import annotations

import math
import os
import signal
import threading

from odyssey_megatron.faults import FULL, STUCK, Fault, Injection, Slowdown, SlowLink
from odyssey_megatron.metrics.journal import Journal

_FLUSH_S = 5.0
"""The most time to write a fault down before it strikes: one that is not on record looks like a real one."""


class Injector:
    """Fires each armed injection of this rank once."""

    def __init__(
        self,
        injections: tuple[Fault, ...],
        rank: int,
        journal: Journal | None = None,
        incarnation: int = 0,
    ):
        who = rank, incarnation
        faults = [one for one in injections if not isinstance(one, SlowLink)]
        mine = [one for one in faults if (one.rank, one.incarnation) == who]
        self._armed = [one for one in mine if isinstance(one, Injection)]
        self._slowdowns = [one for one in mine if isinstance(one, Slowdown)]
        self._links = [one for one in injections if isinstance(one, SlowLink) and one.ranks[0] == rank]
        self._slowness = 1.0
        self._slow_links: dict[int, float] = {}
        self._journal = journal

    def at(self, point: str, *, step: int, generation: int, microbatch: int = -1) -> None:
        """Fire the injection that is armed for ``point``, if any. Does not return if that is a KILL."""
        if not self._armed:
            return
        for one in self._armed:
            if one.at != point or one.step not in (-1, step):
                continue
            if one.microbatch not in (-1, microbatch) or one.generation not in (-1, generation):
                continue
            self._armed.remove(one)
            self._fire(one, generation)
            return

    def slowness(self, step: int) -> float:
        """Return the factor by which the compute of ``step`` is slowed down. Changes go to the journal."""
        slow = math.prod(
            one.slow for one in self._slowdowns if one.step <= step and not 0 <= one.until <= step
        )
        if slow != self._slowness:
            self._slowness = slow
            if self._journal:
                self._journal.event("slowed", step=step, echo=True, slow=slow)
        return slow

    def slow_links(self, step: int) -> dict[int, float]:
        """Return receiver -> factor by which this rank's messages are slowed down in ``step``. Changes go to the
        journal.
        """
        slow: dict[int, float] = {}
        for one in self._links:
            if one.step <= step and not 0 <= one.until <= step:
                slow[one.ranks[1]] = slow.get(one.ranks[1], 1.0) * one.slow
        for receiver in sorted(slow.keys() | self._slow_links.keys()):
            factor = slow.get(receiver, 1.0)
            if factor != self._slow_links.get(receiver, 1.0) and self._journal:
                self._journal.event("link_slowed", step=step, echo=True, receiver=receiver, slow=factor)
        self._slow_links = slow
        return slow

    def _fire(self, one: Injection, generation: int) -> None:
        if self._journal:
            self._journal.event(
                "injected",
                generation=generation,
                step=one.step,
                echo=True,
                at=one.at,
                signal=one.signal,
                microbatch=one.microbatch,
            )
            self._journal.flush(_FLUSH_S)
        if one.signal == STUCK:
            threading.Event().wait()
        if one.signal == FULL:
            import torch  # here, as faults are read where there is no torch, too

            raise torch.OutOfMemoryError("injected")
        os.kill(os.getpid(), getattr(signal, "SIG" + one.signal))
