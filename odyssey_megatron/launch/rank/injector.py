"""Fault injection: at a chosen point of a chosen step a rank sends itself a real signal, gets stuck or becomes slow."""

from __future__ import annotations

import math
import os
import signal
import threading

from odyssey_megatron.faults import FULL, STUCK, Fault, Injection, Slowdown, SlowLink, slows
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
        self._armed: dict[int, Injection] = {}
        self._slowdowns: dict[int, Slowdown] = {}
        self._links: dict[int, SlowLink] = {}
        for number, one in enumerate(injections):
            if one.ranks[0] != rank:
                continue
            match one:
                case SlowLink():
                    self._links[number] = one
                case Slowdown(incarnation=meant) if meant == incarnation:
                    self._slowdowns[number] = one
                case Injection(incarnation=meant) if meant == incarnation:
                    self._armed[number] = one
        self._slow: tuple[int, ...] = ()
        self._slow_links: dict[int, tuple[int, ...]] = {}
        self._journal = journal

    def at(self, point: str, *, step: int, generation: int, microbatch: int = -1) -> None:
        """Fire the injection that is armed for ``point``, if any. Does not return if that is a KILL."""
        if not self._armed:
            return
        for number, one in self._armed.items():
            if one.at != point or one.step not in (-1, step):
                continue
            if one.microbatch not in (-1, microbatch) or one.generation not in (-1, generation):
                continue
            del self._armed[number]
            self._fire(number, one, generation)
            return

    def slowness(self, step: int) -> float:
        """Return the factor by which the compute of ``step`` is slowed down. Changes go to the journal."""
        now = tuple(number for number, one in self._slowdowns.items() if slows(one, step))
        slow = math.prod(self._slowdowns[number].slow for number in now)
        if now != self._slow:
            self._slow = now
            if self._journal:
                self._journal.event("slowed", step=step, echo=True, slow=slow, faults=now)
        return slow

    def slow_links(self, step: int) -> dict[int, float]:
        """Return receiver -> factor by which this rank's messages are slowed down in ``step``. Changes go to the
        journal.
        """
        now: dict[int, tuple[int, ...]] = {}
        for number, one in self._links.items():
            if slows(one, step):
                now[one.ranks[1]] = (*now.get(one.ranks[1], ()), number)
        slow = {receiver: math.prod(self._links[one].slow for one in now[receiver]) for receiver in now}
        for receiver in sorted(now.keys() | self._slow_links.keys()):
            faults, factor = now.get(receiver, ()), slow.get(receiver, 1.0)
            if faults != self._slow_links.get(receiver, ()) and self._journal:
                self._journal.event(
                    "link_slowed", step=step, echo=True, receiver=receiver, slow=factor, faults=faults
                )
        self._slow_links = now
        return slow

    def _fire(self, number: int, one: Injection, generation: int) -> None:
        if self._journal:
            self._journal.event(
                "injected",
                generation=generation,
                step=one.step,
                echo=True,
                at=one.at,
                signal=one.signal,
                microbatch=one.microbatch,
                faults=(number,),
            )
            self._journal.flush(_FLUSH_S)
        if one.signal == STUCK:
            threading.Event().wait()
        if one.signal == FULL:
            import torch  # here, as faults are read where there is no torch, too

            raise torch.OutOfMemoryError("injected")
        os.kill(os.getpid(), getattr(signal, "SIG" + one.signal))
