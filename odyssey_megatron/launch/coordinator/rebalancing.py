"""What the coordinator does about slow workers and links: it keeps track of them, and changes the plan if that pays."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from odyssey_megatron.cluster.state import ClusterState, with_expert_loads, with_speeds
from odyssey_megatron.diagnosis.change import RECENT
from odyssey_megatron.diagnosis.lasting import COMPUTE_S, LINK_S, remaining_s
from odyssey_megatron.diagnosis.verdicts import UNEVEN_STAGE, Diagnosis, Verdict, slow_nodes
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.launch.coordinator.planner import Planner
from odyssey_megatron.launch.coordinator.said import Events
from odyssey_megatron.launch.coordinator.slow_ways import SlowWays, with_slow_ways
from odyssey_megatron.launch.coordinator.slow_workers import LEAST_SLOWNESS, SlowWorkers
from odyssey_megatron.launch.coordinator.slowness import Slowness
from odyssey_megatron.names import layer_names
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.decided import Decided

_log = logging.getLogger(__name__)

_WORTH_A_LINE = 0.02
_AT_MOST_EVERY_S, _AT_LEAST_EVERY_S = 5.0, 300.0
"""Limits of the time between two lines in the journal that say how slow each worker is. The first is for lines about a
factor that has moved by ``_WORTH_A_LINE``; after the second a line comes in any case.
"""
_EACH_EVERY_S = 0.05
"""Seconds per worker that ``_AT_MOST_EVERY_S`` grows to: of hundreds some always move, and a line contains them all."""
_ANOTHER_LOAD = 0.05
"""The least relative change in what experts load gangs with that decisions go by: routers change all the time, and
what was worked out for the loads of before should hold."""
_LEAST_GAIN = 0.03
"""The least gain in step time for which the plan changes: a smaller one may be noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """A better plan to go to between two steps, and why."""

    decided: Decided
    why: str


class Rebalancing:
    """Looks at each diagnosis once, and proposes a better plan for what it says.

    Args:
        acts: Whether plans change; otherwise the user is only told what that would gain.
        seeks: Whether the job began with the best layout by estimated costs, and is to move to a better one, if there
            is one, by measured costs.
    """

    def __init__(
        self,
        planner: Planner,
        journal: Events,
        say: Callable[[str], None],
        *,
        acts: bool,
        seeks: bool = False,
    ):
        self._planner, self._journal, self._acts = planner, journal, acts
        self._seeks, self._has_sought = seeks, False
        self._seen: Diagnosis | None = None
        self._told = Slowness(planner, journal, say)
        self._workers = SlowWorkers(self._told)
        self._links, self._sums = SlowWays(self._told), SlowWays(self._told)
        self._said: set[tuple[str, tuple[int, int], int, tuple[int, ...]]] = set()
        self._unseen: dict[str, int] = {}
        """Kind of a finding that is about no worker or node, and is not over -> the number of measured steps since it
        was seen.
        """
        self._newest = -1
        self._written: dict[int, float] = {}
        self._written_s = -math.inf

    def look(
        self, diagnosis: Diagnosis | None, state: ClusterState, live: Plan, now_s: float
    ) -> tuple[ClusterState, Better | None]:
        """Return ``state`` with the speeds that decisions go by, and a better plan than ``live``, if there is one to go
        to.
        """
        if diagnosis is None or not self.is_new(diagnosis):
            return state, None
        self._seen = diagnosis
        self._note_measured(diagnosis, now_s)
        state = self._with_expert_loads(diagnosis, state)
        before, state = state, state if self._acts else with_speeds(state, self._workers.speeds)
        of_ways = (*diagnosis.links.verdicts, *diagnosis.sums.verdicts)
        self._told.doubt_only([*diagnosis.slow, *(one.links for one in of_ways)])
        state, new = self._workers.look(diagnosis, state, live, now_s)
        others = self._note_others(diagnosis, live, state)
        known: tuple[Diagnosis, ClusterState, Plan, float] = (diagnosis, state, live, now_s)
        new += self._links.look(diagnosis.links, self._sums.slowed.values(), *known)
        new += self._sums.look(diagnosis.sums, self._links.slowed.values(), *known)
        slowed = [*self._links.slowed.values(), *self._sums.slowed.values()]
        state = with_slow_ways(state, slowed, diagnosis.links)
        why = others + new
        better = self._compare("; ".join(why), state, live, now_s, is_new=bool(new)) if why else None
        if not why and self._is_to_seek(diagnosis, state):
            better = self._compare("layers' costs are measured", state, live, now_s, is_new=False, acts=True)
            return before, better
        return (state, better) if self._acts else (before, None)

    def is_new(self, diagnosis: Diagnosis | None) -> bool:
        """Whether ``diagnosis`` was not looked at yet."""
        return diagnosis is not None and diagnosis is not self._seen

    def missed(self, diagnosis: Diagnosis | None) -> None:
        """Look at ``diagnosis`` no more: it is of a job that has changed since."""
        self._seen = diagnosis

    def _is_to_seek(self, diagnosis: Diagnosis, state: ClusterState) -> bool:
        """Whether to look now for a better layout by measured costs.

        That is done once, as soon as costs are measured and no worker is slow or dead, and once more each time all are
        back. A worker counts as slow here from ``LEAST_SLOWNESS`` on: chips are not alike, and of hundreds of workers
        one always takes a little longer.
        """
        is_any_slow = any(1 / speed >= LEAST_SLOWNESS for speed in diagnosis.slow.values())
        if not self._is_back(state) or is_any_slow or diagnosis.links.slow:
            self._has_sought &= self._is_back(state)
            return False
        if not self._seeks or self._has_sought or not diagnosis.factors:
            return False
        self._has_sought = True
        return True

    def _compare(
        self,
        why: str,
        state: ClusterState,
        live: Plan,
        now_s: float,
        *,
        is_new: bool,
        acts: bool = False,
    ) -> Better | None:
        """Return the best plan for ``state`` if it is better than ``live``; else tell the user that the plan stays.

        Args:
            why: What has changed, for the user.
            is_new: Whether speeds have changed since the last look.
            acts: Act even if ``Rebalancing`` otherwise only says what acting would gain.
        """
        known = (self._workers, self._links, self._sums)
        ages_s = [now_s - since_s for slow in known for since_s in slow.began_s.values()]
        mean_s = COMPUTE_S if self._workers.speeds else LINK_S
        lasts_s = remaining_s(min(ages_s), self._told.lasted_s, mean_s) if ages_s else math.inf
        try:
            found = self._planner.rebalance(state, live, now_s, lasts_s, anew=not is_new)
        except OdysseyError as error:
            _log.warning("no plan for the speeds of now: %s", error)
            return None
        is_back = is_new and self._is_back(state)
        if is_back:  # so that an uneven stage is reported once more
            self._said = {said for said in self._said if said[0] != UNEVEN_STAGE}
        if found.decided.plan.layout == live.layout or (found.gain < _LEAST_GAIN and not is_back):
            self._told.say(f"[odyssey] {why}: the plan stays, as no other is {_LEAST_GAIN:.0%} faster")
            return None
        gain = f"steps {found.gain:.0%} faster" if found.gain >= _LEAST_GAIN else "as before"
        if not (self._acts or acts):
            policy = found.decided.plan.policy
            self._told.say(f"[odyssey] {why}: with --odyssey-rebalance auto, {policy} would make {gain}")
            return None
        return Better(decided=found.decided, why=f"{why}: {gain}")

    @staticmethod
    def _is_back(state: ClusterState) -> bool:
        """Whether no worker is slow or dead any more: then the first plan is as good as any, and the user has chosen
        it.
        """
        whole = all(worker.alive and worker.pace == 1.0 for worker in state.workers)
        return whole and not state.slow_links and not state.slow_sums

    def _note_others(self, diagnosis: Diagnosis, live: Plan, state: ClusterState) -> list[str]:
        """Report findings about nodes and stages; print each only once as long as the same workers live.

        Returns:
            The new findings for which layers could be moved.
        """
        nodes = {worker.worker: worker.node for worker in state.workers if worker.alive}
        found, together = list[str](), slow_nodes(self._workers.speeds, nodes)
        for over in {said for said in self._said if said[2] not in (-1, *(one.node for one in together))}:
            self._said.remove(over)
            self._told.event(
                over[0], _ranks_on(state, over[2]), 1.0, "not all of its workers are slow any more"
            )
        self._note_over(diagnosis)
        for one in (*diagnosis.verdicts, *together):
            key = one.kind, one.layers, one.node, state.alive
            is_new, is_open = key not in self._said, one.node >= 0 or one.kind in self._unseen
            if one.worker >= 0 or (is_open and not is_new):
                continue
            self._said = {said for said in self._said if said[-1] == state.alive} | {key}
            if one.node < 0:
                self._unseen[one.kind] = 0
            where = _where(one, live)
            ranks, evidence = _ranks_on(state, one.node), where + one.evidence
            self._told.event(one.kind, ranks, 1 / one.factor, evidence, echo=is_new)
            if one.kind == UNEVEN_STAGE and is_new:
                found.append(f"{where}{one.factor:.2f} times the time of other stages")
        return found

    def _note_over(self, diagnosis: Diagnosis) -> None:
        """Note that findings about no worker or node, as an uneven stage, are over if they were not seen for a while.

        Live views then stop showing them. They may come and go, so this is not printed.
        """
        if diagnosis.newest > self._newest:
            self._newest, seen = diagnosis.newest, {one.kind for one in diagnosis.verdicts}
            self._unseen = {kind: 0 if kind in seen else steps + 1 for kind, steps in self._unseen.items()}
        for kind in [kind for kind, steps in self._unseen.items() if steps >= RECENT]:
            del self._unseen[kind]
            self._told.event(kind, [], 1.0, "the last measured steps do not show it any more", echo=False)

    def _note_measured(self, diagnosis: Diagnosis, now_s: float) -> None:
        """Write the measured factors and costs to the journal, for live views, as they change."""
        factors = {worker: round(factor, 3) for worker, factor in diagnosis.factors.items()}
        known = self._written
        moved = factors.keys() != known.keys() or any(
            abs(factor - known[worker]) >= _WORTH_A_LINE for worker, factor in factors.items()
        )
        age_s, often_s = now_s - self._written_s, max(_AT_MOST_EVERY_S, _EACH_EVERY_S * len(factors))
        if factors and (age_s >= _AT_LEAST_EVERY_S or (moved and age_s >= often_s)):
            self._written, self._written_s = factors, now_s
            costs = [
                [piece.first, piece.last, piece.kind, alpha]
                for piece, (alpha, _) in diagnosis.costs.items()
                if piece.last > piece.first
            ]
            self._journal.event("measured", factors=list(factors.items()), costs=costs)

    def _with_expert_loads(self, diagnosis: Diagnosis, state: ClusterState) -> ClusterState:
        """Return ``state`` with what is measured of experts, if that is new, and tell the user."""
        before, loads = dict(state.workers[0].expert_loads), diagnosis.expert_loads
        if all(
            size in before and abs(load / before[size] - 1) < _ANOTHER_LOAD for size, load in loads.items()
        ):
            return state
        self._journal.event(
            "expert_loads",
            loads=[[size, round(load, 3)] for size, load in loads.items()],
            experts=state.workers[0].experts,
        )
        (whole, busiest), *smaller = sorted(loads.items(), reverse=True)
        if busiest >= LEAST_SLOWNESS:
            of_others = "".join(f", {load:.2f} times in one of {size} ranks" for size, load in smaller)
            self._told.say(
                f"[odyssey] experts: the busiest rank of a gang of {whole} gets {busiest:.2f} times the mean of tokens"
                f"{of_others}"
            )
        return with_expert_loads(state, loads)


def _ranks_on(state: ClusterState, node: int) -> list[int]:
    return [rank for worker in state.workers if worker.node == node for rank in worker.ranks]


def _where(verdict: Verdict, live: Plan) -> str:
    layers = list(range(*verdict.layers))
    return f"{layer_names(layers, live.layout.num_layers)}: " if layers else ""
