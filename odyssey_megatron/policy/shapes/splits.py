"""Splits of a job's layers into the stages of a pipeline, for any number of stages."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from odyssey_megatron.plan.costs import Costs, Spans
from odyssey_megatron.policy.shapes import ways
from odyssey_megatron.policy.shapes.cuts import place_within
from odyssey_megatron.policy.shapes.kinds import Slow, Sorts, sort_of, stages_of
from odyssey_megatron.policy.shapes.shares import SLACK
from odyssey_megatron.policy.shapes.stages import Stage, Waiting, waiting
from odyssey_megatron.policy.shapes.ways import ONCE, Way

_HEALTHY = Slow(1.0)

Table = Sequence[Sequence[float]]
"""[first][last] -> seconds per microbatch that a stage with layers ``[first, last)`` can sustain; 0.0 if there is no
such stage, infinite if it does not fit.
"""

Window = tuple[int, int]
"""The range of layers in which a stage may end: ``ways.window``."""


class Split(NamedTuple):
    """The stages of a pipeline."""

    ends: tuple[int, ...]
    """Where each stage ends, as :mod:`odyssey_megatron.policy.shapes.ways` counts."""
    slow_place: int = -1
    """The stage that has the slow worker; -1: there is none."""


class Splits:
    """The best split of one job's layers for each kind of pipeline, worked out on demand.

    Args:
        budget_bytes: memory of a worker; None: unlimited.
        way: how routes go through their pipeline's workers.
        sorts: the sorts of slow workers, by number.
        ample: the splits for the same times with unlimited memory, if there are some already.
    """

    def __init__(
        self,
        costs: Costs,
        budget_bytes: int | None = None,
        *,
        way: Way = ONCE,
        sorts: Sorts | None = None,
        ample: Splits | None = None,
    ):
        self.costs, self.budget, self.way, self.sorts = costs, budget_bytes, way, sorts or Sorts()
        self.last = len(costs.layers)
        self.most_stages = max(1, (self.last - 2) // way.legs)
        self.ample = ample or (Splits(costs, way=way, sorts=self.sorts) if budget_bytes is not None else None)
        self._cut = cut_of(costs, way)
        times_s = stage_times_s(costs, self._cut, budget_bytes, way)
        self._limits = array("d", np.unique(times_s[(times_s > 0.0) & (times_s < inf)]))
        """All times that the slowest stage can take, ascending."""
        self._tables = {-1: _table(times_s)}
        """Sort of slow worker -> times of its stages; -1: of healthy workers' stages."""
        self._limits_with: dict[int, Sequence[float]] = {}
        """The same for pipelines with a slow worker, by its sort."""
        self._found: dict[int, Split | None] = {}
        self._stages: dict[int, tuple[Stage, ...]] = {}

    def split(self, kind: int) -> tuple[int, ...] | None:
        """Return stage ends such that the slowest stage is as fast as possible, then the others as equal as possible.

        None if nothing fits the memory. The slowest stage is one of all spans of layers, so their sorted times are
        bisected. Filling stages greedily shows whether a limit is enough, which is exact because a longer span is never
        faster. Few stages at the limit leave the scheduler slack.

        Memory only ever makes a stage slower, so a split that is best without a limit of memory, and as fast with it,
        is best.

        A slow worker is put where the pipeline is fastest, and of these places as far back as possible, where the
        fewest microbatches are in flight.
        """
        found = self._split(kind)
        return None if found is None else found.ends

    def slow_place(self, kind: int) -> int:
        """Return the stage that has the slow worker in a pipeline of this kind, which fits; -1: there is none."""
        found = self._split(kind)
        return -1 if found is None else found.slow_place

    def slow(self, kind: int) -> Slow:
        """Return the sort of the slow worker in pipelines of this kind; a healthy one if there is none."""
        return self.sorts[sort_of(kind)] if sort_of(kind) >= 0 else _HEALTHY

    def stages(self, kind: int) -> tuple[Stage, ...]:
        """Return the stages of a pipeline of this kind, which fits."""
        if kind not in self._stages:
            self._stages[kind] = self.stages_once(kind)
        return self._stages[kind]

    def stages_once(self, kind: int) -> tuple[Stage, ...]:
        """Return the same without keeping it for later calls: those of all kinds would be most of a search's memory."""
        found, spans = self._split(kind) or Split(()), self.costs.spans
        own: list[list[tuple[int, int, int]]] = [[] for _ in found.ends]
        for hop, (place, first, last) in enumerate(ways.visits(found.ends, self.way)):
            own[place].append((hop, first, last))
        stages = []
        hops = sum(map(len, own))
        for place, (visits, (a, b)) in enumerate(zip(own, pairwise((0, *found.ends)), strict=True)):
            is_slow = place == found.slow_place
            one, table = (self.slow(kind), self._table(sort_of(kind))) if is_slow else self._healthy
            way_s = sum(spans.down_and_up_s(first, last) for _, first, last in visits)
            stages.append(
                Stage(
                    spans=tuple((first, last) for _, first, last in visits),
                    hop=visits[0][0],
                    hops=hops,
                    down_and_up_s=way_s / one.speed,
                    each_s=table[a][b],
                    speed=one.speed,
                    share=one.share,
                )
            )
        return tuple(stages)

    def kept_bytes(self, one: Stage) -> int:
        """Return the bytes of weights, gradients and optimizer state of a worker (:class:`Share`)."""
        both_ends = len(one.spans) > 1 and one.first == 0 and one.spans[-1][1] == self.last
        tied, spans = self.costs.tied, self.costs.spans
        whole = sum(spans.kept_bytes(a, b) for a, b in one.spans)
        optimizer = sum(spans.optimizer_bytes(a, b) for a, b in one.spans)
        if tied and both_ends:  # it is counted twice
            whole, optimizer = whole - tied.kept_bytes, optimizer - tied.optimizer_bytes
        kept: float = one.share.scaled(whole, optimizer)
        return ceil(kept)

    def waiting(self, stages: Sequence[Stage], one: Stage) -> Waiting:
        """Return what a stage of a pipeline waits for, as its memory is full."""
        room = inf if self.budget is None else int(self.budget * one.share.ranks) - self.kept_bytes(one)
        return waiting(self.costs, stages, one, room)

    @property
    def _healthy(self) -> tuple[Slow, Table]:
        return _HEALTHY, self._table(-1)

    def _table(self, sort: int) -> Table:
        if sort not in self._tables:
            times_s = stage_times_s(self.costs, self._cut, self.budget, self.way, self.sorts[sort])
            self._tables[sort] = _table(times_s)
        return self._tables[sort]

    def _split(self, kind: int) -> Split | None:
        if kind not in self._found:
            windows = [
                ways.window(stage, stages_of(kind), self.last, self.way) for stage in range(stages_of(kind))
            ]
            self._found[kind] = self._of_ample(kind) or (
                self._with_slow(windows, sort_of(kind)) if sort_of(kind) >= 0 else self._without_slow(windows)
            )
        return self._found[kind]

    def _of_ample(self, kind: int) -> Split | None:
        """Return the best split without regard to memory, if it is as fast with it."""
        found = None if self.ample is None else self.ample._split(kind)
        if self.ample is None or found is None:
            return None
        as_fast = all(
            self._table(sort)[a][b] == self.ample._table(sort)[a][b]
            for place, (a, b) in enumerate(pairwise((0, *found.ends)))
            for sort in [sort_of(kind) if place == found.slow_place else -1]
        )
        return found if as_fast else None

    def _without_slow(self, windows: Sequence[Window]) -> Split | None:
        tables = [self._table(-1)] * len(windows)
        limit_s = least_limit_s(self._limits, lambda limit_s: fits(tables[0], windows, limit_s))
        return None if limit_s is None else Split(even(tables, windows, limit_s * SLACK, self.way))

    def _with_slow(self, windows: Sequence[Window], sort: int) -> Split | None:
        healthy, slow = self._table(-1), self._table(sort)
        if sort not in self._limits_with:
            limits = {*self._limits, *(s for row in slow for s in row if 0.0 < s < inf)}
            self._limits_with[sort] = array("d", sorted(limits))

        def place(limit_s: float) -> int:
            return place_within(healthy, slow, windows, limit_s * SLACK)

        limit_s = least_limit_s(self._limits_with[sort], lambda limit_s: place(limit_s) >= 0)
        if limit_s is None:
            return None
        at = place(limit_s)
        tables = [slow if stage == at else healthy for stage in range(len(windows))]
        return Split(even(tables, windows, limit_s * SLACK, self.way), at)


def cut_of(costs: Costs, way: Way) -> Spans:
    """Return what pipelines are cut from: the layers in the order of :func:`ways.in_turn`."""
    if way == ONCE:
        return costs.spans
    # Where the way turns, one worker has embedding and head, and their weight once: see ``stage_times_s``.
    tied = None if way.turns else costs.tied
    return Spans([costs.layers[layer] for layer in ways.in_turn(len(costs.layers), way)], tied)


def stage_times_s(
    costs: Costs, cut: Spans, budget_bytes: int | None, way: Way, slow: Slow = _HEALTHY
) -> NDArray[np.float64]:
    """Return [first, last] -> seconds per microbatch that a stage of such a worker can sustain.

    Infinite if it does not fit, 0.0 if there is no such stage. ``cut``: see :func:`cut_of`.

    The time is that of its work; or, if there is room for k microbatches, a k-th of the time for which a microbatch
    stays: down to the head, up again, and through the stage's own weight gradient (Little's law). With several legs
    each layer's stay is its own.
    """
    work = cut.compute_s.table() / slow.speed
    found = work
    if budget_bytes is not None:
        kept, optimizer = cut.kept_bytes.table(), cut.optimizer_bytes.table()
        if way.turns and costs.tied:
            kept[0] += costs.tied.kept_bytes
            optimizer[0] += costs.tied.optimizer_bytes
        if slow.share.state != 1.0:
            kept = np.ceil(slow.share.scaled(kept, optimizer)).astype(np.int64)
        room = int(budget_bytes * slow.share.ranks) - kept
        each = cut.activation_bytes.table()
        if any(one.early_bytes < 0 for one in costs.layers):
            room -= np.maximum(0, -cut.early_bytes.table())
        has_room, keeps = room >= each, each > 0
        if way.legs > 1:
            stays = np.array(_byte_seconds(costs, way))
            stay_s = (stays - stays[:, np.newaxis]) / np.where(keeps & has_room, room, 1)
        else:
            way_s = costs.spans.down_and_up_s.table()
            stay_s = (way_s[:, -1:] + work - way_s) / np.where(
                keeps & has_room, room // np.maximum(each, 1), 1
            )
        found = np.where(has_room, np.where(keeps, np.maximum(work, stay_s), work), inf)
    found = found[:-1]
    found[np.tril_indices_from(found)] = 0.0
    return found


def _byte_seconds(costs: Costs, way: Way) -> list[float]:
    """Return, for each place of the cut, what the layers before it keep times how long they keep it, at least."""
    spans, last, found = costs.spans, len(costs.layers), [0.0]
    for layer in ways.in_turn(last, way):
        stay_s = spans.down_and_up_s(layer, last) + costs.layers[layer].weight_grad_s
        found.append(found[-1] + costs.layers[layer].activation_bytes * stay_s)
    return found


def _table(times_s: NDArray[np.float64]) -> Table:
    """Return arrays of numbers, not objects: if memory binds, a search has a table for each number of pipelines."""
    return [array("d", row) for row in times_s]


def least_limit_s(limits: Sequence[float], enough: Callable[[float], bool]) -> float | None:
    """Return the least of the ascending ``limits`` that is ``enough``, as all above it are; None if none is."""
    at = bisect_left(limits, True, key=enough)
    return limits[at] if at < len(limits) else None


def fits(table: Table, windows: Sequence[Window], limit_s: float) -> bool:
    """Return whether a pipeline can be cut such that no stage takes longer than ``limit_s``; stages are filled
    greedily.
    """
    start, limit_s = 0, limit_s * SLACK
    for low, high in windows:
        times = table[start]
        if times[low] > limit_s:
            return False
        start = low
        while start < high and times[start + 1] <= limit_s:
            start += 1
    return True


_NONE: tuple[float, tuple[int, ...]] = (inf, ())


def even(
    tables: Sequence[Table], windows: Sequence[Window], limit_s: float, way: Way = ONCE
) -> tuple[int, ...]:
    """Return the split with the least sum of squares within ``limit_s``, where there is one.

    Of equal ones, that with the longer stages behind: first stages keep the most microbatches in flight. Where the way
    turns, all stages keep about as many, and the longer stages are in front, which a microbatch reaches first and
    leaves last. ``tables``: of each stage's worker.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for table, (low, high) in zip(tables, windows, strict=True):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (squares, ends) in best.items():
            times = table[start]
            for end in range(max(low, start + 1), high + 1):
                load = times[end]
                if load > limit_s:
                    break
                known_squares, known_ends = reached.get(end, _NONE)
                this = squares + load * load
                if this > known_squares * SLACK:
                    continue
                # What is equal on paper is so here: costs are rounded, and their sums depend on the order.
                if this * SLACK < known_squares or ((*ends, end) < known_ends) != way.turns:
                    reached[end] = this, (*ends, end)
        best = reached
    return best[windows[-1][1]][1]
