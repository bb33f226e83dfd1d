"""The coordinator: the only writer of membership, generations and plans. A thread in the first agent.

It reads one queue of events, applies them to the ``ClusterState``, and publishes a new generation whenever
membership has changed or somebody asks for fresh groups.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from odyssey_megatron.cluster.events import (
    Event,
    GenerationLive,
    NodeLost,
    OfferFailed,
    RankDied,
    RankFinished,
    RankJoined,
    Retry,
)
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import (
    ClusterState,
    apply,
    initial_state,
    next_generation,
    offer_generation,
    without_fresh,
)
from odyssey_megatron.codec import from_json, to_json, to_jsonable
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import (
    EXIT_ALIKE,
    EXIT_BAD_INPUT,
    EXIT_LAYERS_LOST,
    EXIT_UNSOUND,
    ConfigError,
    ControlPlaneLost,
    LayersLost,
    OdysseyError,
)
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch.control import Control, EventReader
from odyssey_megatron.launch.generations import send_generation
from odyssey_megatron.launch.learning import Learning
from odyssey_megatron.launch.leases import Leases
from odyssey_megatron.launch.member import FINISHED
from odyssey_megatron.launch.offer_tries import OfferTries
from odyssey_megatron.launch.planner import Planner
from odyssey_megatron.launch.rebalancing import Rebalancing
from odyssey_megatron.launch.verdict import Verdict, after_training, before_training, by_signal
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.names import layer_names
from odyssey_megatron.plan.generation import CandidateRow, Generation
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.table import candidates_table

_log = logging.getLogger(__name__)

_COALESCE_S = 0.003
"""Deaths of one incident reach the queue within this time of each other: one generation for all of them."""
_TICK_S = 0.1
_MAX_FRUITLESS = 20
"""So many requests for fresh groups in a row end the job, if meanwhile nothing was done and nobody died or joined."""
_FRUITLESS = (
    "{count} generations in a row have come to nothing: not one step was done in them, though nobody died. In the last "
    "one {wanted}. Something fails on all ranks alike; their logs may say what. Restart from the last checkpoint."
)
_WAITS_S = 60.0
"""How often it is said for whom the job waits behind its last step: what they still write may be what it was for."""
_STOP_GRACE_S = 1.5
"""How long ranks may take to leave by themselves after a stop; then they are told to (``verdict.ENDS_S``)."""


class Coordinator:
    """One job, from its ranks' first words to the verdict.

    Args:
        nodes: node of each rank.
        say: shows a text to the user.
    """

    def __init__(
        self,
        *,
        control: Control,
        events: EventReader,
        config: OdysseyConfig,
        nodes: Mapping[int, int],
        planner: Planner,
        journal: Journal,
        say: Callable[[str], None],
    ):
        self._control, self._queue, self._planner = control, events, planner
        self._journal, self._say = journal, say
        self._observes = config.mode == "observe"
        self._world_size = len(nodes)
        self._nodes = tuple(nodes[rank] for rank in sorted(nodes))
        self._state = initial_state(nodes=self._nodes, started_s=time.monotonic())
        self._leases = Leases(control, sorted(set(nodes.values()) - {0}), config.node_lease_s)
        self._exits: dict[int, int] = {}
        self._current: Generation | None = None
        self._live_plan: Plan | None = None
        """Of the last generation that every member reported live; its holders are complete."""
        self._start_plan: Plan | None = None
        self._offered: Generation | None = None
        self._learning = Learning(planner, control, self._world_size)
        self._target: Callable[[], Plan] | None = None
        """Where to go from the live plan, between two steps."""
        self._target_why = ""
        self._rebalancing = Rebalancing(planner, journal, say, acts=config.rebalance == "auto")
        self._fruitless, self._early, self._tries = 0, -1, OfferTries()
        self._unheard: list[Event] = []
        self._done = 0
        """Pieces of common work, as far as generations that began have said."""

    def run(self) -> Verdict | None:
        """Until the job ends; publishes the verdict. None if the store is gone."""
        try:
            verdict = self._await_job() or (
                self._observe() if self._observes else self._start() or self._train()
            )
        except ControlPlaneLost:
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, agents and ranks must hear of an end
            self._say(traceback.format_exc())
            verdict = Verdict(code=1, why=f"the coordinator failed: {error!r}. Please report this.")
        finally:
            self._learning.close()
        verdict = by_signal(verdict, self._exits)
        self._journal.event("job_finished", verdict=verdict.why or "done", exit_code=verdict.code)
        if verdict.why:
            self._say(f"[odyssey] {verdict.why}")
        verdict = replace(verdict, nodes=tuple(self._leases.nodes))
        self._control.put(keys.VERDICT, to_json(verdict))
        return verdict

    # -- before training ------------------------------------------------------------------------------

    def _await_job(self) -> Verdict | None:
        """Until all ranks have posted the job; a verdict if one of them ends first."""
        posted = [keys.digest_key(rank) for rank in range(self._world_size)]
        while not self._control.has(posted):
            found = self._events(_TICK_S / 2)
            if found and self._control.has(posted):
                # Who has died since then has died in a job that runs: his agent saw it so, too.
                self._unheard = found
                return None
            for event in found:
                if isinstance(event, NodeLost):
                    return Verdict(code=1, why=f"node {event.node} was lost before training started.")
                if isinstance(event, RankDied):
                    self._exits[event.rank] = event.code
                    refused = self._control.peek(keys.REFUSED)
                    if verdict := before_training(event.rank, self._exits, self._world_size, refused):
                        return verdict
        return None

    def _start(self) -> Verdict | None:
        try:
            posted = json.loads(self._control.get(keys.JOB))
            job = from_json(JobSpec, posted["job"])
            job.check(self._world_size)
            self._state = initial_state(
                nodes=self._nodes,
                started_s=self._state.started_s,
                cell_size=job.cell_size,
            )
            decided = self._planner.start(job, self._state, posted["profile"])
        except (OdysseyError, ValueError) as error:
            code = EXIT_BAD_INPUT if isinstance(error, ConfigError) else 1
            return self._stop(str(error), code)
        self._start_plan = decided.plan
        layout = decided.plan.layout
        if alone := [layer for layer, states in enumerate(layout.states) if len(states) == 1]:
            self._say(
                f"[odyssey] one rank or cell alone has {layer_names(alone, layout.num_layers)}: losing it ends the "
                f"job, exit code {EXIT_LAYERS_LOST}. --odyssey-redundancy state or more data parallelism survives."
            )
        self._publish(
            decided.plan, previous=None, why="start", dead=(), rows=decided.rows, began_s=time.monotonic()
        )
        return None

    def _observe(self) -> Verdict:
        """Says what would be done about the first failure, and ends the job as a launcher does that knows no better."""
        hopeless = self._start()  # the ranks do not read the generations that are published
        left, dead = set(range(self._world_size)), list[int]()
        while left and not dead:
            deaths = [one for one in self._batch() if isinstance(one, (RankDied, NodeLost))]
            ended = {one.rank for one in deaths if isinstance(one, RankDied) and one.code == 0}
            deaths = [one for one in deaths if not (isinstance(one, RankDied) and one.rank in ended)]
            before, left = self._state, left - ended
            for event in deaths:
                self._apply(event)
            dead = sorted(set(before.ranks) - set(self._state.ranks))
        if not dead:
            return Verdict(code=0)
        self._note_deaths(dead, deaths)
        verdict = hopeless or self._recover(dead, "observed")
        would = f"stopped: {verdict.why}" if verdict else "gone on as decided above."
        lost = f"the loss of rank(s) {dead} ends the job, since --odyssey observe only looks on"
        return Verdict(code=1, why=f"{lost}; --odyssey recover would have {would}")

    # -- training -------------------------------------------------------------------------------------

    def _train(self) -> Verdict:
        while True:
            before, wanted, deaths, lost = self._state, "", [], set[int]()
            for event in self._batch():
                if isinstance(event, Retry) and event.generation in (before.generation, before.offered):
                    wanted = f"rank {event.rank} asked for it: {event.reason}"
                if isinstance(event, (RankDied, NodeLost)):
                    deaths.append(event)
                living = set(self._state.ranks)
                self._apply(event)
                lost |= living - set(self._state.ranks)  # also of a rank that is back already
            dead = sorted(lost)
            if dead:
                self._note_deaths(dead, deaths)
                if verdict := self._hopeless(dead):
                    return verdict
            if (self._state.members & set(self._state.ranks)) - lost <= self._state.finished:
                return self._finish()
            self._fruitless = 0 if dead else self._fruitless + bool(wanted)
            if self._fruitless > _MAX_FRUITLESS:
                return self._stop(_FRUITLESS.format(count=_MAX_FRUITLESS, wanted=wanted), 1)
            missed = before.members | (before.offered_members if before.offered else frozenset())
            needed = wanted or missed.intersection(dead)
            if needed and (verdict := self._recover(dead, wanted or "failure")):
                return verdict
            self._move_on()

    def _apply(self, event: Event) -> None:
        if isinstance(event, RankDied):
            self._exits[event.rank] = event.code
        if isinstance(event, RankFinished):
            self._early = event.early
        before, self._state = self._state, apply(self._state, event)
        if isinstance(event, RankJoined):
            self._welcome(event, before)
        elif isinstance(event, OfferFailed) and event.generation == self._state.offered:
            self._journal.event("offer_failed", generation=event.generation, why=event.reason, echo=True)
            self._state, self._offered = replace(self._state, offered=0), None
            self._tries.failed()
        elif isinstance(event, GenerationLive):
            self._goes_on(event)

    def _goes_on(self, event: GenerationLive) -> None:
        if event.done > self._done:
            self._done, self._fruitless = event.done, 0
        if not self._state.is_live:
            return
        if self._offered is not None and self._state.generation == self._offered.number:
            self._current, self._offered = self._offered, None
            self._tries.begin_anew()
        if self._current is not None:
            self._live_plan = self._current.plan
            if not self._state.joining:
                # Every member has read this generation, so nobody still waits for an earlier one.
                self._control.forget_before(self._current.number)

    # -- ranks that come back, and layouts that are entered between two steps -------------------------

    def _welcome(self, event: RankJoined, before: ClusterState) -> None:
        answer = keys.welcome_key(event.rank, event.incarnation)
        if before is self._state:
            return self._control.put(answer, keys.NOT_WELCOME)
        self._exits.pop(event.rank, None)
        self._tries.begin_anew()
        self._fruitless = 0
        self._leases.watch(event.node)
        self._control.put(answer, str(self._state.newest))
        self._journal.event("rank_joined", generation=self._state.newest, echo=True, target=event.rank)

    def _move_on(self) -> None:
        """Offers the next generation on the way to something better, when the last one is live."""
        state, live = self._state, self._live_plan
        if live is None or state.offered or not state.is_live or self._tries.waits():
            return
        began_s, rows = time.monotonic(), tuple[CandidateRow, ...]()
        self._state, better = self._rebalancing.look(self._learning.diagnosis, state, live, began_s)
        state, why = self._state, self._target_why
        if state.fresh:
            try:
                decided = self._planner.decide(state, live, began_s)
            except OdysseyError as error:
                _log.warning("no plan with the ranks that have joined: %s", error)
                self._tries.failed(for_now=True)
                return
            target, rows = decided.plan, decided.rows
            self._target, self._target_why = lambda: target, "the layers have moved"
            why = f"rank(s) {list(state.fresh_ranks)} joined"
        elif better is not None:
            target, rows, why = better.decided.plan, better.decided.rows, better.why
            self._target, self._target_why = lambda: target, why
        elif self._target is None or (target := self._target()).layout == live.layout:
            self._target = None
            return
        plan = self._planner.towards(state, live, target)
        self._state = offer_generation(state)
        self._offered = self._generation(
            self._state.offered, plan, live, why, decide_s=time.monotonic() - began_s, planned=True
        )
        self._send(self._offered)
        self._record(self._offered, rows)

    def _note_deaths(self, dead: list[int], deaths: Sequence[RankDied | NodeLost]) -> None:
        reports = {one.rank: one for one in deaths if isinstance(one, RankDied)}
        nodes = {one.node for one in deaths if isinstance(one, NodeLost)}
        causes = {
            reports[rank].cause if rank in reports else "node" if self._nodes[rank] in nodes else "cell"
            for rank in dead
        }
        self._journal.event(
            "failure_detected",
            generation=self._state.generation,
            echo=True,
            dead=dead,
            code=[reports[rank].code if rank in reports else -9 for rank in dead],
            cause=",".join(sorted(causes)),
        )

    def _hopeless(self, dead: list[int]) -> Verdict | None:
        """A verdict if the ranks end by their own failure, all or before the first step."""
        codes = {self._exits.get(rank, -9) for rank in dead}
        refused = self._control.peek(keys.REFUSED) or ""
        if EXIT_UNSOUND in codes:
            return self._stop(refused, EXIT_UNSOUND)
        if EXIT_ALIKE in codes:
            return self._stop(refused, 1)
        if EXIT_BAD_INPUT in codes and refused:
            return self._stop(refused, EXIT_BAD_INPUT)
        own = len(codes) == 1 and min(codes) > 0
        if own and (not self._state.ranks or self._live_plan is None):
            (code,) = codes
            return Verdict(code=code, why=f"rank(s) {dead} ended with exit code {code}; their logs say why.")
        if not self._state.ranks:
            if not any(self._exits.get(rank, -9) for rank in range(self._world_size)):
                return Verdict(code=0)  # all left with exit code 0, though without finishing the job
            return Verdict(code=EXIT_LAYERS_LOST, why="no rank is left. Restart from the last checkpoint.")
        return None

    def _recover(self, dead: list[int], why: str) -> Verdict | None:
        began_s = time.monotonic()
        known = self._live_plan or self._start_plan
        assert known is not None
        self._learning.catch_up()
        try:
            decided = self._planner.decide(without_fresh(self._state), known, began_s)
        except LayersLost as error:
            return self._layers_lost(error)
        except OdysseyError as error:
            return self._stop(f"no plan for the surviving ranks: {error}", 1)
        plan, self._target, self._target_why = decided.plan, decided.target, "the layers have moved"
        if self._live_plan is None:
            # Nobody has trained yet: every rank makes its layers, and there is nothing to send.
            plan = replace(plan, transfers=(), transition_s=0.0)
        self._publish(plan, self._live_plan, why, tuple(dead), decided.rows, began_s)
        return None

    def _layers_lost(self, error: LayersLost) -> Verdict:
        gone = [rank for rank in range(self._world_size) if rank not in self._state.ranks]
        codes = {self._exits.get(rank, -9) for rank in gone}
        if len(codes) == 1 and min(codes) > 0:  # they failed by themselves, all alike: no lost hardware
            (code,) = codes
            return self._stop(f"rank(s) {gone} ended with exit code {code}; their logs say why.", code)
        return self._stop(str(error), EXIT_LAYERS_LOST)

    def _finish(self) -> Verdict:
        """Tells the members that all have finished, and waits for their exit codes."""
        members = set(self._state.ranks)
        self._put(Generation(
            number=next_generation(self._state).generation, members=(), dead=(), why=FINISHED, previous=None, plan=None,
            plan_hash="",
        ))  # fmt: skip
        self._planner.finish(self._learning.observations())
        says_s = time.monotonic() + _WAITS_S
        while waits := members - set(self._exits):
            if time.monotonic() > says_s:
                self._say(f"[odyssey] all steps are trained; rank(s) {sorted(waits)} have not ended yet.")
                says_s += _WAITS_S
            for event in self._batch():
                if isinstance(event, RankDied):
                    self._exits[event.rank] = event.code
                elif isinstance(event, NodeLost):
                    on_it = {one for one in members if self._state.worker_of(one).node == event.node}
                    self._exits = dict.fromkeys(on_it, -9) | self._exits
        cut_short = [rank for rank in members if not self._control.has([keys.left_key(rank)])]
        exits = {rank: self._exits[rank] for rank in sorted(members)}
        return after_training(exits, cut_short, ended_behind=self._early)

    def _stop(self, message: str, code: int) -> Verdict:
        """Tells the members to stop; they leave with ``code`` by themselves."""
        self._put(Generation(
            number=next_generation(self._state).generation, members=self._state.ranks, dead=(), why="stop",
            previous=None, plan=None, plan_hash="", stop=message, stop_code=code,
        ))  # fmt: skip
        return Verdict(code=code, why=message, grace_s=_STOP_GRACE_S)

    # -- publishing -----------------------------------------------------------------------------------

    def _publish(
        self,
        plan: Plan,
        previous: Plan | None,
        why: str,
        dead: tuple[int, ...],
        rows: tuple[CandidateRow, ...],
        began_s: float,
    ) -> None:
        self._state, self._offered = next_generation(self._state), None
        self._tries.begin_anew()  # what nobody could enter from the last one may do from this one
        generation = self._generation(
            self._state.generation, plan, previous, why, dead, time.monotonic() - began_s
        )
        self._put(generation)
        self._record(generation, rows)

    def _generation(
        self,
        number: int,
        plan: Plan,
        previous: Plan | None,
        why: str,
        dead: tuple[int, ...] = (),
        decide_s: float = 0.0,
        planned: bool = False,
    ) -> Generation:
        state = self._state
        return Generation(
            number=number,
            members=tuple(sorted(state.offered_members if planned else state.members)),
            dead=dead,
            why=why,
            previous=None if previous is None else previous.layout,
            plan=plan,
            plan_hash=plan.hash(),
            decide_s=decide_s,
            planned=planned,
            incarnations=state.incarnations,
            fresh=state.waiting_ranks,
        )

    def _put(self, generation: Generation) -> None:
        self._current = generation
        self._send(generation)

    def _send(self, generation: Generation) -> None:
        send_generation(generation, len(self._state.workers[0].ranks), self._control)

    def _record(self, generation: Generation, rows: tuple[CandidateRow, ...]) -> None:
        plan = generation.plan
        assert plan is not None
        self._journal.event(
            "decision",
            generation=generation.number,
            echo=generation.number > 1,
            dead=list(generation.dead),
            why=generation.why,
            policy=plan.policy,
            plan_hash=generation.plan_hash,
            candidates=to_jsonable(rows),
            decide_s=generation.decide_s,
            planned=generation.planned,
            schedule=plan.schedule_text,
            layout=to_jsonable(plan.layout),
        )
        if rows:
            self._say(candidates_table(rows))

    # -- events ---------------------------------------------------------------------------------------

    def _batch(self) -> list[Event]:
        """The events of one incident."""
        if (current := self._live_plan or self._start_plan) is not None:
            self._learning.look(self._state, current)
        events = self._events(_TICK_S)
        if events:
            time.sleep(_COALESCE_S)
            events += self._events(0.0)
        return events

    def _events(self, timeout_s: float) -> list[Event]:
        found, self._unheard = self._unheard, []
        for event in self._queue.take(0.0 if found else timeout_s):
            if isinstance(event, str):
                _log.warning("dropped a malformed event: %s", event)
            else:
                found.append(replace(event, t_s=time.monotonic()) if isinstance(event, RankDied) else event)
        return found + self._leases.expired(time.monotonic())
