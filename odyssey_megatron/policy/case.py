"""The case that a decision is about, as the policies see it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import WHOLE_CELL, ClusterState, Share
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.spread import nodes_alone
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.routes.rerouting import reroute
from odyssey_megatron.policy.score import NODE_SHARE, expected_tokens, next_loss_s
from odyssey_megatron.policy.shapes.kinds import MOST_SLOW, Slow
from odyssey_megatron.policy.shapes.search import Search, search_for

MANY_WORKERS = 256
"""Above this number of workers a job is large (``Case.is_large``)."""

_FEW_WORKERS = 8
"""Up to so many workers besides slow ones the search for places cut for these takes 0.3 s of CPU at most (Llama-2 7B on
H100s, CPython 3.11), and to leave one out costs more.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The arguments of one decision, and what follows from them."""

    job: JobSpec
    state: ClusterState
    previous: Layout
    usual_step_s: float
    """The step time of the previous plan."""
    profile: Profile
    horizon_s: float
    mtbf_s: float
    home: Layout | None = None
    """Layout of the failure-free plan, with which the job began."""
    thorough: bool = False
    """Whether it also works out what later decisions look up, as nobody waits for this one."""
    in_haste: bool = False
    """Whether a recovery waits for it, so that long searches are only looked up."""
    spare_holders: int = 0
    """If not 0, layouts that leave a layer with a single holder are also proposed with this many holders."""
    rebalances: bool = False
    """Whether nobody has died or joined: speeds have changed, and the next layout is entered between two steps."""
    mixes: bool = True
    """Whether ``mix`` may be proposed then, for which the job's host searches for seconds."""

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """The living workers, ascending."""
        return self.state.alive

    @property
    def is_large(self) -> bool:
        """Whether there are so many workers that the best shape by its estimate comes first, as its pipelines are
        alike, and is the only shape that is laid out. Other options are then worked out only if they may win by 0.5 %.
        """
        return len(self.state.workers) > MANY_WORKERS

    @cached_property
    def lost(self) -> bool:
        """Whether a worker of the previous layout is dead."""
        return not set(self.previous.workers) <= set(self.alive)

    @cached_property
    def is_larger(self) -> bool:
        """Whether a living worker is not in the previous layout."""
        return not set(self.alive) <= set(self.previous.workers)

    @cached_property
    def speeds(self) -> dict[int, float]:
        """Worker -> speed, of those that differ from a healthy worker."""
        return worker_speeds(self.state)

    @cached_property
    def shares(self) -> dict[int, Share]:
        """Worker -> share of a whole cell, of those that are not whole cells."""
        return worker_shares(self.state)

    @property
    def recuts_alike(self) -> bool:
        """Whether shapes for equal workers, with routes of their own, are proposed: after a change, where workers are
        alike.
        """
        changed = self.lost or self.is_larger or self.rebalances
        return changed and not (self.speeds or self.shares) and self.job.revisits

    @cached_property
    def whole(self) -> int:
        """Number of living workers that are whole cells, with which a restart could begin."""
        return sum(worker not in self.shares for worker in self.alive)

    @cached_property
    def steady(self) -> tuple[int, ...]:
        """The living workers that are whole cells and not slow, ascending."""
        return tuple(worker for worker in self.alive if worker not in self.slow)

    @cached_property
    def slow(self) -> dict[int, Slow]:
        """Worker -> its sort, of the living workers that are slow or not whole cells."""
        speeds, shares = self.speeds, self.shares
        return {
            worker: Slow.of(min(1.0, speeds.get(worker, 1.0)), shares.get(worker, WHOLE_CELL))
            for worker in self.alive
            if speeds.get(worker, 1.0) < 1.0 or worker in shares
        }

    @cached_property
    def cut_for(self) -> dict[int, Slow]:
        """Worker -> its sort, of the slow workers for which pipelines are cut, the fastest first.

        That takes a search of seconds. In haste, with many workers, it is left for later if it was not rehearsed
        (:attr:`cuts_later`): slow ones then have no place, or one like all others.
        """
        return {} if self.cuts_later else self._fastest_slow

    @property
    def is_hasty(self) -> bool:
        """Whether a better plan may be found once nobody waits."""
        return self.cuts_later or self.goes_by_estimates

    @cached_property
    def cuts_later(self) -> bool:
        """Whether the search for places cut for slow workers is left for later."""
        steady, sorts = len(self.steady), [*self._fastest_slow.values()]
        if not self.in_haste or steady <= _FEW_WORKERS or not sorts:
            return False
        return not self.search.knows(steady, self.job.num_microbatches, sorts)

    @property
    def goes_by_estimates(self) -> bool:
        """Whether estimates that know of no slow link count beside these as if they were bounds.

        Routes that go around slow links may be faster than the estimate, by about 1 %. Else all shapes are drawn, which
        takes 0.3 s of CPU for 256 workers.
        """
        return self.in_haste and len(self.steady) > _FEW_WORKERS and bool(self.profile.costs.slow_links)

    @property
    def _fastest_slow(self) -> dict[int, Slow]:
        return dict(sorted(self.slow.items(), key=lambda one: (-one[1].speed, one[0]))[:MOST_SLOW])

    @cached_property
    def nodes(self) -> dict[int, int]:
        """The node of each living worker."""
        return {worker.worker: worker.node for worker in self.state.workers if worker.alive}

    @cached_property
    def node_share(self) -> float:
        """The share of losses that are taken to be of a whole node; 0.0 if replicas need not be on different nodes."""
        several = len(set(self.nodes.values())) > 1
        return NODE_SHARE if several and self.job.spreads_replicas else 0.0

    @cached_property
    def rerouted(self) -> Layout:
        """The previous layout with the microbatches of dead and slow workers given to others. Several policies build on
        it.

        Raises:
            PlanInfeasible: some layer has no other holder.
        """
        return reroute(self.previous, self.alive, self.profile.costs, self.speeds)

    @property
    def search(self) -> Search:
        """The search for ragged pipelines, with what earlier decisions have worked out."""
        costs = self.profile.costs.of_alike_workers
        return search_for(costs, costs.memory_bytes, self.job.optimizer_copies, revisits=self.job.revisits)

    def score(self, step_s: float, transition_s: float, fatal_share: float = 0.0) -> float:
        """See :func:`odyssey_megatron.policy.score.expected_tokens`."""
        return expected_tokens(
            tokens_per_step=self.job.tokens_per_step,
            step_s=step_s,
            transition_s=transition_s,
            mtbf_s=self.mtbf_s,
            horizon_s=self.horizon_s,
            fatal_share=fatal_share,
            restart_s=self.profile.restart_s,
            left=self.left if fatal_share else 1.0,
            usual_step_s=self.usual_step_s,
        )

    def next_loss(self, fatal_share: float) -> float:
        """Tokens that the score of a layout lacks because its next loss may end the job."""
        risk_s = next_loss_s(fatal_share, self.profile.restart_s, self.left, self.mtbf_s, self.horizon_s)
        return self.job.tokens_per_step * risk_s / self.usual_step_s

    @cached_property
    def left(self) -> float:
        """Speed after a restart with one whole cell less, as a fraction of the usual speed; at most 1, and 0 if no
        restart is possible.
        """
        try:
            return min(1.0, self.usual_step_s / self.restarted_step_s(self.whole - 1))
        except PlanInfeasible:
            return 0.0

    def restarted_step_s(self, workers: int) -> float:
        """Return the estimated step of a job that starts with ``workers``: as many whole pipelines of its size as they
        make.

        Raises:
            PlanInfeasible: there is no such pipeline.
        """
        job, stages = self.job, self.job.pipeline_model_parallel_size
        pipelines = min(workers // stages, job.num_microbatches)
        if pipelines <= 0:
            raise PlanInfeasible(f"a pipeline needs {stages} workers, {workers} are alive and whole")
        step_s = self.search.estimate_s(pipelines * stages, job.num_microbatches, pipelines)
        if step_s is None:
            raise PlanInfeasible(self.search.why_not(stages))
        return step_s + self.profile.costs.agreement_s

    def fatal_share(self, layout: Layout) -> float:
        """Return the share of next losses that would leave some layer of ``layout`` without a holder.

        Every living rank is equally likely to be lost; or, in :attr:`node_share` of losses, every node.
        """
        owners = {one for of_layer in set(layout.owners) for one in of_layer}
        alone = {one[0] for one in owners if len(one) == 1}
        ranks, of_all = (
            sum(self.shares.get(worker, WHOLE_CELL).ranks for worker in workers)
            for workers in (alone, self.alive)
        )
        share = ranks / of_all
        if self.node_share:
            fatal = nodes_alone(owners, self.nodes)
            share += self.node_share * (len(fatal) / len(set(self.nodes.values())) - share)
        return share


def in_cluster(profile: Profile, state: ClusterState) -> Profile:
    """Return ``profile`` with the links and sums that are slow now, and the optimizers of smaller cells."""
    # What a rank keeps of optimizer state it steps.
    of_smaller = (
        (worker, share.scaled(1.0, 1.0) / share.ranks) for worker, share in worker_shares(state).items()
    )
    long = tuple((worker, more) for worker, more in of_smaller if more != 1.0)
    costs, own = profile.costs, (state.slow_links, state.slow_sums, long)
    if (costs.slow_links, costs.slow_sums, costs.long_optimizers) == own:
        return profile
    costs = replace(costs, slow_links=own[0], slow_sums=own[1], long_optimizers=own[2])
    return replace(profile, costs=costs)


def worker_speeds(state: ClusterState) -> dict[int, float]:
    """Return worker -> speed, of those that differ from a healthy whole cell."""
    return {w.worker: w.pace for w in state.workers if w.pace != 1.0}


def worker_shares(state: ClusterState) -> dict[int, Share]:
    """Return worker -> share of a whole cell, of those that are not whole cells."""
    return {w.worker: w.beside_whole for w in state.workers if w.share != 1.0}
