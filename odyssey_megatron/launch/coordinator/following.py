"""Looks for the next plan to offer in a thread, so that the coordinator hears of a death meanwhile."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import NamedTuple

from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.launch.coordinator.offers import NextPlan, Offers
from odyssey_megatron.launch.coordinator.reactions import JobState
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.decided import Decided
from odyssey_megatron.policy.shapes.turns import TURNS

_AT_ONCE_S = 0.02
"""How long the coordinator waits for a look that has just begun: most take less, and are then over within the tick."""


class Found(NamedTuple):
    """What a look has come to: the job with what is known of its workers by then, and what to offer it, if anything."""

    job: JobState
    proposal: NextPlan | None
    took_s: float


class Following:
    """Calls ``Offers.following``, one look at a time.

    A look by measured costs, with a slow worker or for another layout, takes many seconds of CPU. What it finds counts
    only if nothing has happened to the job meanwhile; otherwise the next look begins anew.
    """

    def __init__(self, offers: Offers):
        self._offers = offers
        self._look: _Look | None = None
        self._recoveries: list[tuple[Decided, Plan | None]] = []
        """Those during the present look, oldest first."""

    def recovered(self, decided: Decided, live: Plan | None) -> None:
        """Call ``Offers.recovered``, now or as soon as the present look is over."""
        self._recoveries.append((decided, live))
        if self._look is None:
            self._note_recoveries()

    def following(self, job: JobState, diagnosis: Diagnosis | None, now_s: float) -> Found | None:
        """Return what was found for ``job``; None if nothing is due, or while somebody looks. Raises what the look has
        raised.
        """
        if self._look is None:
            if not job.may_offer_at(now_s):
                return None
            self._look = _Look(self._offers, job, diagnosis, now_s)
            self._look.over.wait(_AT_ONCE_S)
        look = self._look
        if not look.over.is_set():
            return None
        self._look = None
        if look.error is not None:
            raise look.error
        if look.found is not None and _is_as_it_was(job, look.job):
            found = look.found.job
            return look.found._replace(job=replace(job, cluster=found.cluster, tries=found.tries))
        self._offers.dropped()
        self._note_recoveries()
        return None

    def _note_recoveries(self) -> None:
        for one in self._recoveries:
            self._offers.recovered(*one)
        self._recoveries.clear()


def _is_as_it_was(job: JobState, before: JobState) -> bool:
    """Whether nothing has happened since that the next plan depends on."""
    return job.live_plan is before.live_plan and (job.cluster, job.tries) == (before.cluster, before.tries)


class _Look:
    """A look that has begun. It is not waited for when the job ends."""

    def __init__(self, offers: Offers, job: JobState, diagnosis: Diagnosis | None, now_s: float):
        self.job, self.over = job, threading.Event()
        self.found: Found | None = None
        self.error: Exception | None = None
        self._work = offers, diagnosis, now_s
        threading.Thread(target=self._run, name="odyssey-offer", daemon=True).start()

    def _run(self) -> None:
        (offers, diagnosis, now_s), began_s = self._work, time.monotonic()
        try:
            with TURNS.giving_way():
                found = offers.following(self.job, diagnosis, now_s)
            self.found = Found(*found, took_s=time.monotonic() - began_s)
        except Exception as error:  # noqa: BLE001 - the coordinator raises it
            self.error = error
        finally:
            self.over.set()
