"""What it costs to have slow workers replaced: they leave between two steps, and fresh ones come in their place.

The rule for when to do so is that of renting or buying skis, where nobody knows how long winter lasts: replace once
what slowness has cost so far reaches what replacing costs. That costs at most twice what the best choice would have,
and no rule that does not know the end promises less (Karlin et al., "Competitive snoopy caching", Algorithmica 1988).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

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

    @property
    def lost(self) -> float:
        """Share of the training that slowness costs."""
        return share_lost(self.kept_s, self.healthy_s)

    @property
    def seconds(self) -> float:
        """Of training: what is lost until they are back. Never less than staying slow for as long."""
        while_away = max(self.lost, share_lost(self.without_s, self.healthy_s))
        return self.away_s * while_away + self.pause_s


def share_lost(step_s: float, healthy_s: float) -> float:
    """Of the training of steps of ``healthy_s``, by such as take ``step_s``."""
    return max(0.0, 1 - healthy_s / step_s)


def away_s(start_s: float, step_s: float) -> float:
    """From a worker's last step until its replacement's first: ``start_s``, as this job's processes have taken, and the
    steps of joining.
    """
    return start_s + _STEPS * step_s


def takes_a_risk(without: Layout, before: Layout) -> bool:
    """Whether layers would have a single holder that have more, so that the next loss could end the job."""
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
            f"({price.away_s:.0f} s with steps of {price.without_s:.3g} s)"
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
    """What the job does while slow workers are being replaced."""

    price: Price
    plan: Plan
    rows: tuple[CandidateRow, ...]
