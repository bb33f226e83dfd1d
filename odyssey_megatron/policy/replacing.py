"""What it costs to have slow workers replaced: they leave between two steps, and fresh ones come in their place; or, of
a cell, to have it come back without its slow ranks.

The rule for when to do so is that of renting or buying skis, where nobody knows how long winter lasts: replace once
what slowness has cost so far reaches what replacing costs. That costs at most twice what the best choice would have,
and no rule that does not know the end promises less (Karlin et al., "Competitive snoopy caching", Algorithmica 1988).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from odyssey_megatron.cluster.job import JobSpec, largest_cell
from odyssey_megatron.cluster.state import WorkerState
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.generation import CandidateRow
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.plan import Plan

_STEPS = 4
"""That a rank which has started takes to be back: one until it is offered a place, one while the groups are connected,
one while it is filled, one until it computes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Of having some workers replaced; times are of steps but for ``away_s`` and ``price_s``."""

    healthy_s: float
    """With nobody slow."""
    kept_s: float
    """With what they do now."""
    without_s: float
    away_s: float
    """How long the job is expected to go on without them."""
    pause_s: float
    """Of the two changes together."""
    risk_s: float = 0.0
    """That somebody is lost meanwhile who alone has some layer, and not before: what that costs on average."""

    @property
    def lost(self) -> float:
        """Share of the training that slowness costs."""
        return share_lost(self.kept_s, self.healthy_s)

    @property
    def seconds(self) -> float:
        """Of training: what is lost until they are back. Never less than staying slow for as long."""
        while_away = max(self.lost, share_lost(self.without_s, self.healthy_s))
        return self.away_s * while_away + self.pause_s + self.risk_s

    @property
    def meanwhile(self) -> str:
        """What is known of it, for the table."""
        risk = (
            f", {self.risk_s:.1f} s for the risk that a layer's last holder is lost then"
            if self.risk_s
            else ""
        )
        return f"{self.away_s:.0f} s with steps of {self.without_s:.3g} s{risk}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """A slow cell without its slow ranks."""

    without: tuple[int, ...]
    each: int
    """Places of a whole cell that each of the others fills."""
    step_s: float
    """Of the best plan with it."""

    def gain(self, price: Price) -> float:
        """Steps are so much faster than with the slow ranks."""
        return price.kept_s / self.step_s - 1

    def saved_s(self, price: Price, cost_s: float) -> float:
        """Of the training that slowness has cost, what would not have been lost without the slow ranks."""
        still = share_lost(self.step_s, price.healthy_s)
        return cost_s * max(0.0, 1 - still / price.lost) if price.lost > 0 else 0.0


def places_each(job: JobSpec, cell: WorkerState, without: int) -> int:
    """How many places of a whole cell each rank of ``cell`` fills once it goes on ``without`` so many of them.

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
    return len(cell.ranks) // size


def share_lost(step_s: float, healthy_s: float) -> float:
    """Of the training of steps of ``healthy_s``, by such as take ``step_s``."""
    return max(0.0, 1 - healthy_s / step_s)


def away_s(start_s: float, step_s: float) -> float:
    """From a worker's last step until its replacement's first: ``start_s``, as this job's processes have taken, and the
    steps of joining.
    """
    return start_s + _STEPS * step_s


def takes_a_risk(without: Layout, before: Layout) -> bool:
    """Whether layers would have a single holder that have more, so that the next loss would end the job."""
    alone, has = ({layer for layers in one.alone().values() for layer in layers} for one in (without, before))
    return not alone <= has


def row(price: Price, cost_s: float, threshold_s: float, *, chosen: bool) -> CandidateRow:
    """Of the table: what it costs and gains."""
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
    """Of the table: what it costs and gains to go on without the slow ranks of a cell."""
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
    """``first`` is what was chosen, and of ``rows`` the chosen one is what is done until then."""
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
    """They alone have some layers: with ``plan``, in which they still are, others take these over."""
