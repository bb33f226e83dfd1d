"""The interface through which the coordinator gets plans."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.decided import Decided
from odyssey_megatron.policy.planner import Rebalanced
from odyssey_megatron.policy.replacing import Smaller, WithoutThem


class Planner(Protocol):
    """The decisions of one job."""

    def start(self, job: JobSpec, state: ClusterState, profile_json: str) -> Decided:
        """Return the plan without failures. Raises ConfigError or PlanInfeasible."""
        ...

    def learn(
        self, state: ClusterState, current: Plan, observations: Sequence[str], now_s: float
    ) -> Diagnosis | None:
        """Take in what the ranks have measured.

        This may run beside decisions in another thread: they go by what was rehearsed last.

        Args:
            current: The plan that the job trains with.
            observations: What each rank has published; "" if nothing yet.

        Returns:
            Which workers and links are slow by what is known now, and why.
        """
        ...

    def rehearse(self, state: ClusterState, current: Plan, now_s: float) -> None:
        """Work out what the next decisions will look up, by what was learned last.

        This may take long, and runs in a thread of its own beside decisions and :meth:`learn`.
        """
        ...

    def adopt(self, observations: Sequence[str]) -> None:
        """Have decisions go by what the ranks have measured, without rehearsing or diagnosing anything."""
        ...

    def decide(self, state: ClusterState, previous: Plan, now_s: float) -> Decided:
        """Return the plan for the living workers.

        Raises:
            LayersLost: Some layer has no living holder.
            PlanInfeasible: No candidate fits.
        """
        ...

    def ran_out(self, plan: Plan, worker: int, state: ClusterState) -> None:
        """Take note that a rank of ``worker`` has run out of memory under ``plan``, so that later plans need less.
        ``state`` is the cluster in which it did.

        The next :meth:`decide` raises PlanInfeasible if there is no such plan, and takes the notes back: something else
        must fill that rank's memory.
        """
        ...

    def rebalance(
        self, state: ClusterState, current: Plan, now_s: float, lasts_s: float, *, anew: bool = False
    ) -> Rebalanced:
        """Return the plan for the speeds in ``state``, which are expected to last for ``lasts_s`` seconds.

        Args:
            anew: Plan without preferring the layout that the job began with.

        Raises:
            PlanInfeasible: No candidate fits.
        """
        ...

    def step_s(self, state: ClusterState, plan: Plan) -> float:
        """Return the simulated seconds of a step of ``plan`` with the speeds and links in ``state``. Raises
        PlanInfeasible.
        """
        ...

    def slowed_s(self, state: ClusterState, live: Plan, whole: Collection[int] = ()) -> tuple[float, float]:
        """Return the step time of ``live``, and the one that the job would have if no worker were slow.

        The cells of the workers in ``whole`` are taken to be whole for the second.
        """
        ...

    def smaller(
        self, state: ClusterState, live: Plan, worker: int, without: Sequence[int], now_s: float
    ) -> Smaller:
        """Return what the slow cell of ``worker`` would be ``without`` some of its ranks. Raises PlanInfeasible, also
        if the cell cannot be smaller.
        """
        ...

    def without_slow(
        self,
        state: ClusterState,
        live: Plan,
        worker: int,
        now_s: float,
        whole: Collection[int] = (),
    ) -> WithoutThem:
        """Return what the job does while a slow ``worker`` is replaced, and what that costs, the risk that it takes
        meanwhile included. ``whole`` is as in :meth:`slowed_s`. Raises PlanInfeasible.
        """
        ...

    def freeing(self, state: ClusterState, live: Plan, workers: Collection[int], now_s: float) -> Decided:
        """Return a plan in which others take over the layers that only ``workers`` have, which live and are to leave.
        Raises PlanInfeasible.
        """
        ...

    def towards(self, state: ClusterState, current: Plan, target: Plan) -> Plan:
        """Return the next plan on the way to ``target``: ``target`` itself, or a plan behind whose steps its layers
        move.
        """
        ...

    def keep(self) -> None:
        """Save what was learned by now, if it is new, so that it is there however this job ends.

        It is for ``--odyssey-profile`` of the next job, and for ``odyssey plan``.
        """
        ...

    def finish(self, observations: Sequence[str]) -> None:
        """Save what the ranks have measured, at the end of a job that has finished."""
        ...
