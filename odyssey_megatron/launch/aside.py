"""Cells that go on without slow ranks of theirs, and when they are whole again.

Whether a GPU that has nothing to do would be as fast as others again nobody can tell: many are slow only while they are
hot. So a cell is made whole to see, by the rule that it was made smaller by (``policy/replacing.py``): once going on so
has cost twice as much training as leaving and coming back does, and twice that each time its ranks were slow again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.launch.planner import Planner
from odyssey_megatron.launch.replacing import LONGEST_S, NOT_OFTENER
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.replacing import share_lost

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Without:
    """Of one cell."""

    ranks: tuple[int, ...]
    """That were slow."""
    looked_s: float
    cost_s: float = 0.0
    """Of training, that going without them has cost."""
    lost: tuple[Plan | None, float] = (None, 0.0)
    """The plan, and the share of the training that this costs with it."""
    price_s: tuple[Plan | None, float] = (None, math.inf)
    """The plan, and what it would cost to be whole."""


@dataclass(slots=True)
class Aside:
    """Keeps account of what each such cell costs. One that comes back whole for another reason, as a new node, is known
    no more.
    """

    planner: Planner
    _cells: dict[int, _Without] = field(default_factory=dict)
    _times: dict[int, int] = field(default_factory=dict)
    """Worker -> how often it has gone on without some."""

    def note(self, worker: int, ranks: tuple[int, ...], now_s: float) -> None:
        """``worker`` is to leave, and to come back without these."""
        self._cells[worker] = _Without(ranks, now_s)
        self._times[worker] = self._times.get(worker, 0) + 1

    def may_be_whole(
        self, state: ClusterState, live: Plan, now_s: float, has_settled: Callable[[], bool] = lambda: True
    ) -> tuple[frozenset[int], str]:
        """Of the smaller cells that can be whole (``ClusterState.can_be_whole``) those that are to be, and why. Call it
        where nothing is on offer. ``has_settled``: whether the job is to go on with ``live``, and is not on its way.
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
        """What has been lost since the last look."""
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
        """Of being whole; infinite where nobody can be without the cell meanwhile."""
        if cell.price_s[0] is not live:
            try:
                found = self.planner.without_slow(state, live, [worker], now_s, [*self._cells])
                cell.price_s = live, found.price.seconds
            except OdysseyError as error:
                _log.warning("the cell of rank(s) %s stays smaller: %s", list(cell.ranks), error)
                cell.price_s = live, math.inf
        return cell.price_s[1]
