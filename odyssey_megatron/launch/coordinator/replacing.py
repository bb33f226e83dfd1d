"""Decides when a slow worker leaves: once its slowness has cost as much training as leaving and coming back does.

Fresh processes then take its place, or its cell comes back without its slow ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.launch.coordinator.planner import Planner
from odyssey_megatron.launch.coordinator.said import Events
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.policy.replacing import (
    Smaller,
    WithoutThem,
    row,
    row_smaller,
    share_lost,
    with_row,
)

_log = logging.getLogger(__name__)

_EVERY_S = 1.0
LONGEST_S = 30.0
"""The most time between two looks that counts: beyond it another look took long, or the machine was asleep."""
_LEAST_LOST = 0.03
"""Share of the training that slowness has to cost; for less no worker leaves, however long it lasts."""
NOT_OFTENER = 2.0
"""After each replacement that was slow as well, slowness has to cost this many times as much: the fault lies deeper."""
_LEAST_GAIN = 0.03
"""The least gain in step time for which a cell goes on without its slow ranks."""

Named = Mapping[int, tuple[int, ...]]
"""Worker of a slow cell -> the ranks of it that the others wait for."""
NOBODY: Named = MappingProxyType({})


@dataclass(slots=True)
class _Account:
    """The account of a worker that is slow, or was: what its slowness has cost."""

    incarnations: tuple[int, ...]
    """Incarnations of its ranks: the account holds for these processes."""
    cost_s: float = 0.0
    """Seconds of training that all slowness has cost while this worker was slow, since its processes began."""
    lost: float = 0.0
    """Share of the training that slowness costs now; 0.0 if this worker is not slow."""
    offered: bool = False
    """Whether it is on offer that this worker leaves."""
    named: tuple[int, ...] = ()
    """The ranks that make its cell slow, if they are known."""
    without: tuple[int, ...] = ()
    """The ranks of these that its cell is to come back without, by the offer."""
    said: set[str] = field(default_factory=set)
    """Kinds of reasons for which it stays that the user has been told."""
    priced: tuple[Plan | None, float] = (None, -math.inf)
    """The plan, and the value of ``cost_s``, when the price was last worked out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A worker that is to leave, and the plan for the others meanwhile; or, with ``gives_first``, for the time
    before.
    """

    worker: int
    plan: Plan
    why: str
    rows: tuple[CandidateRow, ...]
    without: tuple[int, ...] = ()
    """Ranks of its cell that do not come back with it."""
    gives_first: bool = False
    """See ``WithoutThem``: the worker does not leave yet."""


@dataclass(slots=True)
class Replacing:
    """Keeps account of what each slow worker has cost, and decides which one leaves.

    Args:
        acts: Whether workers leave; otherwise nothing is done.
        restarts: Whether a worker that leaves is started again (``--odyssey-respawn``).
    """

    planner: Planner
    journal: Events
    say: Callable[[str], None]
    acts: bool
    restarts: bool
    _accounts: dict[int, _Account] = field(default_factory=dict)
    _times: dict[int, int] = field(default_factory=dict)
    """Worker -> the number of times it has been replaced, or has come back without ranks."""
    _looked_s: float = -math.inf
    _known: tuple[Plan | None, tuple[float, ...]] = (None, ())
    """The plan and the speeds for which ``_Account.lost`` was worked out."""
    _away_until_s: dict[int, float] = field(default_factory=dict)
    """Worker that has left, or was asked to -> the time from which it is not waited for any more."""

    def look(self, state: ClusterState, live: Plan, now_s: float, named: Named = NOBODY) -> Leaving | None:
        """Return the worker that is to leave after the step at hand, if any. ``state`` has the speeds as they are
        known.
        """
        since_s = now_s - self._looked_s
        if not self.acts or since_s < _EVERY_S:
            return None
        self._looked_s = now_s
        self._note_gone(state)
        self._away_until_s = {
            one: until_s for one, until_s in self._away_until_s.items() if not state.workers[one].alive
        }
        slow = [one.worker for one in state.workers if one.alive and one.speed < 1.0]
        for account in self._accounts.values():
            account.cost_s += account.lost * min(since_s, LONGEST_S)
        self._share(state, live, slow)
        for worker in slow:
            account = self._accounts[worker]
            account.named = named.get(worker, account.named)
        if any(now_s < until_s for until_s in self._away_until_s.values()):
            return None  # workers leave one after the other
        for worker in sorted(slow, key=lambda one: state.workers[one].speed):
            if found := self._judged(worker, state, live, now_s):
                return found
        return None

    def is_open(self, now_s: float) -> bool:
        """Whether there is an account, or a worker that is waited for."""
        return bool(self._accounts) or any(now_s < until_s for until_s in self._away_until_s.values())

    def row(
        self, state: ClusterState, live: Plan, now_s: float, named: Named = NOBODY
    ) -> tuple[CandidateRow, ...]:
        """Return rows for the table of another decision: what it would cost and gain to replace the slowest worker.

        A second row, if its slow ranks are known, is about its cell going on without them.
        """
        slow = [one.worker for one in state.workers if one.alive and one.speed < 1.0]
        if not (self.acts and self.restarts and slow):
            return ()
        worker = min(slow, key=lambda one: state.workers[one].speed)
        try:
            found = self.planner.without_slow(state, live, worker, now_s)
        except OdysseyError:
            return ()
        cost_s = self._accounts[worker].cost_s if worker in self._accounts else 0.0
        rows = [row(found.price, cost_s, self._threshold_s(worker, found), chosen=False)]
        smaller = self._smaller(worker, named.get(worker, ()), state, live, now_s)
        if isinstance(smaller, Smaller):
            rows.append(row_smaller(smaller, found.price, cost_s, chosen=False))
        elif smaller:
            rows.append(_impossible(smaller))
        return tuple(rows)

    def _note_gone(self, state: ClusterState) -> None:
        """Close the accounts of workers that are gone, or that have other processes by now."""
        incarnations = dict(state.incarnations)
        for worker, account in list(self._accounts.items()):
            one = state.workers[worker]
            now = tuple(incarnations.get(rank, 0) for rank in one.ranks)
            if one.alive and now == account.incarnations:
                continue
            del self._accounts[worker]
            if account.offered:
                self._times[worker] = self._times.get(worker, 0) + 1
                name, ranks = ("set_aside", account.without) if account.without else ("replaced", one.ranks)
                self.journal.event(name, echo=True, slow_ranks=list(ranks), cost_s=account.cost_s)

    def _share(self, state: ClusterState, live: Plan, slow: list[int]) -> None:
        """Work out what share of training slowness costs now, unless plan and speeds are the same as before."""
        speeds, incarnations = tuple(one.speed for one in state.workers), dict(state.incarnations)
        if self._known[0] is live and self._known[1] == speeds:
            return
        self._known = live, speeds
        lost = 0.0
        if slow:
            try:
                lost = share_lost(*self.planner.slowed_s(state, live))
            except OdysseyError as error:
                _log.warning("what slow workers cost is not known: %s", error)
        for worker in slow:
            of_ranks = tuple(incarnations.get(rank, 0) for rank in state.workers[worker].ranks)
            self._accounts.setdefault(worker, _Account(of_ranks))
        for worker, account in self._accounts.items():
            account.lost = lost if worker in slow else 0.0

    def _judged(self, worker: int, state: ClusterState, live: Plan, now_s: float) -> Leaving | None:
        account, ranks = self._accounts[worker], list(state.workers[worker].ranks)
        account.offered, account.without = False, ()  # nothing is on offer now
        plan, cost_s = account.priced
        if account.lost < _LEAST_LOST or (plan is live and account.cost_s < 1.1 * cost_s + 1.0):
            return None
        account.priced = live, account.cost_s
        try:
            found = self.planner.without_slow(state, live, worker, now_s)
        except OdysseyError as error:
            self._stays(account, "needed", f"rank(s) {ranks} are slow, and cannot be done without: {error}")
            return None
        threshold_s, smaller = self._threshold_s(worker, found), None
        if self.restarts and self._times.get(worker, 0):  # fresh processes were slow as well
            smaller = self._smaller(worker, account.named, state, live, now_s)
        if isinstance(smaller, Smaller) and smaller.gain(found.price) >= _LEAST_GAIN:
            return self._without(worker, account, found, smaller, now_s)
        if account.cost_s < threshold_s:
            return None
        if not self.restarts:
            cost = f"rank(s) {ranks} have cost {account.cost_s:.1f} s of training by being slow, and replacing them"
            remedy = "--odyssey-respawn has fresh processes take their place"
            self._stays(account, "not started", f"{cost} would cost {threshold_s:.1f} s: {remedy}")
            return None
        why = (
            f"rank(s) {ranks} have cost {account.cost_s:.1f} s of training by being slow, as much as it costs to "
            f"replace them: they leave, and fresh processes take their place"
        )
        chosen = row(found.price, account.cost_s, threshold_s, chosen=True)
        return self._leaving(worker, found, why, chosen, now_s)

    def _without(
        self, worker: int, account: _Account, found: WithoutThem, smaller: Smaller, now_s: float
    ) -> Leaving | None:
        """Have its cell go on without its slow ranks, once that would have saved what it costs."""
        if smaller.saved_s(found.price, account.cost_s) < found.price.seconds:
            return None
        why = (
            f"rank(s) {list(smaller.without)} have cost {account.cost_s:.1f} s of training by being slow, as their "
            f"fresh processes are, too: their cell leaves, and comes back without them, for steps that are "
            f"{smaller.gain(found.price):.0%} faster"
        )
        chosen = row_smaller(smaller, found.price, account.cost_s, chosen=True)
        return self._leaving(worker, found, why, chosen, now_s, smaller.without)

    def _leaving(
        self,
        worker: int,
        found: WithoutThem,
        why: str,
        chosen: CandidateRow,
        now_s: float,
        without: tuple[int, ...] = (),
    ) -> Leaving:
        if found.gives_first:
            why += ", once others have the layers that they alone have"
        else:
            account = self._accounts[worker]
            account.offered, account.without = True, without
            self._away_until_s[worker] = now_s + 3 * found.price.away_s
        return Leaving(
            worker=worker,
            plan=found.plan,
            why=why,
            rows=with_row(found.rows, chosen),
            without=without,
            gives_first=found.gives_first,
        )

    def _smaller(
        self, worker: int, named: tuple[int, ...], state: ClusterState, live: Plan, now_s: float
    ) -> Smaller | str:
        """Return its cell without the ranks that make it slow, or why that cannot be; "" if no such ranks are known."""
        if not named or not set(named) < set(state.workers[worker].ranks):
            return ""
        try:
            return self.planner.smaller(state, live, worker, named, now_s)
        except OdysseyError as error:
            return f"the cell of rank(s) {list(named)} without them: {error}"

    def _threshold_s(self, worker: int, found: WithoutThem) -> float:
        return found.price.seconds * NOT_OFTENER ** self._times.get(worker, 0)

    def _stays(self, account: _Account, kind: str, why: str) -> None:
        if kind not in account.said:
            account.said.add(kind)
            self.say(f"[odyssey] {why}")


def _impossible(reason: str) -> CandidateRow:
    return CandidateRow(
        name="smaller", step_s=None, transition_s=None, score=None, chosen=False, reason=reason
    )
