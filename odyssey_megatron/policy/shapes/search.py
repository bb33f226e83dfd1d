"""The search for ragged pipelines, of any lengths, over the workers that are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.names import lengths_text, size_text
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Route, layout_from_routes
from odyssey_megatron.plan.scheduling.gathers import least_late_s, weights_late_s
from odyssey_megatron.plan.scheduling.reductions import buckets
from odyssey_megatron.policy.shapes import partition, ways
from odyssey_megatron.policy.shapes.balanced import Balanced, even
from odyssey_megatron.policy.shapes.bounds import Rows
from odyssey_megatron.policy.shapes.kinds import Slow, Sorts, sort_of, stages_of
from odyssey_megatron.policy.shapes.partition import Partition
from odyssey_megatron.policy.shapes.pipelines import MANY_WORKERS, Pipelines, Shares
from odyssey_megatron.policy.shapes.seating import PipelineShapes
from odyssey_megatron.policy.shapes.splits import Splits
from odyssey_megatron.policy.shapes.turns import TURNS, Preempted
from odyssey_megatron.policy.shapes.ways import ONCE, Way

if TYPE_CHECKING:
    from odyssey_megatron.policy.shapes.slide import Slid


def search_for(
    costs: Costs, budget_bytes: int | None, optimizer_copies: int = 0, *, revisits: bool = False
) -> Search:
    """Return the search for these costs, with what it has worked out so far, which the next decision reuses.

    As in :mod:`odyssey_megatron.plan.scheduling.known`, those for the costs in use and for the next ones are kept. It
    does not know of agreement and optimizers: they count where the layouts that it finds are compared. ``revisits``:
    routes may visit a worker more than once.
    """
    return _search_for(costs.without_ends, budget_bytes, optimizer_copies, revisits)


@lru_cache(maxsize=2)
def _search_for(costs: Costs, budget_bytes: int | None, optimizer_copies: int, revisits: bool) -> Search:
    return Search(costs, budget_bytes, optimizer_copies, revisits=revisits)


class Search:
    """What has been found out about pipelines for one job, kept for all later decisions.

    Chameleon's Algorithm 1 (arXiv 2508.21613) enumerates integer partitions of the workers, remainders of the
    microbatches and remainders of the layers, and simulates each. Here the splits are min-max by construction
    (``splits.py``), and the shares are exact for the rates. First only lengths that differ by one are looked at
    (``balanced.py``): with layers of similar cost, a more uneven partition has a slower slowest stage. All lengths are
    looked at for the most promising numbers of pipelines (``partition.py``).

    Args:
        costs: without a step's end (``Costs.without_ends``).
        optimizer_copies: number of copies of each layer's optimizer state; 0: one with every holder.
        revisits: whether routes that visit workers more than once are looked at, too.
        sums: number of copies of optimizer state to whose owners gradients go, if ``costs`` already count with them.
        way, ample, sorts: see :class:`Splits`.
    """

    def __init__(
        self,
        costs: Costs,
        budget_bytes: int | None = None,
        optimizer_copies: int = 0,
        *,
        revisits: bool = False,
        way: Way = ONCE,
        ample: Splits | None = None,
        sorts: Sorts | None = None,
        sums: int | None = None,
    ) -> None:
        self.splits = Splits(costs, budget_bytes, way=way, sorts=sorts, ample=ample)
        self.copies = optimizer_copies
        self.balanced = Balanced(self.splits, optimizer_copies if sums is None else sums)
        self.revisiting = tuple(
            Search(costs, budget_bytes, optimizer_copies, way=more, sorts=self.splits.sorts)
            for more in ways.MORE
            if revisits
        )
        """Searches for the same job with ways that have more legs."""
        self.turning = tuple(one for one in self.revisiting if one.splits.way.turns)
        """Those of them whose ways turn. ``divide`` and ``slide``, which try few shapes, look at these only: among more
        ways, shapes that are estimated too well leave no try for better ones.
        """
        self.divided: dict[tuple[int, int, int], tuple[PipelineShapes, ...]] = {}
        """What ``policy/shapes/divide.py`` has found."""
        self.slid: dict[tuple[int, int], Slid | None] = {}
        """What ``policy/shapes/slide.py`` has found."""
        self._shared: dict[int, Search] = {}
        self._ranked: dict[tuple[int, int], tuple[tuple[float, int], ...]] = {}
        self._rows: dict[int, Rows] = {}
        self._pipelines: dict[tuple[int, tuple[int, ...], int], Pipelines] = {}
        self._partitions: dict[tuple[int, int, tuple[int, ...]], tuple[Partition, ...]] = {}
        self._thorough: set[tuple[int, int, tuple[int, ...]]] = set()
        """Those of the partitions of many workers that were looked for without anybody waiting."""
        self._late_s: dict[tuple[tuple[tuple[int, ...], int], ...], float] = {}

    # -- the same job, seen otherwise -----------------------------------------------------------------------------

    def sharing(self, pipelines: int) -> Search:
        """Return the search in which each layer's optimizer state is cut over the holders in that many pipelines.

        Only the first three binary digits of large numbers count: little state is kept then, and there are few
        searches.
        """
        rounded = max(0, pipelines.bit_length() - (4 if pipelines < 16 else 3))
        pipelines, splits = pipelines >> rounded << rounded, self.splits
        # Of the weight that embedding and head share, a pipeline has a second holder if these are on two workers.
        ends = 2 if splits.costs.tied and not splits.way.turns else 1
        if splits.budget is None or not 0 < self.copies < pipelines * ends:
            return self
        if pipelines not in self._shared:
            part = self.copies / pipelines
            found = self._keeping(part, part / ends)
            if ends == 2 and found.splits.split(1) is not None:
                found = self._keeping(part, part)
            self._shared[pipelines] = found
        return self._shared[pipelines]

    def _keeping(self, part: float, of_tied: float) -> Search:
        """Return the search in which a holder keeps these parts of each layer's optimizer state, and of the tied
        weight's; all if they are above 1.
        """
        splits, number = self.splits, len(self.splits.costs.layers)
        layers = (
            replace(
                one, optimizer_bytes=round(min(1.0, part if at < number else of_tied) * one.optimizer_bytes)
            )
            for at, one in enumerate(splits.costs.all_layers)
        )
        return Search(
            splits.costs.with_layers(layers),
            splits.budget,
            way=splits.way,
            ample=splits.ample,
            sorts=splits.sorts,
            sums=self.balanced.sums,
        )

    def _with(self, way: Way) -> Search:
        (found,) = (one for one in (self, *self.revisiting) if one.splits.way == way)
        return found

    # -- pipelines of any lengths ---------------------------------------------------------------------------------

    def partitions(
        self,
        num_workers: int,
        num_microbatches: int,
        slow: Sequence[Slow] = (),
        *,
        thorough: bool = False,
    ) -> tuple[Partition, ...]:
        """Return the best partition, of any lengths, into each number of pipelines, fastest first.

        Args:
            slow: the slow workers besides ``num_workers``.
            thorough: nobody waits for it: with many workers more is looked at, which later calls then know. A thread
                that decides goes first, as it does while this thread gives way (``Turns.giving_way``).
        """
        return TURNS.run(
            lambda: self._known_partitions(num_workers, num_microbatches, slow, thorough),
            yields=thorough or TURNS.gives_way,
        )

    def _known_partitions(
        self, num_workers: int, num_microbatches: int, slow: Sequence[Slow], thorough: bool
    ) -> tuple[Partition, ...]:
        key = num_workers, num_microbatches, self.splits.sorts.numbers(sorted(slow, reverse=True))
        more = thorough and num_workers > MANY_WORKERS
        if key not in self._partitions or (more and key not in self._thorough):
            workers, microbatches, sorts = key
            try:
                self._partitions[key] = (
                    partition.ranked_with_slow(self, workers, sorts, microbatches)
                    if sorts
                    else partition.ranked(self, workers, microbatches, thorough=thorough)
                )
            except Preempted:  # it is to take the same way when it starts over: orders are kept elsewhere
                for search in (self, *self.revisiting):
                    for one in (search, *search._shared.values()):
                        one._pipelines.pop((workers, sorts, microbatches), None)
                raise
            if more:
                self._thorough.add(key)
        return self._partitions[key]

    def knows(self, num_workers: int, num_microbatches: int, slow: Sequence[Slow]) -> bool:
        """Whether :meth:`partitions` of these has been called before, so that it takes no time."""
        sorts = self.splits.sorts.known(sorted(slow, reverse=True))
        return sorts is not None and (num_workers, num_microbatches, sorts) in self._partitions

    def pipelines(self, num_workers: int, slow: tuple[int, ...], num_microbatches: int) -> Pipelines:
        """Return what is known of pipelines of these workers."""
        key = num_workers, slow, num_microbatches
        if key not in self._pipelines:
            known = self.pipelines(num_workers, (), num_microbatches) if slow else None
            self._pipelines[key] = Pipelines(self.splits, *key, known, self._rows, self.balanced.sums)
        return self._pipelines[key]

    def shape_of(self, found: Partition, num_workers: int, num_microbatches: int) -> PipelineShapes:
        """Return ``found`` with its stages. Raises PlanInfeasible."""
        search = self._with(found.way)
        if not found.shares:
            return search.shape(num_workers, num_microbatches, found.number)
        splits = search.sharing(found.number).splits
        ends = [splits.split(kind) or () for kind, _ in found.shares]
        starts = [0, *accumulate(map(len, ends))]
        slow = (
            (start + splits.slow_place(kind), splits.slow(kind))
            for start, (kind, _) in zip(starts, found.shares, strict=False)
            if sort_of(kind) >= 0
        )
        return PipelineShapes(
            ends=tuple(ends),
            slow=tuple(slow),
            shares=tuple(count for _, count in found.shares),
            estimate_s=found.estimate_s,
            way=found.way,
        )

    def weights_late_s(self, number: int, num_workers: int, shares: Shares = ()) -> float:
        """Return :func:`odyssey_megatron.plan.scheduling.gathers.weights_late_s` for ``number`` pipelines; balanced
        ones without ``shares``.

        One of several pipelines that are alike is enough for it.
        """
        if not 0 < self.copies < number:
            return 0.0
        splits = self.sharing(number).splits
        kinds = [*Counter(kind for kind, _ in shares).items()] or even(
            num_workers, number, splits.most_stages
        )
        pipelines = tuple((splits.split(kind) or (), count) for kind, count in kinds)
        if pipelines not in self._late_s:
            costs, routes, alike = splits.costs, list[Route](), dict[int, int]()
            for at, (ends, count) in enumerate(pipelines):
                workers = range(len(alike), len(alike) + len(ends))
                routes.append(ways.route(workers, ends, splits.way, (at,)))
                alike |= dict.fromkeys(workers, count)
            layout = layout_from_routes(len(costs.layers), tuple(routes), tied=costs.tied is not None)
            layout = replace(layout, copies=self.copies)
            self._late_s[pipelines] = weights_late_s(layout, buckets(layout, costs, alike), costs, alike)
        return self._late_s[pipelines]

    def waits_s(self, found: Partition, num_workers: int) -> float:
        """Return the part of :meth:`weights_late_s` of ``found`` that its estimate does not include."""
        if found.shares and num_workers <= MANY_WORKERS:
            return least_late_s(self.splits.costs, found.number, self.copies)
        return self._with(found.way).weights_late_s(found.number, num_workers, found.shares)

    def lengths(self, found: Partition, num_workers: int) -> str:
        """Describe the stages of each pipeline, and how routes go through them: ``8+8+7``, or ``125x8+3x7`` if there
        are many.
        """
        counts = [*Counter(stages_of(kind) for kind, _ in found.shares).items()] or even(
            num_workers, found.number, self.splits.most_stages
        )
        return lengths_text(counts) + found.way.text

    # -- balanced pipelines ---------------------------------------------------------------------------------------

    def ranked(self, num_workers: int, num_microbatches: int) -> tuple[tuple[float, int], ...]:
        """Return (estimated step, number of pipelines) of every balanced shape that fits, fastest first.

        In large clusters, of all numbers of pipelines with the same lengths only the least and the greatest are looked
        at.
        """
        if (num_workers, num_microbatches) not in self._ranked:
            most = min(num_workers, num_microbatches)
            numbers = set(range(1, most + 1))
            if num_workers > MANY_WORKERS:
                lengths = range(1, min(num_workers, self.splits.most_stages) + 1)
                numbers = {n for a in lengths for n in (num_workers // a, num_workers // a + 1) if n <= most}
            estimates = ((self.estimate_s(num_workers, num_microbatches, n), n) for n in numbers)
            found = sorted((estimate_s, n) for estimate_s, n in estimates if estimate_s is not None)
            self._ranked[num_workers, num_microbatches] = tuple(found)
        return self._ranked[num_workers, num_microbatches]

    def estimate_s(self, num_workers: int, num_microbatches: int, pipelines: int) -> float | None:
        """Return the estimated step of the balanced shape with this number of pipelines; None if it does not fit."""
        return self.sharing(pipelines).balanced.estimate_s(num_workers, num_microbatches, pipelines)

    def shape(self, num_workers: int, num_microbatches: int, pipelines: int) -> PipelineShapes:
        """Return the balanced shape with this number of pipelines.

        Raises:
            PlanInfeasible: a stage would not fit; says how much memory the leanest split needs.
        """
        own = self.sharing(pipelines)
        found = own.balanced.shape(num_workers, num_microbatches, pipelines)
        if found is None:
            raise PlanInfeasible(own.why_not(num_workers // pipelines))
        return found

    def why_not(self, stages: int) -> str:
        """Describe what keeps a pipeline of ``stages`` stages from fitting."""
        costs = self.splits.costs
        stages, spans = min(stages, self.splits.most_stages), costs.spans
        ends = Splits(costs).split(stages) or ()
        need = max(spans.kept_bytes(a, b) + spans.least_bytes(a, b) for a, b in pairwise((0, *ends)))
        needs, has = size_text(need), size_text(self.splits.budget or 0)
        return f"a pipeline of {stages} stage(s) needs {needs} a worker, and {has} may be used"
