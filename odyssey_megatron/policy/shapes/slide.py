"""Shapes with one pipeline that lacks workers, where the stages that it lacks are others for each microbatch.

ReCycle (arXiv 2405.14009) gives a dead worker's microbatches to those that have its stage in other pipelines, which
then have more to do than all others. New pipelines of unequal lengths leave workers idle where layers do not divide
among their stages. Here all pipelines keep their stages. A microbatch of the short pipeline, which lacks a worker, goes
to another pipeline for one stage, and that gap slides along the pipeline from microbatch to microbatch. So what the
dead worker leaves to do is shared by all. For that the workers along which the gap slides hold two stages, their own
and the next one's. If a route has several legs (:mod:`odyssey_megatron.policy.shapes.ways`), the gap of each leg slides
along a part of the pipeline of its own, so that no worker holds more than one leg's part more. A gap that has two
stages to slide along leaves each layer as many holders as before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.bound import cluster_bound_s, lower_bound_s
from odyssey_megatron.plan.checking.simulate import computed_before_s, step_end_s
from odyssey_megatron.plan.layout import Hop, Layout, Route, layout_from_routes
from odyssey_megatron.plan.placing.memory import caps_for
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.policy.shapes import ways
from odyssey_megatron.policy.shapes.pipelines import WORTH
from odyssey_megatron.policy.shapes.search import Search
from odyssey_megatron.policy.shapes.shares import SLACK, deal
from odyssey_megatron.policy.shapes.splits import Splits
from odyssey_megatron.policy.shapes.stages import reached_s

_TRIES = 6
"""The most kinds of pipelines that are looked at; the bound of each takes some milliseconds."""

_ROUGH = 0.9
"""An estimate before microbatches are dealt out may be too long: for stages that are not alike by a tenth."""

_NEAR = 0.99
"""The same for an estimate of the whole pipelines alone, whose stages are known: a hundredth, as the short pipeline's
workers sum with them.
"""

_MOST = 4
"""The most shapes that are scheduled, each in tens of milliseconds."""

_MOST_VISITS = 4096
"""The most visits of microbatches to workers in one shape: more take too long to schedule, and then a gap matters less.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slid:
    """A shape without workers."""

    layout: Layout
    """Its routes; workers are the numbers of seats."""
    note: str
    estimate_s: float
    """Its step, without the optimizer and new holders."""


def slid(search: Search, workers: int, microbatches: int, *, thorough: bool = False) -> Slid | None:
    """Return the best shape over ``workers`` equal workers; None if there is none that is worth it.

    ``thorough``: there is time, so that its order is kept for later look-ups.
    """
    key = workers, microbatches
    if key not in search.slid:
        search.slid[key] = _slid(search, workers, microbatches, thorough)
    return search.slid[key]


def _slid(search: Search, workers: int, microbatches: int, thorough: bool) -> Slid | None:
    costs = search.splits.costs
    estimates = (one.estimate_s for one in search.partitions(workers, microbatches) if one.shares)
    below_s, best = min(estimates, default=inf) * WORTH, None
    if cluster_bound_s(microbatches, costs, range(workers)) >= below_s:
        return None
    slides = sorted(
        (
            one
            for turned in (search, *search.turning)
            for number in range(2, min(workers, microbatches) + 1)
            for stages in range(workers // number + 1, -(-workers // (number - 1)))
            if (one := _Slide.of(turned, number, stages, workers, microbatches))
            and one.likely_s * _ROUGH < below_s
        ),
        key=lambda one: one.likely_s,
    )
    near = (one for one in slides[:_TRIES] if one.whole_s() * _NEAR < below_s)
    bounded = [found for one in near for found in one.bounded()[-2:]]
    for one, bound_s, layout in sorted(bounded, key=lambda found: found[1])[:_MOST]:
        if bound_s >= below_s:
            break
        step_s = one.step_s(layout, below_s, thorough)
        if step_s < below_s:
            below_s, best = step_s, Slid(layout=layout, note=one.note, estimate_s=step_s)
    return best


class _Slide:
    """Pipelines with ``ends``, the last of which lacks workers."""

    def __init__(
        self,
        search: Search,
        splits: Splits,
        ends: tuple[int, ...],
        number: int,
        workers: int,
        microbatches: int,
    ) -> None:
        self.search = search
        self.costs, self.way, self.ends, self.number = splits.costs, splits.way, ends, number
        self.microbatches, stages = microbatches, len(ends)
        self.lacks = number * stages - workers
        self.each = microbatches * stages / workers
        """Microbatches of each worker, if all have equally much to do."""
        self.likely_s = max(
            reached_s(splits.costs, one) + self.each * one.each_s for one in splits.stages(stages)
        )
        self.places = [0] * ends[-1]
        """The stage of each layer."""
        for place, first, last in ways.visits(ends, self.way):
            self.places[first:last] = [place] * (last - first)
        self.legs_of = ways.legs_of(ends[-1], self.way.legs)
        self.windows = windows(stages, self.lacks, self.way.legs)

    @classmethod
    def of(cls, search: Search, number: int, stages: int, workers: int, microbatches: int) -> _Slide | None:
        """Return that of ``number`` pipelines of ``stages``; None if they do not fit, or are too large.

        ``search`` says which way routes go.
        """
        if microbatches * stages * search.splits.way.legs > _MOST_VISITS:
            return None
        splits = search.sharing(number).splits
        ends = splits.split(stages) if stages <= splits.most_stages else None
        if ends is None:
            return None
        return cls(search, splits, ends, number, workers, microbatches)

    @property
    def most_short(self) -> int:
        """The most microbatches that the short pipeline gets: as many as its workers do if all are equally busy."""
        return min(round(self.each), self.microbatches - self.number + 1)

    def whole_s(self) -> float:
        """Return the estimated step of the other pipelines without what they do for the short one, which only adds to
        it. No layout is made for that, and most slides go no further.
        """
        stages, whole = len(self.ends), self.number - 1
        own = self.search.sharing(self.number).balanced
        estimate_s = own.estimate_s(stages * whole, self.microbatches - self.most_short, whole)
        assert estimate_s is not None, "pipelines of these stages fit"
        return estimate_s + self.search.weights_late_s(self.number, stages * self.number)

    @property
    def note(self) -> str:
        """What is special about it, for tables."""
        stages = len(self.ends)
        return f"{self.number} pipelines of {stages}{self.way.text}, one with {self.lacks} fewer, whose gap slides"

    def bounded(self) -> list[tuple[_Slide, float, Layout]]:
        """Return (this, a lower bound of the step, layout) with several numbers of microbatches for the short pipeline.

        Its workers hold more than others, so that where memory is tight they can have fewer in flight, and do fewer.
        The least bound is the last but one. Where workers are as busy as they can be there may be no such order, and
        with one microbatch less there may.
        """
        found, costs = list[tuple[_Slide, float, Layout]](), self.costs
        for short in range(self.most_short, 0, -1):
            layout = self._layout(short)
            try:
                bound_s = lower_bound_s(self._summed(layout), costs, {}, caps_for(layout, costs))
            except PlanInfeasible:
                break
            found.append((self, bound_s, layout))
            if len(found) > 1 and bound_s >= found[-2][1]:
                break
        return found

    def step_s(self, layout: Layout, below_s: float, thorough: bool) -> float:
        """Return the step of a ``layout`` of :meth:`bounded`, without the optimizer; infinite if not ``below_s``."""
        costs, summed = self.costs, self._summed(layout)
        before_s = computed_before_s(summed, costs, below_s * SLACK)
        try:
            order = order_routes(
                summed, costs, in_flight_cap=caps_for(layout, costs), before_s=before_s, thorough=thorough
            )
        except PlanInfeasible:
            return inf
        return step_end_s(summed, costs, order.done_s, order.tails())

    def _summed(self, layout: Layout) -> Layout:
        """Return ``layout`` with gradients summed for as many owners as the job has."""
        copies = self.search.copies
        return replace(layout, copies=copies) if 0 < copies < self.number else layout

    def _layout(self, short: int) -> Layout:
        """Return the layout in which the short pipeline has ``short`` microbatches, and the others share the rest."""
        whole, stages = self.number - 1, len(self.ends)
        few, more = divmod(self.microbatches - short, whole)
        shares = [few + (at < more) for at in range(whole)]
        *own, ids = deal((*shares, short))
        by_way: dict[tuple[Hop, ...], list[int]] = {}
        for at, each in enumerate(own):
            by_way[ways.hops([at * stages + place for place in self.places])] = [*each]
        load = [float(share) for share in shares for _ in range(stages)]
        for turn, microbatch in enumerate(ids):
            by_way.setdefault(ways.hops(self._short(turn, load)), []).append(microbatch)
        routes = (Route(microbatches=tuple(found), hops=hops) for hops, found in by_way.items())
        costs = self.costs
        return layout_from_routes(len(costs.layers), tuple(routes), tied=costs.tied is not None)

    def _short(self, turn: int, load: list[float]) -> list[int]:
        """Return the seat of each layer for microbatch number ``turn`` of the short pipeline, and add to ``load``.

        ``load``: microbatches of each seat of the other pipelines; the one that has fewest steps in.
        """
        stages, helper = len(self.ends), dict[tuple[int, int], int]()
        gaps = [[window[turn % len(window)] for window in of_leg] for of_leg in self.windows]
        for leg, places in enumerate(gaps):
            for place in places:
                seat = min(range(place, len(load), stages), key=load.__getitem__)
                helper[leg, place] = seat
                load[seat] += 1 / self.way.legs
        return [
            helper[leg, place]
            if place in gaps[leg]
            else len(load) + place - sum(one < place for one in gaps[leg])
            for leg, place in zip(self.legs_of, self.places, strict=True)
        ]


def windows(stages: int, lacks: int, legs: int) -> list[list[range]]:
    """Return, for each leg, the stages along which each of ``lacks`` gaps slides; at least one stage each.

    The pipeline is cut into as many parts as there are gaps, and each of these into as many as there are legs.
    """
    found = []
    for leg in range(legs):
        of_leg = []
        for gap in range(lacks):
            first, last = stages * gap // lacks, stages * (gap + 1) // lacks
            length = last - first
            start = min(first + length * leg // legs, last - 1)
            of_leg.append(range(start, max(start + 1, first + length * (leg + 1) // legs)))
        found.append(of_leg)
    return found
