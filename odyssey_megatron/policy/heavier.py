"""Layers that take more memory than was thought, as ranks have run out of it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from types import MappingProxyType

from odyssey_megatron.cluster.state import WHOLE_CELL, Share
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.names import layer_names
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.memory import beside_activations
from odyssey_megatron.plan.placing.transfer import check_living
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.replacing import takes_a_risk

_ROOM, _BLIND_ROOM = 0.85, 0.8
"""A rank that has run out of memory is taken to have needed what there is, divided by this; the second where nobody has
said how much there is. Choices: where that is not enough it runs out once more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heavier:
    """What is known better than the estimates of memory."""

    factors: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Layer -> how many times the activations of a microbatch take what was thought."""
    room_bytes: int | None = None
    """Memory of a rank, where nobody had said how much there is: what the fullest one was to need when one ran out."""

    def applied(self, costs: Costs) -> Costs:
        """Return ``costs`` with it."""
        if not self.factors:
            return costs
        layers = list(costs.layers)
        for at, factor in self.factors.items():
            more = {
                name: ceil(getattr(layers[at], name) * factor) for name in ("activation_bytes", "early_bytes")
            }
            layers[at] = replace(layers[at], **more)
        memory_bytes = self.room_bytes if costs.memory_bytes is None else costs.memory_bytes
        return replace(costs, layers=tuple(layers), memory_bytes=memory_bytes)

    def after(self, plan: Plan, worker: int, costs: Costs, shares: Mapping[int, Share]) -> Heavier | None:
        """Return what is known when a rank of ``worker`` has run out of memory under ``plan``.

        None if by the plan it keeps no activations: something else has filled its memory. ``costs`` are without what
        was known before. ``shares``: those of workers that are not whole cells.
        """
        peaks, known = dict(plan.peak_bytes), self.applied(costs)
        room = known.memory_bytes or max(peaks.values())
        # In bytes of a whole cell's rank, as costs are.
        ranks = shares.get(worker, WHOLE_CELL).ranks
        state = beside_activations(plan.layout, known, shares).get(worker, 0)
        activations = peaks.get(worker, 0) * ranks - state
        if activations < 1:
            return None
        share = _ROOM if costs.memory_bytes is not None else _BLIND_ROOM
        factor = max(room / share * ranks - state, 0.0) / activations
        more = {
            layer: self.factors.get(layer, 1.0) * max(factor, 1 / share)
            for layer in plan.layout.held_by(worker)
            if layer < len(costs.layers)
        }
        return Heavier(factors=MappingProxyType({**self.factors, **more}), room_bytes=room)

    def at_least(self, other: Heavier) -> Heavier:
        """Return the larger factor of both for each layer."""
        both = {
            layer: max(self.factors.get(layer, 1.0), other.factors.get(layer, 1.0))
            for layer in {*self.factors, *other.factors}
        }
        return Heavier(factors=MappingProxyType(both), room_bytes=other.room_bytes)


class Shortages:
    """The ranks that have run out of memory, and what is known by them."""

    def __init__(self) -> None:
        self.known = Heavier()
        self._before: Heavier | None = None
        """What was known before ranks ran out for which no plan has been made yet; None: there are none."""
        self._workers = set[int]()
        """The workers of these ranks."""
        self._plans_help = True
        """Whether plans can do anything about them."""
        self._may_risk = False
        """Whether a plan may leave layers with a single holder for it: not for the first rank that runs out."""

    def __bool__(self) -> bool:
        """Whether ranks have run out for which no plan has been made yet."""
        return self._before is not None

    def add(self, plan: Plan, worker: int, costs: Costs, shares: Mapping[int, Share]) -> None:
        """Take note that a rank of ``worker`` has run out under ``plan``; see :meth:`Heavier.after`."""
        before = self._before or self.known
        found = before.after(plan, worker, costs, shares)
        self._before, self._plans_help = before, self._plans_help and found is not None
        self._workers.add(worker)
        if found is not None:  # of ranks that run out together each tells of the same plan
            self.known = self.known.at_least(found)

    @contextlib.contextmanager
    def mended(self) -> Iterator[_Check]:
        """Make a plan for these ranks in the body, and call what is yielded with its layout. If the body raises
        PlanInfeasible, what is known by these ranks is taken back.

        Raises:
            PlanInfeasible: no plan can help.
        """
        before, plans_help, workers = self._before or self.known, self._plans_help, frozenset(self._workers)
        self._before, self._plans_help = None, True
        self._workers.clear()
        try:
            if not plans_help:
                raise PlanInfeasible("by its plan it had next to nothing to keep")
            yield _Check(workers, self._may_risk)
        except PlanInfeasible:
            # That rank is no case of wrong estimates, it seems; if others run out, too, it is.
            self.known, self._may_risk = before, True
            raise


@dataclass(frozen=True, slots=True)
class _Check:
    """Whether a plan may follow that takes a risk, to spare ``workers``."""

    workers: frozenset[int]
    may_risk: bool

    def __call__(self, found: Layout, previous: Layout, alive: Collection[int]) -> None:
        """Raises PlanInfeasible if ``found`` takes a risk that ``previous`` has not, and the job could go on without
        these workers.
        """
        if not self.may_risk and takes_a_risk(found, previous):
            with contextlib.suppress(LayersLost):  # without them the job would end
                check_living(previous, set(alive) - self.workers)
                alone = sorted({layer for layers in found.alone().values() for layer in layers})
                raise PlanInfeasible(
                    f"with so little memory {layer_names(alone, len(found.holders))} would have a single holder, "
                    "whose loss would end the job"
                )
