"""What ``odyssey plan`` answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from odyssey_megatron.cluster.cell import NO_SHAPES
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.plan.checking.bound import lower_bound_s
from odyssey_megatron.plan.checking.simulate import Timeline, simulate
from odyssey_megatron.plan.placing.communicators import Communicators, Needs, communicators
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.policy.case import in_cluster, worker_speeds
from odyssey_megatron.policy.decide import Decision
from odyssey_megatron.policy.two_speed import TwoSpeed
from odyssey_megatron.studies.losses import NextLoss
from odyssey_megatron.studies.scenario import Scenario
from odyssey_megatron.studies.smaller import Smaller


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The answer to everything that was asked."""

    scenario: Scenario
    state: ClusterState
    """The cluster with its dead and slow GPUs."""
    struck: str
    """Which GPUs are dead and which are slow, in words."""
    start: tuple[CandidateRow, ...]
    """The rows that were weighed for the healthy job, if there was a choice."""
    before: Plan
    best: Plan
    """The best plan of the healthy job, whatever the launch line's layout."""
    decision: Decision | None
    """None if no GPU is dead or slow, or the job would end."""
    both: TwoSpeed | None
    smaller: Smaller | None
    """What is left of cells that have lost GPUs; None if no cell has lost a part of its own."""
    decide_s: float
    losses: list[NextLoss]
    flags: list[tuple[str, str]]
    """(flag, why) of flags that the job would be better off with."""
    leaner: list[tuple[float, float, int]]
    """(share of the fastest step, step in seconds, bytes of the fullest worker): what less memory would cost."""
    ends: str = ""
    """Why the job would end with what has happened."""
    exit_code: int = 0
    """Its, if it would end."""

    @property
    def plan(self) -> Plan:
        """The plan with which the job would go on; the one before, if it would end."""
        return self.decision.plan if self.decision else self.before

    @property
    def lasting(self) -> tuple[Plan, ClusterState]:
        """The plan and the cluster that last until the next loss: with what is left of broken cells, if that trains."""
        plan = self.smaller.plan if self.smaller else None
        return (plan, self.smaller.state) if self.smaller and plan else (self.plan, self.state)

    @property
    def lasting_decision(self) -> Decision | None:
        """The decision for the plan that lasts until the next loss; None: see ``decision``."""
        return self.smaller.decision if self.smaller and self.smaller.plan else self.decision

    def sizes(self, plan: Plan) -> Mapping[int, int]:
        """Return worker -> its number of GPUs, of those that go on in ``plan`` though they have lost some."""
        return self.smaller.sizes if self.smaller and plan is self.smaller.plan else NO_SHAPES

    @property
    def short_of_memory(self) -> float:
        """By how much of a step the healthy job's is longer at least, as its workers have memory for too few
        microbatches.
        """
        free_s = lower_bound_s(
            self.before.layout, self.scenario.profile.costs, worker_speeds(self.scenario.state)
        )
        return self.before.bound_s / free_s - 1

    @property
    def gain_of_smaller(self) -> float:
        """The throughput that smaller cells add, as a share of that without them; 0 if they compute nothing."""
        plan = self.smaller.plan if self.smaller else None
        return self.plan.step_s / plan.step_s - 1 if plan else 0.0

    def communicators(self, plan: Plan) -> Communicators:
        """Return the communicators of all ranks, including those within cells."""
        previous = None if plan is self.before else Needs(self.before.layout)
        planned = self.decision is not None and not self.decision.case.lost
        needs = Needs(plan.layout, plan.transfers, planned)
        return communicators(needs, self.scenario.job.cell(0), previous, self.scenario.state.nodes)

    def dead(self, plan: Plan) -> frozenset[int]:
        """Return the workers that are dead while ``plan`` is carried out."""
        return frozenset(self.scenario.state.alive).difference(self._state(plan).alive)

    def _state(self, plan: Plan) -> ClusterState:
        if self.smaller and plan is self.smaller.plan:
            return self.smaller.state
        return self.state if plan is self.plan else self.scenario.state

    def timeline(self, plan: Plan) -> Timeline:
        """Return the timeline of one step; slow workers are slow in it once they are planned for."""
        state = self._state(plan)
        costs = in_cluster(self.scenario.profile, state).costs
        return simulate(plan.schedule, plan.layout, costs, worker_speeds(state))
