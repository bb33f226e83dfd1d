"""The microbatches of one rank: how many a step has, which one is computed now, and where its samples come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.mcore.loop.balance import Balance, heads
from odyssey_megatron.mcore.loop.batches import Batches
from odyssey_megatron.mcore.loop.data import MicrobatchSource
from odyssey_megatron.mcore.model.lanes import IDLE, expert_part
from odyssey_megatron.mcore.model.rng import INITIAL, LayerSeeds
from odyssey_megatron.plan.layout import Layout


class Microbatches:
    """Translates the microbatches of a plan to those of the step, each of which one lane of a cell computes.

    A plan counts one microbatch for all lanes, and numbers it by its place (``balance.py``).
    """

    def __init__(
        self,
        cell: Cell,
        seeds: LayerSeeds,
        *,
        num_microbatches: int,
        micro_batch_size: int,
        source: MicrobatchSource | None = None,
    ):
        """``num_microbatches``: the number of all microbatches of a step, until :attr:`batches` are known."""
        self._cell, self._seeds, self._micro_batch_size = cell, seeds, micro_batch_size
        self.source = source
        """None: there is no data yet."""
        self.batches = Batches.constant(num_microbatches * micro_batch_size)
        self.balance = Balance()
        self.count = num_microbatches
        """Number of microbatches of the step, or of the evaluation, in all lanes."""
        self.step = -1
        """The step that began last."""
        self._lane = cell.held_lanes[0]

    def of_plan(self, step: int) -> int:
        """The number of microbatches of ``step`` as a plan counts them."""
        size = 0 if step in self.batches.left_out else self.batches.size(step)
        return size // (self._micro_batch_size * self._cell.full_lanes)

    def begin(self, step: int) -> None:
        """Begin ``step``, perhaps once more."""
        self.step = self._seeds.step = step
        self._begin(self.of_plan(step), self.batches.before(step), dealt=step)

    def begin_evaluation(self, first: int, microbatches: int) -> None:
        """Begin an evaluation of ``microbatches`` of the source from ``first`` on, as a plan counts them."""
        assert self.source is not None, "no data yet"
        size = self._cell.full_lanes * self._micro_batch_size
        # What evaluations took before a checkpoint counts, as in a job that never stopped.
        self._seeds.step = INITIAL - 1 - first - self.source.offset // size
        self._begin(microbatches, first * size, dealt=-1)

    def _begin(self, of_plan: int, before: int, *, dealt: int) -> None:
        assert self.source is not None, "no data yet"
        self.count = of_plan * self._cell.full_lanes
        self.source.begin(before)
        self.balance.begin(dealt)

    def go_to(self, microbatch: int, lane: int | None = None) -> int:
        """Switch to the plan's ``microbatch`` in a ``lane`` (None: the first here). Returns its number in the step.

        A rank that is ``IDLE`` computes that of its first lane once more.
        """
        first = self._cell.held_lanes[0]
        self._lane = first if lane is None else lane
        at = first if self.is_idle else self._lane
        number = self._number(microbatch, at)
        self._seeds.microbatch, self._seeds.is_idle = number, self.is_idle
        if self._cell.lane_each > 1:  # a router may draw by the rank (--moe-router-force-load-balancing)
            self._seeds.in_place_of(expert_part(self._cell, at))
        assert self.source is not None
        self.source.go_to(number)
        return number

    def _number(self, microbatch: int, lane: int) -> int:
        return self.balance.in_place(microbatch) * self._cell.full_lanes + lane

    def numbers(self, microbatches: Iterable[int]) -> list[int]:
        """The numbers in the step of a plan's ``microbatches`` in all lanes."""
        return sorted(
            self._number(one, lane) for one in microbatches for lane in range(self._cell.full_lanes)
        )

    def in_all_lanes(self, microbatch: int) -> Iterator[int]:
        """Switch to the plan's ``microbatch`` in each lane of this rank in turn, and yield its number in the step."""
        return (self.go_to(microbatch, lane) for lane in self._cell.held_lanes)

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no lane in this turn."""
        return self._lane == IDLE

    @property
    def in_first_lane(self) -> bool:
        """Whether the one computed now is in the first of this rank's lanes, which a backward comes to last."""
        return self._lane == self._cell.held_lanes[0]

    def look_ahead(self, layout: Layout, worker: int) -> dict[int, int]:
        """Look at the next step's microbatches whose heads ``worker`` would compute; maps each to the first of its
        route.
        """
        if not self.balance.num_totals:
            return {}
        step, lanes = self.step + 1, self._cell.full_lanes
        routes = heads(layout, worker, self.of_plan(step))
        source, before = self.source, self.batches.before(step)
        assert source is not None

        def squares(microbatch: int) -> float:
            return sum(source.squares(before, microbatch * lanes + lane) for lane in self._cell.held_lanes)

        self.balance.look_ahead(step, routes, squares)
        return routes
