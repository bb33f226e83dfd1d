"""What the coordinator asks when it needs a plan. The deciding itself is pure and lives in ``policy``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.codec import from_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.generation import CandidateRow
from odyssey_megatron.plan.plan import Plan

if TYPE_CHECKING:
    from odyssey_megatron.policy.profile import Profile

_log = logging.getLogger(__name__)


class Planner(Protocol):
    """The decisions of one job."""

    def start(self, job: JobSpec, state: ClusterState, profile_json: str) -> Plan:
        """The plan without failures. Raises ConfigError or PlanInfeasible."""
        ...

    def decide(
        self, state: ClusterState, previous: Plan, observations: Sequence[str], now_s: float
    ) -> tuple[Plan, tuple[CandidateRow, ...]]:
        """The plan for the living workers, and all that was considered.

        Args:
            observations: what ranks have measured, as they published it; "" where nothing yet.

        Raises:
            LayersLost: some layer has no living holder.
            PlanInfeasible: no candidate fits.
        """
        ...

    def finish(self, observations: Sequence[str]) -> None:
        """The job has finished: keeps what was learned, for ``--odyssey-profile`` of the next one."""
        ...


class PolicyPlanner:
    """``policy.decide`` with the job's profile, kept up to date with what the ranks measure."""

    def __init__(self, config: OdysseyConfig):
        # Now, not at the first failure: these load numpy and scipy.
        from odyssey_megatron.policy import decide, measured, profile

        self._config, self._decide, self._measured = config, decide, measured
        self._profiles = profile

    def start(self, job: JobSpec, state: ClusterState, profile_json: str) -> Plan:
        self._job = job
        self._profile = from_json(self._profiles.Profile, profile_json)
        keeps = self._config.interrupted_step == "resume"
        self._profile = replace(self._profile, costs=replace(self._profile.costs, keeps_messages=keeps))
        job.check(len(state.ranks))
        try:
            return self._decide.initial_plan(job, state, self._profile)
        except PlanInfeasible as error:
            if self._profile.costs.memory_bytes is None:
                raise
            # The estimate may be wrong, and the user has chosen this layout: it decides over plans, not over jobs.
            _log.warning(
                "by the estimate the job does not fit, so plans are made without regard to memory: %s", error
            )
            costs = replace(self._profile.costs, memory_bytes=None)
            self._profile = replace(self._profile, costs=costs)
            return self._decide.initial_plan(job, state, self._profile)

    def decide(
        self, state: ClusterState, previous: Plan, observations: Sequence[str], now_s: float
    ) -> tuple[Plan, tuple[CandidateRow, ...]]:
        profile = self._calibrated(observations)
        decision = self._decide.decide(
            job=self._job,
            state=state,
            previous=previous,
            profile=profile,
            config=self._config,
            now_s=now_s,
        )
        return decision.plan, decision.candidates

    def finish(self, observations: Sequence[str]) -> None:
        self._calibrated(observations).save(Path(self._config.run_dir) / "profile.json")

    def _calibrated(self, published: Sequence[str]) -> Profile:
        found = []
        for text in filter(None, published):
            try:
                found.append(from_json(self._measured.Measured, text))
            except ValueError as error:
                _log.warning("a rank's measurements are left out: %s", error)
        return self._measured.with_measured(self._profile, found)
