"""What the coordinator asks when it needs a plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.planner import Decided, Rebalanced
from odyssey_megatron.policy.replacing import Smaller, WithoutThem


class Planner(Protocol):
    """The decisions of one job."""

    def start(self, job: JobSpec, state: ClusterState, profile_json: str) -> Decided:
        """The plan without failures. Raises ConfigError or PlanInfeasible."""
        ...

    def learn(
        self, state: ClusterState, current: Plan, observations: Sequence[str], now_s: float
    ) -> Diagnosis | None:
        """Takes in what the ranks have measured.

        It may run beside decisions in another thread: they go by what was rehearsed last.

        Args:
            current: the plan that the job trains with.
            observations: as the ranks published them; "" where nothing yet.

        Returns:
            Who is slow by what is known now, and why.
        """
        ...

    def rehearse(self, state: ClusterState, current: Plan, now_s: float) -> None:
        """Works out what the next decisions will look up, by what was learned last. Takes as long as it takes, beside
        them and :meth:`learn` in a thread of its own.
        """
        ...

    def adopt(self, observations: Sequence[str]) -> None:
        """Takes in what the ranks have measured, and no more than that."""
        ...

    def decide(self, state: ClusterState, previous: Plan, now_s: float) -> Decided:
        """The plan for the living workers.

        Raises:
            LayersLost: some layer has no living holder.
            PlanInfeasible: no candidate fits.
        """
        ...

    def rebalance(
        self, state: ClusterState, current: Plan, now_s: float, lasts_s: float, *, anew: bool = False
    ) -> Rebalanced:
        """The plan for the speeds that ``state`` has, which are expected to stay for ``lasts_s``.

        Args:
            anew: nobody is slow, and none is better for having been the first plan.

        Raises:
            PlanInfeasible: no candidate fits.
        """
        ...

    def step_s(self, state: ClusterState, plan: Plan) -> float:
        """What a step of ``plan`` takes, simulated, with the speeds and links that ``state`` has. Raises
        PlanInfeasible.
        """
        ...

    def slowed_s(self, state: ClusterState, live: Plan, whole: Collection[int] = ()) -> tuple[float, float]:
        """The step of ``live``, as above, and as it would be if nobody were slow, and the cells ``whole``."""
        ...

    def smaller(
        self, state: ClusterState, live: Plan, worker: int, without: Sequence[int], now_s: float
    ) -> Smaller:
        """What a slow cell would be that goes on ``without`` some of its ranks. Raises PlanInfeasible, also where it
        cannot be smaller.
        """
        ...

    def without_slow(
        self,
        state: ClusterState,
        live: Plan,
        workers: Collection[int],
        now_s: float,
        whole: Collection[int] = (),
    ) -> WithoutThem:
        """What the job does while slow ``workers`` are replaced, and what that costs, with the risk that it takes
        meanwhile. ``whole``: as above. Raises PlanInfeasible.
        """
        ...

    def freeing(self, state: ClusterState, live: Plan, workers: Collection[int], now_s: float) -> Decided:
        """A plan that can go on without ``workers``, who live, and alone have some layers by now: others take these
        over from them. Raises PlanInfeasible.
        """
        ...

    def towards(self, state: ClusterState, current: Plan, target: Plan) -> Plan:
        """The next plan on the way to ``target``: that, or one behind whose steps its layers move."""
        ...

    def keep(self) -> None:
        """Writes down what was learned by now, if that is new: for ``--odyssey-profile`` of the next job, and ``odyssey
        plan``, however this one ends.
        """
        ...

    def finish(self, observations: Sequence[str]) -> None:
        """The same, at the end of a job that has finished."""
        ...
