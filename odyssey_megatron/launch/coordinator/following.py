"""Looks for the next plan to offer in a thread, so that the coordinator hears of a death meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import fields, replace
from typing import NamedTuple

from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.launch.coordinator.offers import NextPlan, Offers
from odyssey_megatron.launch.coordinator.reactions import JobState
from odyssey_megatron.launch.coordinator.said import Said
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.decided import Decided
from odyssey_megatron.policy.shapes.turns import TURNS

_log = logging.getLogger(__name__)

_AT_ONCE_S = 0.02
"""How long the coordinator waits for a look that has just begun: most take less, and are then over within the tick."""
_WAITING = {"joining", "joining_smaller", "returned", "incarnations", "failure_times_s"}
"""What changes in ``ClusterState`` as ranks come and go that have no place yet. Plans depend on it by the rate of
failures alone, and by which cells can be whole.
"""


class Found(NamedTuple):
    """What a look has come to: the job with what is known of its workers by then, and what to offer it, if anything."""

    job: JobState
    proposal: NextPlan | None
    took_s: float


class Following:
    """Calls ``Offers.following``, one look at a time.

    With a slow worker, or for another layout by measured costs, a look takes up to tens of seconds of CPU. Each is made
    by a copy of ``offers``, which takes its place if nothing has happened to the job meanwhile. Otherwise it is dropped
    with all that it has noted and said, and the next look begins anew.

    Args:
        said: keeps what ``offers`` says, which is all it shares with others but for the planner.
    """

    def __init__(self, offers: Offers, said: Said):
        self._offers, self._said = offers, said
        self._look: _Look | None = None

    def recovered(self, decided: Decided, live: Plan | None) -> None:
        """See ``Offers.recovered``. A look that has begun before is dropped, since the job has changed."""
        self._offers.recovered(decided, live)

    def following(self, job: JobState, diagnosis: Diagnosis | None, now_s: float) -> Found | None:
        """Return what was found for ``job``; None if nothing is due, or while somebody looks. Raises what the look has
        raised.
        """
        if self._look is None:
            if not self._offers.is_due(job, diagnosis, now_s):
                return None
            self._look = _Look(self._offers.copied(self._said), job, diagnosis, now_s)
            self._look.over.wait(_AT_ONCE_S)
        look = self._look
        if not look.over.is_set():
            return None
        self._look = None
        if not _is_as_it_was(job, look.job):
            self._said.forget()
            self._offers.missed(look.diagnosis)
            if look.error is not None:
                _log.warning("a look for a better plan, for a job that has changed since: %r", look.error)
            return None
        self._said.tell()
        if look.error is not None:
            raise look.error
        assert look.found is not None
        self._offers = look.offers
        return look.found._replace(job=_with_what_is_known(job, look.found.job))

    def close(self) -> None:
        """Tell what a look has said that is over by now; one that is not is left alone, as the job ends."""
        if self._look is not None and self._look.over.is_set():
            self._said.tell()


class _Look:
    """A look that has begun. It is not waited for when the job ends."""

    def __init__(self, offers: Offers, job: JobState, diagnosis: Diagnosis | None, now_s: float):
        self.offers, self.job, self.diagnosis, self.over = offers, job, diagnosis, threading.Event()
        self.found: Found | None = None
        self.error: Exception | None = None
        self._now_s = now_s
        threading.Thread(target=self._run, name="odyssey-offer", daemon=True).start()

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            with TURNS.giving_way():
                found = self.offers.following(self.job, self.diagnosis, self._now_s)
            self.found = Found(*found, took_s=time.monotonic() - began_s)
        except Exception as error:  # noqa: BLE001 - the coordinator raises it
            self.error = error
        finally:
            self.over.set()


def _is_as_it_was(job: JobState, before: JobState) -> bool:
    """Whether nothing has happened since that the next plan depends on."""
    if job.live_plan is not before.live_plan or job.tries != before.tries:
        return False
    if job.cluster.can_be_whole != before.cluster.can_be_whole:
        return False
    names = (one.name for one in fields(ClusterState) if one.name not in _WAITING)
    return all(getattr(job.cluster, name) == getattr(before.cluster, name) for name in names)


def _with_what_is_known(job: JobState, found: JobState) -> JobState:
    """Return ``job`` with what ``found`` knows of speeds, and of offers that failed."""
    known = found.cluster
    cluster = replace(
        job.cluster, workers=known.workers, slow_links=known.slow_links, slow_sums=known.slow_sums
    )
    return replace(job, cluster=cluster, tries=found.tries)
