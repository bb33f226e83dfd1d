"""The cost of having slow workers replaced.

They leave between two steps, and fresh ones take their place; or a slow cell comes back without its slow ranks. When to
do so is decided as in the ski rental problem, where nobody knows how long winter lasts: replace once what slowness has
cost so far reaches what replacing costs. That costs at most twice what the best choice would have, and no rule that
does not know the end promises less (Karlin et al., "Competitive snoopy caching", Algorithmica 1988).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from odyssey_megatron.cluster.job import JobSpec, largest_cell
from odyssey_megatron.cluster.state import ClusterState, WorkerState
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.policy.score import next_loss_s

_STEPS = 4
"""Number of steps that a started rank takes to be back: one until it is offered a place, one while the groups are
connected, one while it is filled, one until it computes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The cost of having some workers replaced. ``healthy_s``, ``kept_s`` and ``without_s`` are step times."""

    healthy_s: float
    """The step if nobody were slow."""
    kept_s: float
    """The step with what the slow workers do now."""
    without_s: float
    away_s: float
    """How long the job is expected to go on without them."""
    pause_s: float
    """Time of the two changes together."""
    risk_s: float = 0.0
    """What it costs on average that, meanwhile, a worker may be lost that alone has some layer, and did not before."""

    @property
    def lost(self) -> float:
        """Share of the training that slowness costs."""
        return share_lost(self.kept_s, self.healthy_s)

    @property
    def seconds(self) -> float:
        """Seconds of training that are lost until they are back; never less than staying slow for as long."""
        while_away = max(self.lost, share_lost(self.without_s, self.healthy_s))
        return self.away_s * while_away + self.pause_s + self.risk_s

    @property
    def meanwhile(self) -> str:
        """How the job goes on until they are back, for the table."""
        risk = (
            f", {self.risk_s:.1f} s for the risk that a layer's last holder is lost then"
            if self.risk_s
            else ""
        )
        return f"{self.away_s:.0f} s with steps of {self.without_s:.3g} s{risk}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """A slow cell that goes on without its slow ranks."""

    without: tuple[int, ...]
    size: int
    """Number of ranks that it goes on with."""
    step_s: float
    """The step of the best plan with it."""

    def gain(self, price: Price) -> float:
        """Return by how much steps are faster than with the slow ranks."""
        return price.kept_s / self.step_s - 1

    def saved_s(self, price: Price, cost_s: float) -> float:
        """Return how much of ``cost_s``, the training that slowness has cost, would have been saved without the slow
        ranks.
        """
        still = share_lost(self.step_s, price.healthy_s)
        return cost_s * max(0.0, 1 - still / price.lost) if price.lost > 0 else 0.0


def size_without(job: JobSpec, cell: WorkerState, without: int) -> int:
    """Return the number of ranks with which ``cell`` goes on ``without`` that many of its ranks.

    Raises:
        PlanInfeasible: it cannot.
    """
    if cell.missing:
        raise PlanInfeasible("it is a smaller cell already")
    if cell.other_nodes:
        raise PlanInfeasible("its ranks are on several nodes")
    size = largest_cell(job.cell_sizes, len(cell.ranks) - without)
    if not size:
        reason = job.whole_cells_only or job.whole_shards_only
        raise PlanInfeasible(reason or f"{len(cell.ranks) - without} ranks are too few for a cell")
    return size


def share_lost(step_s: float, healthy_s: float) -> float:
    """Return the share of training that is lost if steps take ``step_s`` instead of ``healthy_s``."""
    return max(0.0, 1 - healthy_s / step_s)


def away_s(start_s: float, step_s: float) -> float:
    """Return the time from a worker's last step until its replacement's first.

    It is ``start_s``, the time that this job's processes took to start, and the steps of joining.
    """
    return start_s + _STEPS * step_s


def takes_a_risk(without: Layout, before: Layout) -> bool:
    """Return whether a layer would have a single holder that has more now, so that the next loss would end the job."""
    alone, has = ({layer for layers in one.alone().values() for layer in layers} for one in (without, before))
    return not alone <= has


def risk_s(
    left: ClusterState, live: Layout, without: Layout, restart_s: float, mtbf_s: float, away_s: float
) -> float:
    """Return what the next loss costs on average while the job, of which ``left`` is there, goes on ``without`` some
    workers of ``live`` for ``away_s``: see :class:`Price`.

    Args:
        restart_s: The cost of a restart from the last checkpoint.
        mtbf_s: The mean time between failures of all of ``left``.
    """
    if not takes_a_risk(without, live):
        return 0.0
    ranks = {one.worker: len(one.ranks) for one in left.workers}
    alone = sum(ranks[worker] for worker in without.alone())
    return next_loss_s(alone / len(left.ranks), restart_s, 1.0, mtbf_s, away_s)


def row(price: Price, cost_s: float, threshold_s: float, *, chosen: bool) -> CandidateRow:
    """Return the table's row for replacing slow workers: what it costs and gains."""
    sign = ">=" if chosen else "<"
    return CandidateRow(
        name="replace",
        step_s=price.healthy_s,
        transition_s=price.seconds,
        score=None,
        chosen=chosen,
        reason=(
            f"steps {price.kept_s / price.healthy_s - 1:.0%} faster once nobody is slow; that has cost "
            f"{cost_s:.1f} s of training {sign} {threshold_s:.1f} s that it costs to leave and to come back "
            f"({price.meanwhile})"
        ),
    )


def row_smaller(found: Smaller, price: Price, cost_s: float, *, chosen: bool) -> CandidateRow:
    """Return the table's row for going on without the slow ranks of a cell: what it costs and gains."""
    saved_s = found.saved_s(price, cost_s)
    return CandidateRow(
        name="smaller",
        step_s=found.step_s,
        transition_s=price.seconds,
        score=None,
        chosen=chosen,
        reason=(
            f"steps {found.gain(price):.0%} faster with the cell of rank(s) {list(found.without)} going on without "
            f"them; so far that would have saved {saved_s:.1f} s of training {'>=' if chosen else '<'} "
            f"{price.seconds:.1f} s that it costs to leave and to come back ({price.meanwhile})"
        ),
    )


def with_row(rows: Collection[CandidateRow], first: CandidateRow) -> tuple[CandidateRow, ...]:
    """Return ``rows`` behind ``first``, which was chosen; the row chosen before says what is done until then."""
    return (
        first,
        *(
            replace(one, chosen=False, reason=f"until then: {one.reason}" if one.chosen else one.reason)
            for one in rows
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutThem:
    """What the job does while slow workers are being replaced, or before."""

    price: Price
    plan: Plan
    rows: tuple[CandidateRow, ...]
    gives_first: bool = False
    """Whether they alone have some layers. They are still in ``plan`` then, in which others take these over."""
