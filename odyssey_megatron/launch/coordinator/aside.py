"""Decide when cells that go on without some slow ranks are made whole again.

Nobody can tell whether an idle GPU would be as fast as others again: many are slow only while they are hot. So a cell
is made whole to find out, by the rule by which it was made smaller (``policy/replacing.py``): once going on without the
ranks has cost twice as much training as leaving and coming back does, and twice that again each time they were slow
again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.launch.coordinator.planner import Planner
from odyssey_megatron.launch.coordinator.replacing import LONGEST_S, NOT_OFTENER
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.replacing import share_lost

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Without:
    """The account of one cell that goes on without slow ranks."""

    ranks: tuple[int, ...]
    """The ranks that were slow."""
    looked_s: float
    """The time up to which ``cost_s`` is counted."""
    cost_s: float = 0.0
    """The time of training that going without the ranks has cost so far."""
    lost: tuple[Plan | None, float] = (None, 0.0)
    """(A plan, the share of training that going without the ranks costs under that plan)."""
    price_s: tuple[Plan | None, float] = (None, math.inf)
    """(A plan, the time of training that making the cell whole would cost under that plan)."""


@dataclass(slots=True)
class Aside:
    """Keeps account of what each cell without its slow ranks costs.

    A cell that comes back whole for another reason, such as a new node, is forgotten.
    """

    planner: Planner
    _cells: dict[int, _Without] = field(default_factory=dict)
    _times: dict[int, int] = field(default_factory=dict)
    """Worker -> the number of times that it has gone on without some of its ranks."""

    def note(self, worker: int, ranks: tuple[int, ...], now_s: float) -> None:
        """Note that ``worker`` is to leave, and to come back without ``ranks``."""
        self._cells[worker] = _Without(ranks, now_s)
        self._times[worker] = self._times.get(worker, 0) + 1

    def may_be_whole(
        self, state: ClusterState, live: Plan, now_s: float, has_settled: Callable[[], bool] = lambda: True
    ) -> tuple[frozenset[int], str]:
        """Return which of the smaller cells that can be whole (``ClusterState.can_be_whole``) are to be, and why.

        Call it when nothing is on offer.

        Args:
            has_settled: Says whether the job is to stay with ``live``, rather than being on its way to another plan.
        """
        self._forget_whole(state)
        why, kept = list[str](), set[int]()
        for worker, cell in self._cells.items():
            self._charge(worker, cell, state, live, now_s, has_settled)
            if worker not in state.can_be_whole:
                continue
            times = NOT_OFTENER ** self._times[worker]
            price_s = times * self._price_s(worker, cell, state, live, now_s)
            if cell.cost_s < price_s:
                kept.add(worker)
            else:
                why.append(
                    f"to be without rank(s) {list(cell.ranks)}, which were slow, has cost {cell.cost_s:.1f} s of "
                    f"training, {times:.0f} times what it costs to see whether they still are"
                )
        return state.can_be_whole - kept, "; ".join(why)

    def _forget_whole(self, state: ClusterState) -> None:
        for worker in list(self._cells):
            one = state.workers[worker]
            if one.alive and not one.missing:
                del self._cells[worker]

    def _charge(
        self,
        worker: int,
        cell: _Without,
        state: ClusterState,
        live: Plan,
        now_s: float,
        has_settled: Callable[[], bool],
    ) -> None:
        """Add what ``cell`` has cost since the last look."""
        since_s, cell.looked_s = min(now_s - cell.looked_s, LONGEST_S), now_s
        if worker not in state.alive or worker in state.fresh or not has_settled():
            return
        if cell.lost[0] is not live:
            try:
                lost = share_lost(*self.planner.slowed_s(state, live, [*self._cells]))
            except OdysseyError as error:
                _log.warning("what it costs to go without slow ranks is not known: %s", error)
                lost = 0.0
            cell.lost = live, lost
        cell.cost_s += cell.lost[1] * since_s

    def _price_s(self, worker: int, cell: _Without, state: ClusterState, live: Plan, now_s: float) -> float:
        """Return what making the cell whole costs. Infinite if the others cannot do without the cell meanwhile."""
        if cell.price_s[0] is not live:
            try:
                found = self.planner.without_slow(state, live, worker, now_s, [*self._cells])
                cell.price_s = live, found.price.seconds
            except OdysseyError as error:
                _log.warning("the cell of rank(s) %s stays smaller: %s", list(cell.ranks), error)
                cell.price_s = live, math.inf
        return cell.price_s[1]
