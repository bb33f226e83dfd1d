"""Fault injection: a rank sends itself the real signal at a chosen point of a chosen step, is stuck there, or slow."""

from __future__ import annotations

import math
import os
import signal
import threading

from odyssey_megatron.faults import STUCK, Fault, Injection, Slowdown, SlowLink
from odyssey_megatron.metrics.journal import Journal

_FLUSH_S = 5.0
"""A fault that is not on record looks like one that nobody injected."""


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
        """Call at ``point``; does not return if a KILL was armed for it."""
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
        """How many times its time the compute of ``step`` takes. Each change is written down."""
        slow = math.prod(
            one.slow for one in self._slowdowns if one.step <= step and not 0 <= one.until <= step
        )
        if slow != self._slowness:
            self._slowness = slow
            if self._journal:
                self._journal.event("slowed", step=step, echo=True, slow=slow)
        return slow

    def slow_links(self, step: int) -> dict[int, float]:
        """Receiver -> how many times their time messages of this rank take in ``step``. Changes are written down."""
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
        os.kill(os.getpid(), getattr(signal, "SIG" + one.signal))
